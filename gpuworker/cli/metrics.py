"""`gpuworker metrics`: statistics for Prometheus, printed once or served. It only reads segments, so it needs no owner to be there, and disturbs none."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from gpuworker.cli.address import host_and_port
from gpuworker.cli.stdout import show
from gpuworker.cli.target import attach, worker_name
from gpuworker.cli.web_server import Reply, WebServer
from gpuworker.metrics import METRICS_CONTENT_TYPE, render_metrics, which_are_up


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "metrics",
        help="statistics for Prometheus",
        description="Workers' statistics in Prometheus' text format: printed, or served at /metrics until SIGTERM or Ctrl-C.",
        allow_abbrev=False,
    )
    parser.add_argument("names", metavar="NAME", nargs="*", type=worker_name, help="only these workers (default: all of this user)")
    parser.add_argument(
        "--listen",
        metavar="[HOST:]PORT",
        type=host_and_port,
        help="serve them there, and /healthz (200 while all these workers are up); HOST is 127.0.0.1 by default",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the metrics, or serves them until SIGTERM or Ctrl-C."""
    names = args.names or None
    if args.listen is not None:
        return server_of(names, *args.listen).run()
    for name in args.names:
        attach(name)  # one that is not there is a mistake here
    show(render_metrics(names).decode())
    return 0


def server_of(names: Sequence[str] | None, host: str, port: int) -> WebServer:
    """names: of which workers (None: all of this user's). A scrape takes it less than a millisecond. Raises CommandError."""

    def answer(path: str) -> Reply:
        if path == "/metrics":
            return Reply(render_metrics(names), (("Content-Type", METRICS_CONTENT_TYPE),))
        if path == "/healthz":
            up = which_are_up(names)
            status = HTTPStatus.OK if up and all(up.values()) else HTTPStatus.SERVICE_UNAVAILABLE
            return Reply(json.dumps({"up": up}).encode(), (("Content-Type", "application/json"),), status)
        return Reply(b"there are /metrics and /healthz\n", status=HTTPStatus.NOT_FOUND)

    return WebServer(host, port, answer)
