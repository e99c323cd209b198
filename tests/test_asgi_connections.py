"""What callers do to a connection: long and chunked bodies, keys, leaving, not reading."""

import asyncio
import json
import os

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount

import gpuworker
from gpuworker.frontends.asgi import make_app
from tests.conftest import Gate, eventually
from tests.web import Visitor, call, get, post

INFER = "/v2/models/m/infer"
ONE = json.dumps({"inputs": [{"name": "input", "datatype": "INT64", "shape": [1], "data": [1]}]}).encode()
TWO = json.dumps({"inputs": [{"name": "input", "datatype": "INT64", "shape": [2], "data": [1, 2]}]}).encode()


@pytest.fixture
def worker(in_process):
    return in_process(lambda requests: requests)


async def happens(condition):
    give_up = asyncio.get_running_loop().time() + 30
    while not condition():
        assert asyncio.get_running_loop().time() < give_up, "it did not happen"
        await asyncio.sleep(0.002)


def visit(app, body=ONE, path=INFER, **more):
    """A visitor that stays. -> what was sent."""

    async def run():
        visitor = Visitor(app, path, body, **more).start()
        await visitor.task
        return visitor.sent

    return asyncio.run(run())


def test_bodies_that_come_in_pieces(worker):
    app = make_app({"m": worker.name})
    assert visit(app, pieces=[ONE[:5], b"", ONE[5:30], ONE[30:]])[0]["status"] == 200
    assert visit(app, pieces=[ONE, b""])[0]["status"] == 200


@pytest.mark.parametrize("path", [INFER, "/v1/embeddings"])
def test_limits_of_size(worker, path):
    app = make_app({"m": worker.name}, max_body_bytes=300, max_json_bytes=200)
    for pieces, headers in (
        ([b" " * 301], []),
        ([b" " * 200, b" " * 101], []),
        ([b"x"], [(b"content-length", b"301")]),
        ([b"x"], [(b"content-length", b"9" * 40)]),
        ([b"x"], [(b"content-length", b"-1")]),
        ([b" " * 201], []),
    ):
        sent = visit(app, path=path, pieces=pieces, headers=headers)
        assert sent[0]["status"] == 413
        assert b"is longer than" in sent[1]["body"]
    assert visit(app, path=path, pieces=[b" " * 150], headers=[(b"content-length", b"150")])[0]["status"] == 400


def test_what_the_worker_does_not_take_is_too_large(in_process):
    app = make_app({"m": in_process(lambda requests: requests, max_request_bytes=64, max_payload_bytes=100).name})
    rows = {"inputs": [{"name": "input", "datatype": "INT64", "shape": [1, 50], "data": [1] * 50}]}
    assert post(app, INFER, rows)[0] == 413
    assert post(app, "/v1/embeddings", {"model": "m", "input": "x" * 200})[0] == 413


def test_an_answer_that_is_too_large_is_not_the_callers_fault(in_process):
    app = make_app({"m": in_process(lambda requests: ["x" * 1000 for _ in requests], max_response_bytes=512, max_payload_bytes=600).name})
    assert visit(app)[0]["status"] == 500


def test_compressed_bodies_are_refused(worker):
    assert visit(make_app({"m": worker.name}), headers=[(b"content-encoding", b"gzip")])[0]["status"] == 415


def test_other_methods_and_paths(worker):
    app = make_app({"m": worker.name})
    assert call(app, "GET", INFER).status_code == 405
    assert call(app, "GET", INFER).headers["allow"] == "POST"
    assert call(app, "POST", "/v2").status_code == 405
    assert isinstance(get(app, "/nothing")[1]["error"], str)
    assert get(app, "/v1/nothing")[1]["error"]["type"] == "invalid_request_error"
    assert get(app, "/v1/nothing")[0] == 404


def test_a_caller_that_leaves_before_it_runs_is_withdrawn(in_process):
    gate = Gate(is_open=False)
    worker = in_process(gate, max_batch_size=1)
    app = make_app({"m": worker.name})

    async def run():
        held = Visitor(app, INFER, ONE).start()
        await happens(lambda: gate.batches)
        for body in (ONE, TWO):
            leaving = Visitor(app, INFER, body).start()
            before = worker.stats().slots_in_use
            await happens(lambda before=before: worker.stats().slots_in_use > before)
            leaving.leave()
            await leaving.task
            assert not leaving.sent
        gate.open()
        await held.task
        assert held.sent[0]["status"] == 200

    asyncio.run(run())
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert len(gate.batches) == 1
    assert worker.stats().cancelled >= 2


def test_a_caller_that_leaves_before_its_body_is_there(worker):
    async def run():
        visitor = Visitor(make_app({"m": worker.name}), INFER, pieces=[b"{", b""])
        visitor._pieces[1:] = []
        receive, first = visitor.receive, [True]

        async def half():
            if first:
                first.clear()
                return {"type": "http.request", "body": b"{", "more_body": True}
            return await receive()

        visitor._pieces, visitor.receive = [], half
        visitor.start().leave()
        await visitor.task
        return visitor.sent

    assert asyncio.run(run()) == []


def test_an_application_that_is_cancelled_by_its_server_says_so(in_process):
    gate = Gate(is_open=False)
    app = make_app({"m": in_process(gate).name})

    async def run():
        visitor = Visitor(app, INFER, ONE).start()
        await happens(lambda: gate.batches)
        visitor.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await visitor.task

    asyncio.run(run())
    gate.open()


def keyed(file, *keys):
    other = file.with_suffix(".new")
    other.write_text("# ours\n\n" + "".join(f"{key}\n" for key in keys))
    os.replace(other, file)


def test_keys(worker, tmp_path, caplog):
    file = tmp_path / "keys"
    keyed(file, "one", "two ")
    app = make_app({"m": worker.name}, api_keys_file=str(file), extra_routes={"/x": PlainTextResponse("extra"), "/": PlainTextResponse("ours")})
    for given in (None, "Bearer", "Bearer ", "Bearer three", "Basic one", "one", "Bearer one two", "Bearer # ours", "Bearer \u00fc"):
        headers = {} if given is None else {"Authorization": given.encode("latin-1")}
        response = call(app, "GET", "/v1/models", **headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v2", "/v2/models/m", "/x", "/nothing", "/metrics", "/", "/status.json"):
            assert call(app, "GET", path, **headers).status_code == 401
        assert call(app, "GET", "/v2/health/ready", **headers).status_code == 200
        assert call(app, "GET", "/healthz", **headers).status_code == 200
    assert visit(app)[0]["status"] == 401
    for given in ("Bearer one", "bearer two"):
        assert get(app, "/v1/models", Authorization=given)[0] == 200
        assert call(app, "GET", "/x", Authorization=given).text == "extra"
        assert call(app, "GET", "/", Authorization=given).text == "ours"
        assert visit(app, headers=[(b"authorization", given.encode())])[0]["status"] == 200
    keyed(file, "three")
    assert get(app, "/v1/models", Authorization="Bearer one")[0] == 401
    assert get(app, "/v1/models", Authorization="Bearer three")[0] == 200
    file.unlink()
    assert get(app, "/v1/models", Authorization="Bearer three")[0] == 401
    assert "nobody is let in" in caplog.text
    keyed(file)
    assert get(app, "/v1/models", Authorization="Bearer ")[0] == 401
    keyed(file, "four")
    assert get(app, "/v1/models", Authorization="Bearer four")[0] == 200


def test_a_file_of_keys_that_becomes_something_else_lets_nobody_in_and_holds_nobody_up(worker, tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")  # as an editor on Windows leaves it
    file.chmod(0o644)
    app = make_app({"m": worker.name}, api_keys_file=str(file))
    assert "every user of this machine can read these keys" in caplog.text
    for key in ("one", "two"):
        assert get(app, "/v1/models", Authorization=f"Bearer {key}")[0] == 200
    for change in (lambda: os.mkfifo(file), file.mkdir, lambda: file.symlink_to("/dev/zero"), lambda: file.write_bytes(b"one\n" * (1 << 19))):
        file.rmdir() if file.is_dir() else file.unlink()
        change()
        assert get(app, "/v1/models", Authorization="Bearer one")[0] == 401
    with pytest.raises(ValueError, match="not a regular file of at most 1 MiB"):
        make_app({"m": worker.name}, api_keys_file="/dev/zero")


def test_files_without_keys_are_refused_at_the_start(worker, tmp_path):
    with pytest.raises(FileNotFoundError):
        make_app(worker.name, api_keys_file=str(tmp_path / "none"))
    keyed(tmp_path / "keys")
    with pytest.raises(ValueError, match="no key in it"):
        make_app(worker.name, api_keys_file=str(tmp_path / "keys"))


def test_models_need_names():
    for models in ({}, {"": "x"}, {"a\nb": "x"}, {1: "x"}, ""):
        with pytest.raises(ValueError, match="model"):
            make_app(models)


def test_what_is_watched(worker):
    app = make_app({"m": worker.name, "same": worker.name})
    metrics = call(app, "GET", "/metrics")
    assert metrics.status_code == 200
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert f'gpuworker_up{{worker="{worker.name}"}} 1' in metrics.text
    page = call(app, "GET", "/")
    assert page.text.lower().startswith("<!doctype html>")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    status, figures = get(app, "/status.json")
    assert (status, [one["name"] for one in figures["workers"]]) == (200, [worker.name])


def test_it_can_be_mounted_in_another_application(worker):
    outer = Starlette(routes=[Mount("/models", app=make_app({"m": worker.name}))])
    assert get(outer, "/models/v2/health/ready")[0] == 200
    assert call(outer, "POST", "/models" + INFER, ONE).status_code == 200


def test_a_client_of_ones_own(worker):
    async def run():
        client = gpuworker.AsyncClient(worker.name)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(make_app({"m": client})), base_url="http://web") as web:
            response = await web.post(INFER, content=ONE)
        await client.aclose()
        return response.status_code

    assert asyncio.run(run()) == 200


def test_the_servers_own_events(worker):
    """The clients are closed at the end; what is no HTTP is refused."""
    app = make_app({"m": worker.name})

    async def run():
        events, sent = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}], []

        async def receive():
            return events.pop(0)

        async def send(message):
            sent.append(message["type"])

        await app({"type": "lifespan"}, receive, send)
        await app({"type": "websocket"}, receive, send)
        return sent

    assert asyncio.run(run()) == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]
