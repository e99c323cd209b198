"""The status page (page.py) by itself, for workers without a web application: what `gpuworker dashboard` runs. The standard library's server, a thread a viewer."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from . import page

IDLE_S = 30.0
"""How long a connection may say nothing."""


class Dashboard(ThreadingHTTPServer):
    """Shows the workers of these names to whoever can reach the address: by default only processes of this machine. Nothing can be changed through it."""

    daemon_threads = True

    def __init__(self, names: Sequence[str], host: str = "127.0.0.1", port: int = 0) -> None:
        """port: 0 for any free one. Raises OSError where the address cannot be had."""
        self.names = tuple(names)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Where the page is."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host!s}]' if self.address_family == socket.AF_INET6 else host!s}:{port}/"

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of the host's own name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A viewer that has closed the page is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "gpuworker", ""
    timeout = IDLE_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/":
            self._send(HTTPStatus.OK, page.page(), page.PAGE_HEADERS)
        elif path == "/status.json":
            self._send(HTTPStatus.OK, json.dumps(page.snapshot(self.server.names), allow_nan=False).encode(), page.DATA_HEADERS)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is nothing at this path\n", (("Content-Type", "text/plain"),))

    do_HEAD = do_GET  # noqa: N815

    def _send(self, status: HTTPStatus, body: bytes, headers: Sequence[tuple[str, str]]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """A line a second for each viewer would tell nobody anything."""
