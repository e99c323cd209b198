"""/metrics and /healthz over HTTP, for machines whose workers have no web application beside them. One thread: a scrape takes it less than a millisecond."""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import signal
import socket
import socketserver
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from gpuworker.errors import GpuWorkerError
from gpuworker.metrics import METRICS_CONTENT_TYPE, render_metrics, which_are_up

log = logging.getLogger("gpuworker.metrics")

SILENCE_S = 2.0
"""A client that says nothing for so long is dropped: others wait for it."""

MOST_HEADERS, LONGEST_HEADER_BYTES = 100, 65536


def parse_address(text: str) -> tuple[str, int]:
    """From "9400", "0.0.0.0:9400" or "[::1]:9400" the host and the port. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{text}: give a port from 0 to 65535, with a host before it if you like: 127.0.0.1:9400")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


class MetricsServer(http.server.HTTPServer):
    """Listens as soon as it is made. `names`: of which workers (None: all of this user's). Raises OSError for an address that is not to be had."""

    def __init__(self, address: tuple[str, int], names: Sequence[str] | None = None) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.names = names
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """As the base class's, without asking the resolver for our name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def run(self) -> None:
        """Serves until SIGTERM or Ctrl-C, then listens no more. For the main thread."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with self, contextlib.suppress(KeyboardInterrupt):
            self.serve_forever()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One scrape has failed, mostly since the other side has gone."""
        log.debug("a request of %s failed", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = SILENCE_S
    raw_requestline: bytes

    def parse_request(self) -> bool:
        """As the base class's, for a tenth of its time: nothing in the headers is of interest."""
        words = self.raw_requestline.decode("latin-1").split()
        self.close_connection, self.requestline, self.request_version = True, " ".join(words), "HTTP/1.0"
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        self.command, self.path = words[:2]
        for _ in range(MOST_HEADERS):
            if self.rfile.readline(LONGEST_HEADER_BYTES) in (b"\r\n", b"\n", b""):
                return True
        self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        return False

    def do_GET(self) -> None:
        """Answers."""
        path = self.path.partition("?")[0]
        try:
            if path == "/metrics":
                self._answer(HTTPStatus.OK, METRICS_CONTENT_TYPE, render_metrics(self.server.names))
            elif path == "/healthz":
                up = which_are_up(self.server.names)
                status = HTTPStatus.OK if up and all(up.values()) else HTTPStatus.SERVICE_UNAVAILABLE
                self._answer(status, "application/json", json.dumps({"up": up}).encode())
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"there are /metrics and /healthz\n")
        except GpuWorkerError as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", f"{error}\n".encode())

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        """For the Server header."""
        return "gpuworker"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (http.server's name)
        """Scrapes are not worth a line each."""
        log.debug(format, *args)
