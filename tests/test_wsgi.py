"""The WSGI application alone, in front of an in-process worker."""

import dataclasses
import io
import json
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import numpy as np
import pytest

import gpuworker
from gpuworker.frontends import health
from gpuworker.frontends.wsgi import make_app

from .conftest import Gate, eventually


class Web:
    """Calls a WSGI application as a server would."""

    def __init__(self, app):
        self.app, self.log = validator(app), ""

    def __call__(self, method="POST", path="/", body=b"", query="", **environ):
        errors = io.StringIO()
        environ = {"REQUEST_METHOD": method, "SCRIPT_NAME": "/api", "PATH_INFO": path, "QUERY_STRING": query, **environ}
        environ |= {"wsgi.input": io.BytesIO(body), "wsgi.errors": errors}
        if body:
            environ.setdefault("CONTENT_LENGTH", str(len(body)))
        setup_testing_defaults(environ)
        started = []
        parts = self.app(environ, lambda status, headers, exc_info=None: started.append((status, headers)))
        content = b"".join(parts)
        parts.close()
        self.log = errors.getvalue()
        status, self.headers = started[0][0], dict(started[0][1])
        assert method == "HEAD" or int(self.headers["Content-Length"]) == len(content)
        return int(status.split()[0]), json.loads(content) if content else None

    def post(self, value, **environ):
        return self(body=json.dumps(value).encode(), **environ)


@pytest.fixture
def web(in_process):
    def start(handler, *, options=None, **app_options):
        return Web(make_app(in_process(handler, **(options or {})).name, **app_options))

    return start


def raising(make_error):
    def run_batch(requests):
        raise make_error()

    return run_batch


@pytest.mark.parametrize("path", ["/", "", "/submit", "/submit/"])
def test_the_body_is_the_request_and_the_answer(web, path):
    assert web(lambda requests: [[r, len(requests)] for r in requests])("POST", path, b'{"request": [1, 2.5, null, "\xc3\xa9"]}') == (
        200,
        [{"request": [1, 2.5, None, "é"]}, 1],
    )


@pytest.mark.parametrize(
    ("answer", "json_form"),
    [
        (np.arange(6, dtype=np.float32).reshape(2, 3), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
        (np.float32(0.5), 0.5),
        ({"labels": np.array(["cat", "dog"]), "best": np.int64(1), "sure": np.bool_(True)}, {"labels": ["cat", "dog"], "best": 1, "sure": True}),
        (b"\x00\xff", "AP8="),
        ((float("nan"), float("inf")), [None, None]),
    ],
)
def test_answers_become_json(web, answer, json_form):
    assert web(lambda requests: [answer for _ in requests]).post(0) == (200, json_form)


def test_an_answer_without_a_json_form_is_the_servers_fault(web):
    client = web(lambda requests: [1 + 2j for _ in requests])
    status, body = client.post(0)
    assert (status, body["error"]["type"]) == (500, "UnsupportedPayload")
    assert "complex is no JSON value" in client.log


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'"\xff"', b"NaN", b"1 2", b"[" * 100_000])
def test_a_body_that_is_no_json_is_a_bad_request(web, body):
    status, answer = web(lambda requests: requests)(body=body)
    assert (status, answer["error"]["type"]) == (400, "BadRequest")
    assert answer["error"]["message"].startswith("the body is not JSON")


@pytest.mark.parametrize("body", [b"[" * 900 + b"]" * 900, b"9" * 400])
def test_strange_json_is_answered_or_refused_but_never_an_internal_error(web, body):
    assert web(lambda requests: [0 for _ in requests])(body=body)[0] in (200, 400)


@pytest.mark.parametrize(
    ("make_error", "status", "kind", "message"),
    [
        (lambda: ValueError("text is empty"), 400, "ValueError", "text is empty"),
        (lambda: ValueError("half a pair: \ud83d"), 400, "ValueError", "half a pair: ?"),
        (lambda: TypeError("a string is wanted"), 400, "TypeError", "a string is wanted"),
        (lambda: KeyError("secret"), 500, "KeyError", None),
        (lambda: FileNotFoundError(2, "No such file", "/srv/weights.bin"), 500, "FileNotFoundError", None),
        (lambda: type("OutOfMemory", (Exception,), {})("/srv"), 500, "OutOfMemory", None),
    ],
)
def test_errors_of_the_handler(web, make_error, status, kind, message):
    client = web(raising(make_error))
    got, body = client.post(0)
    error = body["error"]
    assert (got, error["type"]) == (status, kind)
    if message is None:
        assert "secret" not in str(body)
        assert "/" not in str(body)
        assert "Traceback" in client.log
        assert "test_wsgi.py" in client.log
    else:
        assert error["message"] == message
        assert client.log == ""


def test_one_bad_request_in_a_batch_fails_alone(web):
    client = web(lambda requests: [ValueError("odd") if r % 2 else r for r in requests])
    assert client.post(1)[0] == 400
    assert client.post(2) == (200, 2)


def test_no_free_slot_is_503_with_the_time_to_wait(in_process):
    gate = Gate(is_open=False)
    worker = in_process(gate, capacity=1)
    with worker.connect() as client:
        held = client.enqueue(0)
        gate.wait_entered()
        web = Web(make_app(worker.name))
        status, body = web.post(1)
        assert (status, body["error"]["type"]) == (503, "QueueFull")
        assert int(web.headers["Retry-After"]) >= 1
        assert body["error"]["retry_after_ms"] > 0
        gate.open()
        assert held.result() == 0
        assert web.post(1) == (200, 1)


def test_a_client_of_ones_own_decides_what_to_do_when_full(in_process):
    gate = Gate(is_open=False)
    worker = in_process(gate, capacity=1)
    with worker.connect(fallback=lambda request: "by the CPU") as client:
        held = client.enqueue(0)
        gate.wait_entered()
        assert Web(make_app(client)).post(1) == (200, "by the CPU")
        gate.open()
        held.result()


@pytest.mark.parametrize("asking", [{"HTTP_X_TIMEOUT_MS": "20"}, {"query": "timeout_ms=20"}])
def test_a_deadline_that_passes_is_504(web, asking):
    gate = Gate(is_open=False)
    status, body = web(gate).post(0, **asking)
    gate.open()
    assert (status, body["error"]["type"]) == (504, "DeadlineExceeded")
    assert body["error"]["stage"] in ("queued", "running")


def test_the_servers_own_limit_holds_whatever_is_asked(web):
    gate = Gate(is_open=False)
    assert web(gate, timeout=0.02).post(0, HTTP_X_TIMEOUT_MS="1e9")[0] == 504
    gate.open()


@pytest.mark.parametrize("asked", ["soon", "-1", "nan", "inf"])
def test_a_timeout_that_is_none_is_a_bad_request(web, asked):
    assert web(lambda requests: requests).post(0, HTTP_X_TIMEOUT_MS=asked)[0] == 400


def test_limits_of_size(web):
    client = web(lambda requests: [len(r) for r in requests], options={"max_request_bytes": 64, "max_payload_bytes": 100}, max_body_bytes=200)
    assert client.post("x" * 100) == (200, 100)
    assert client.post("x" * 150)[0] == 413  # what the worker takes
    status, body = client.post("x" * 500)  # what this application reads
    assert (status, body["error"]["type"]) == (413, "PayloadTooLarge")
    assert client(body=b'"chunked"', CONTENT_LENGTH="", **{"wsgi.input_terminated": True}) == (200, 7)
    assert client(body=b'"' + b"x" * 500, CONTENT_LENGTH="", **{"wsgi.input_terminated": True})[0] == 413


def test_an_answer_that_is_too_large_is_not_the_clients_fault(web):
    client = web(lambda requests: ["x" * 1000 for _ in requests], options={"max_response_bytes": 512, "max_payload_bytes": 600})
    assert client.post(0)[0] == 500


def test_other_methods_and_paths(web):
    client = web(lambda requests: requests)
    assert client("GET")[0] == 405
    assert client.headers["Allow"] == "POST"
    assert client("POST", "/healthz", b"1")[0] == 405
    assert client.headers["Allow"] == "GET, HEAD"
    status, body = client("GET", "/etc/passwd")
    assert (status, body["error"]["type"]) == (404, "NotFound")


def test_without_a_worker_everything_is_503(name):
    with gpuworker.connect(name, connect_timeout_s=0.0) as client:
        web = Web(make_app(client))
        status, body = web.post(0)
        assert (status, body["error"]["type"], web.headers["Retry-After"]) == (503, "WorkerNotFound", "1")
        assert web("GET", "/healthz") == (503, {"status": "absent", "worker": name})


def test_healthz_is_green_while_the_worker_serves(in_process):
    worker = in_process(lambda requests: requests)
    web = Web(make_app(worker.name))
    status, body = web("GET", "/healthz")
    assert (status, body["status"], body["owner_pid"]) == (200, "ok", worker.pid)
    assert web("HEAD", "/healthz") == (200, None)


def test_healthz_is_red_while_a_batch_takes_too_long(in_process):
    gate = Gate(is_open=False)
    worker = in_process(gate)
    web = Web(make_app(worker.name, long_batch_s=0.01))
    with worker.connect() as client:
        held = client.enqueue(0)
        eventually(lambda: web("GET", "/healthz")[1]["status"] == "stuck")
        assert web("GET", "/healthz")[0] == 503
        gate.open()
        held.result()
    eventually(lambda: web("GET", "/healthz")[0] == 200)


def test_what_makes_a_worker_unhealthy(in_process):
    well = in_process(lambda requests: requests).stats()
    well = dataclasses.replace(well, heartbeat_age_s=0.1, batch_running_s=0.0)

    def judged(**changes):
        return health.judge(dataclasses.replace(well, **changes), stale_heartbeat_s=5.0, long_batch_s=30.0)

    assert judged() == "ok"
    assert judged(batch_running_s=29.0) == "ok"
    assert judged(batch_running_s=31.0) == "stuck"
    assert judged(heartbeat_age_s=6.0) == "stuck"
    assert judged(owner_alive=False) == judged(state="restarting") == "restarting"
    assert judged(owner_alive=False, alive=False) == "dead"
    assert judged(owner_alive=False, alive=False, state="failed") == "failed"
    assert judged(state="starting") == "starting"
    assert judged(state="draining") == "draining"
