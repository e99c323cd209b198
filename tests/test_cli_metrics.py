"""`gpuworker metrics`, printed and served; and /metrics of the WSGI applications."""

import contextlib
import http.client
import io
import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import ArgumentTypeError
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest

import gpuworker
from gpuworker.cli import main, web_server
from gpuworker.cli.address import host_and_port
from gpuworker.cli.metrics import server_of
from gpuworker.frontends import metrics
from gpuworker.frontends.wsgi import make_app

from .conftest import Gate, eventually
from .exposed import samples, value


@pytest.fixture
def serve():
    """Starts servers in threads; -> a function that asks one: (method, path) -> (status, content type, body)."""
    started = []

    def start(names=None):
        server = server_of(names, "127.0.0.1", 0)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        started.append((server, thread))

        def ask(path, method="GET"):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return answer.status, answer.headers["Content-Type"], body

        ask.port = server.server_port
        return ask

    yield start
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()


def test_printed_once(in_process, capsys):
    first, second = in_process(Gate()), in_process(Gate())
    with first.connect() as client:
        client.submit(0)
    assert main(["metrics", first.name]) == 0
    out = capsys.readouterr().out
    assert value(out.encode(), "gpuworker_requests_completed_total") == 1
    assert second.name not in out
    assert main(["metrics"]) == 0
    assert f'gpuworker_up{{worker="{second.name}"}} 1\n' in capsys.readouterr().out


def test_a_name_that_is_not_there_is_a_mistake_when_printed(in_process, capsys):
    worker = in_process(Gate())
    assert main(["metrics", worker.name, worker.name + "s"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"did you mean {worker.name!r}?" in err


def test_served(in_process, serve):
    worker = in_process(Gate())
    ask = serve([worker.name])
    status, content_type, body = ask("/metrics")
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert value(body, "gpuworker_up") == 1
    assert ask("/metrics?name=x")[0] == 200
    assert ask("/metrics", "HEAD")[2] == b""
    assert ask("/")[0] == ask("/metrics/x")[0] == 404
    assert ask("/metrics", "POST")[0] == 501
    status, content_type, body = ask("/healthz")
    assert (status, content_type, json.loads(body)) == (200, "application/json", {"up": {worker.name: True}})
    worker.stop()
    assert ask("/healthz")[0] == 503
    status, _, body = ask("/metrics")
    assert (status, samples(body)) == (200, {("gpuworker_up", ()): 0})


def test_a_client_that_says_nothing_or_nonsense_does_not_end_it(in_process, serve, monkeypatch):
    monkeypatch.setattr(web_server._Handler, "timeout", 0.05)
    ask = serve([in_process(Gate()).name])
    with socket.create_connection(("127.0.0.1", ask.port)), socket.create_connection(("127.0.0.1", ask.port)) as other:
        other.sendall(b"\xff\xff nonsense\r\n\r\n")
        assert ask("/metrics")[0] == 200


def test_who_asks_slowly_or_never_reads_holds_up_nobody(in_process, serve, monkeypatch):
    ask = serve([in_process(Gate()).name])
    with contextlib.ExitStack() as stack:
        silent, slow, deaf = (stack.enter_context(socket.create_connection(("127.0.0.1", ask.port))) for _ in range(3))
        slow.sendall(b"GET /metrics HTTP/1.0\r\nA: ")
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        deaf.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        began_s = time.monotonic()
        assert ask("/metrics")[0] == 200
        slow.settimeout(60)
        with contextlib.suppress(OSError):
            while not select.select([slow], [], [], 0.1)[0]:
                slow.sendall(b"a")  # one at a time does not make it longer
        assert time.monotonic() - began_s < 30
        silent.settimeout(60)
        assert silent.recv(1) == b""
    monkeypatch.setattr(web_server, "MOST_CONNECTIONS", 1)
    ask = serve([in_process(Gate()).name])
    with socket.create_connection(("127.0.0.1", ask.port)), socket.create_connection(("127.0.0.1", ask.port)) as one_too_many:
        one_too_many.settimeout(60)
        assert one_too_many.recv(1) == b""
    eventually(lambda: _status(ask) == 200)


def _status(ask):
    with contextlib.suppress(OSError, http.client.HTTPException):
        return ask("/metrics")[0]


def test_the_command_serves_until_it_is_told_to_stop(in_process):
    worker = in_process(Gate())
    command = [sys.executable, "-m", "gpuworker.cli", "metrics", worker.name, "--listen", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline().rpartition(":")[2].removesuffix("/\n"))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/metrics")
        assert value(connection.getresponse().read(), "gpuworker_up") == 1
        assert main(["metrics", "--listen", str(port)]) == 1  # the port is taken
        process.send_signal(signal.SIGTERM)
        assert (process.wait(60), process.stderr.read()) == (0, "")


def test_addresses():
    assert host_and_port("9400") == ("127.0.0.1", 9400)
    assert host_and_port("0.0.0.0:0") == ("0.0.0.0", 0)
    assert host_and_port("[::1]:9400") == ("::1", 9400)
    for wrong in ("", "host:", "host", "1:2:x", "65536", "-1", "\u0661"):
        with pytest.raises(ArgumentTypeError, match="give a port"):
            host_and_port(wrong)
    with pytest.raises(SystemExit):
        main(["metrics", "--listen", "port"])


def wsgi(app, path, method="GET"):
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "SCRIPT_NAME": "", "QUERY_STRING": "", "wsgi.input": io.BytesIO(b"")}
    setup_testing_defaults(environ)
    started = []
    parts = validator(app)(environ, lambda status, headers, exc_info=None: started.append((status, dict(headers))))
    body = b"".join(parts)
    parts.close()
    return started[0][0], started[0][1], body


def test_the_wsgi_app_has_its_own_workers(in_process):
    worker, other = in_process(Gate()), in_process(Gate())
    status, headers, body = wsgi(make_app(worker.name), "/metrics")
    assert (status, headers["Content-Type"], headers["Content-Length"]) == ("200 OK", metrics.CONTENT_TYPE, str(len(body)))
    assert value(body, "gpuworker_up") == 1
    assert other.name.encode() not in body
    assert wsgi(make_app(worker.name), "/metrics", "POST")[0].startswith("405")


def test_a_wsgi_app_of_metrics_alone(in_process):
    worker = in_process(Gate())
    status, headers, body = wsgi(metrics.make_metrics_app([worker.name]), "/anywhere")
    assert (status, headers["Content-Type"]) == ("200 OK", metrics.CONTENT_TYPE)
    assert value(body, "gpuworker_up") == 1
    assert f'worker="{worker.name}"'.encode() in wsgi(metrics.make_metrics_app(), "/")[2]
    assert wsgi(metrics.make_metrics_app(), "/", "HEAD")[2] == b""
    assert wsgi(metrics.make_metrics_app(), "/", "POST")[0].startswith("405")
    assert metrics.render is gpuworker.render_metrics
