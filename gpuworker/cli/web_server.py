"""A few pages over HTTP, for machines whose workers have no web application beside them. The standard library's server, without what nobody here asks for."""

from __future__ import annotations

import contextlib
import http.server
import io
import logging
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from gpuworker.cli.address import is_loopback
from gpuworker.cli.stdout import remark
from gpuworker.cli.target import CommandError
from gpuworker.errors import GpuWorkerError

log = logging.getLogger("gpuworker.web")

PATIENCE_S = 2.0
"""A client has so long to send its request, and so long to read the answer."""
MOST_CONNECTIONS = 64
"""At a time; more are closed at once."""
MOST_HEADERS, LONGEST_REQUEST_BYTES = 100, 1 << 17


class Reply(NamedTuple):
    """What a path gets."""

    body: bytes
    headers: Sequence[tuple[str, str]] = (("Content-Type", "text/plain; charset=utf-8"),)
    status: HTTPStatus = HTTPStatus.OK


class WebServer(http.server.ThreadingHTTPServer):
    """Answers GET and HEAD, each in a thread of its own, and not for long: whoever asks slowly, or never reads, holds up nobody else. Listens as soon as it is
    made."""

    def __init__(self, host: str, port: int, answer: Callable[[str], Reply]) -> None:
        """port: 0 for any free one. answer: what a path gets, without its query; it may raise GpuWorkerError. Raises CommandError for an address that is not
        to be had."""
        self.answer = answer
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise CommandError(f"{host} port {port} cannot be listened on: {error.strerror or error}") from None

    def server_bind(self) -> None:
        """As the base class's, without asking the resolver for our name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    @property
    def url(self) -> str:
        """Where it is."""
        host = f"[{self.server_name}]" if self.address_family == socket.AF_INET6 else self.server_name
        return f"http://{host}:{self.server_port}/"

    def run(self) -> int:
        """Prints where it is, and serves until SIGTERM or Ctrl-C. For the main thread. -> the exit code."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with self, contextlib.suppress(KeyboardInterrupt):
            remark(self.url)
            if not is_loopback(self.server_name):
                print("gpuworker: whoever can reach this address can see it", file=sys.stderr)
            self.serve_forever()
        return 0

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, if not too many run already."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # there is no thread to be had
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In that thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One request has failed, mostly since the other side has gone."""
        log.debug("a request of %s failed", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: WebServer
    timeout = PATIENCE_S
    raw_requestline: bytes

    def handle(self) -> None:
        """One request, that comes whole within its time."""
        self.rfile = io.BytesIO(self._request())
        self.connection.settimeout(self.timeout)
        super().handle()

    def _request(self) -> bytes:
        """Request line and headers. Raises TimeoutError."""
        found, give_up_s = b"", time.monotonic() + self.timeout
        while b"\r\n\r\n" not in found and b"\n\n" not in found and len(found) < LONGEST_REQUEST_BYTES:
            self.connection.settimeout(max(give_up_s - time.monotonic(), 1e-3))
            part = self.connection.recv(LONGEST_REQUEST_BYTES)
            if not part:
                break
            found += part
        return found

    def parse_request(self) -> bool:
        """As the base class's, for a tenth of its time: nothing in the headers is of interest."""
        words = self.raw_requestline.decode("latin-1").split()
        self.close_connection, self.requestline, self.request_version = True, " ".join(words), "HTTP/1.0"
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        self.command, self.path = words[:2]
        for _ in range(MOST_HEADERS):
            if self.rfile.readline() in (b"\r\n", b"\n", b""):
                return True
        self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        return False

    def do_GET(self) -> None:
        """Answers."""
        try:
            reply = self.server.answer(self.path.partition("?")[0])
        except GpuWorkerError as error:
            reply = Reply(f"{error}\n".encode(), status=HTTPStatus.INTERNAL_SERVER_ERROR)
        self.send_response(reply.status)
        for name, value in (*reply.headers, ("Content-Length", str(len(reply.body)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    do_HEAD = do_GET  # noqa: N815

    def version_string(self) -> str:
        """For the Server header."""
        return "gpuworker"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (http.server's name)
        """A line for each scrape, or a second for each viewer, would tell nobody anything."""
        log.debug(format, *args)
