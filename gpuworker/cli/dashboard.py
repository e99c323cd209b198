"""`gpuworker dashboard`: the status page of one or more workers in a browser."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from gpuworker.cli.address import host, port
from gpuworker.cli.target import attach, worker_name
from gpuworker.cli.web_server import Reply, WebServer


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "dashboard",
        help="the status page of workers, in a browser",
        description="Serves a page with live charts of what workers do, until SIGTERM or Ctrl-C, and prints its address. It only reads: nothing can be changed "
        "through it.",
        allow_abbrev=False,
    )
    parser.add_argument("names", metavar="NAME", type=worker_name, nargs="+")
    parser.add_argument("--host", type=host, default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=port, default=0, metavar="N", help="port to listen on (default: any free one)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves the page. Raises WorkerNotFound for a name that does not exist at the start, CommandError for an address that cannot be had."""
    for name in args.names:
        attach(name)  # later it may come and go
    return server_of(args.names, args.host, args.port).run()


def server_of(names: Sequence[str], host: str = "127.0.0.1", port: int = 0) -> WebServer:
    """Shows these workers to whoever can reach the address. Raises CommandError."""
    page: Any = importlib.import_module("gpuworker.frontends.page")  # by name: applications are on top of the library
    workers = list(dict.fromkeys(names))

    def answer(path: str) -> Reply:
        if path == "/":
            return Reply(page.page(), page.PAGE_HEADERS)
        if path == "/status.json":
            return Reply(json.dumps(page.snapshot(workers), allow_nan=False).encode(), page.DATA_HEADERS)
        return Reply(b"there is nothing at this path\n", status=HTTPStatus.NOT_FOUND)

    return WebServer(host, port, answer)
