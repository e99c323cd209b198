"""`gpuworker metrics`: statistics for Prometheus, printed once or served. It only reads segments, so it needs no owner to be there, and disturbs none."""

from __future__ import annotations

import argparse
from typing import Any

from gpuworker.cli.metrics_server import MetricsServer, parse_address
from gpuworker.cli.stdout import show
from gpuworker.cli.target import CommandError, attach, worker_name
from gpuworker.metrics import render_metrics
from gpuworker.segment.files import why


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "metrics",
        help="statistics for Prometheus",
        description="Workers' statistics in Prometheus' text format: printed, or served at /metrics for as long as this process runs.",
        allow_abbrev=False,
    )
    parser.add_argument("names", metavar="NAME", nargs="*", type=worker_name, help="only these workers (default: all of this user)")
    parser.add_argument(
        "--listen",
        metavar="[HOST:]PORT",
        type=address,
        help="serve them there, and /healthz (200 while all these workers are up); HOST is 127.0.0.1 by default",
    )
    parser.set_defaults(run=run)


def address(text: str) -> tuple[str, int]:
    """The argument type of --listen."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Prints the metrics, or serves them until SIGTERM or Ctrl-C."""
    names = args.names or None
    if args.listen is None:
        for name in args.names:
            attach(name)  # one that is not there is a mistake here
        show(render_metrics(names).decode())
        return 0
    try:
        server = MetricsServer(args.listen, names)
    except OSError as error:
        raise CommandError(f"{args.listen[0]}:{args.listen[1]} cannot be listened on: {why(error)}") from None
    server.run()
    return 0
