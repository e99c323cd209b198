"""The status page's figures, headers and server. What a browser makes of it: test_page_browser.py."""

import base64
import dataclasses
import hashlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from gpuworker.cli import main
from gpuworker.cli.target import CommandError
from gpuworker.frontends import page
from tests import handlers
from tests.conftest import kill_all

pytest_plugins = ("tests.dashboards",)


def ask(server, method, path):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    connection.request(method, path)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, dict(reply.getheaders()), body


def test_the_page_is_one_file_that_asks_for_nothing_elsewhere():
    text = page.page().decode()
    assert set(re.findall(r"\w+://[^\"'`\s]*", text)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?!data:,)", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|\son\w+=", text), "what workers say goes in as text only"
    assert len(text) < 40_000


def test_the_policy_allows_exactly_what_is_in_the_page():
    policy = dict(page.PAGE_HEADERS)["Content-Security-Policy"]
    for tag in ("script", "style"):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", page.page().decode(), re.DOTALL).group(1)
        assert f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}';" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_a_snapshot_has_the_statistics_and_nothing_secret(in_process, gate, monkeypatch):
    worker = in_process(gate, max_batch_size=4)
    client = worker.connect()
    client.submit(b"payload-in-person")
    stats = worker.stats()
    (found,) = page.snapshot([worker.name])["workers"]
    assert (found["name"], found["state"], found["counters"]["completed"], found["options"]["max_batch_size"]) == (worker.name, "serving", 1, 4)
    assert found["clients"] == [{"pid": stats.owner_pid, "slots": 0}]
    for stage, field in page.STAGES.items():
        h = getattr(stats, field)
        assert found["waits"][stage]["count"] == h.count
        assert sum(found["waits"][stage]["buckets"]) == h.count
    noted = dataclasses.replace(
        stats, note="the owner was killed. Its last words:\npassword", options={"max_batch_size": float("nan"), "cost_file": "/secret"}
    )
    monkeypatch.setattr(page.Stats, "of", lambda name, group: noted)
    shown = json.dumps(page.snapshot(["x"]), allow_nan=False)
    assert "the owner was killed" in shown
    assert not [word for word in ("password", "secret", "payload-in-person") if word in shown]


def test_what_is_not_there_or_no_worker_is_a_state(name, start):
    assert page.snapshot([name])["workers"] == [{"name": name, "state": "absent"}]
    assert page.snapshot(["../etc"])["workers"] == [{"name": "../etc", "state": "unusable"}]
    worker = start(handlers.identity)
    kill_all(worker)
    (found,) = page.snapshot([name])["workers"]
    assert (found["state"], found["counters"]["completed"]) == ("dead", 0)


def test_the_server_answers_get_and_head_and_nothing_else(in_process, gate, dashboard):
    worker = in_process(gate)
    server = dashboard(worker.name)
    status, headers, body = ask(server, "GET", "/?x")
    assert (status, body) == (200, page.page())
    assert set(page.PAGE_HEADERS) <= set(headers.items())
    status, headers, body = ask(server, "GET", "/status.json")
    assert (status, json.loads(body)["workers"][0]["name"]) == (200, worker.name)
    assert set(page.DATA_HEADERS) <= set(headers.items())
    assert ask(server, "HEAD", "/")[::2] == (200, b"")
    assert ask(server, "GET", "/status.json/../../etc/passwd")[0] == 404
    assert ask(server, "POST", "/status.json")[0] == 501


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_it_listens_on_ipv6_too(in_process, gate, dashboard):
    try:
        server = dashboard(in_process(gate).name, host="::1")
    except CommandError:
        pytest.skip("no IPv6 loopback")
    assert server.url == f"http://[::1]:{server.server_port}/"
    assert ask(server, "GET", "/")[0] == 200


def test_the_command_prints_where_it_is_and_ends_on_a_signal(in_process, gate):
    name = in_process(gate).name
    command = [sys.executable, "-m", "gpuworker.cli", "dashboard", name, name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url + "status.json", timeout=30) as reply:
            assert [worker["name"] for worker in json.load(reply)["workers"]] == [name]
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")
    finally:
        process.kill()
        process.communicate()


def test_what_cannot_be_served_is_a_clear_line(name, in_process, gate, dashboard, capsys):
    assert main(["dashboard", name]) == 1
    assert "no worker named" in capsys.readouterr().err
    worker = in_process(gate)
    port = dashboard(worker.name).server_port
    assert main(["dashboard", worker.name, "--port", str(port)]) == 1
    assert f"127.0.0.1 port {port} cannot be listened on: Address already in use" in capsys.readouterr().err
    for odd in ("70000", "-1", "http"):
        with pytest.raises(SystemExit, match="2"):
            main(["dashboard", worker.name, f"--port={odd}"])


def test_the_http_application_has_the_page_too(in_process, gate, tmp_path):
    from gpuworker.frontends.asgi import make_app
    from tests.web import call

    name = in_process(gate).name
    app = make_app({"a": name, "b": name})
    shown = call(app, "GET", "/")
    assert (shown.status_code, shown.content) == (200, page.page())
    assert {key.lower(): value for key, value in page.PAGE_HEADERS}.items() <= dict(shown.headers).items()
    figures = call(app, "GET", "/status.json")
    assert [worker["name"] for worker in figures.json()["workers"]] == [name]
    assert call(app, "POST", "/").status_code == 405
    keys = tmp_path / "keys"
    keys.write_text("a-key-that-is-long-enough-to-be-one\n")
    closed = make_app(name, api_keys_file=str(keys))
    assert [call(closed, "GET", path).status_code for path in ("/", "/status.json")] == [401, 401]
