"""`gpuworker dashboard`: the status page of one or more workers in a browser."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import ipaddress
import signal
import sys
from typing import Any

from gpuworker.cli.stdout import remark
from gpuworker.cli.target import CommandError, attach, listen_host, worker_name


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "dashboard",
        help="the status page of workers, in a browser",
        description="Serves a page with live charts of what workers do, until Ctrl-C, and prints its address. It only reads: nothing can be changed through it.",
        allow_abbrev=False,
    )
    parser.add_argument("names", metavar="NAME", type=worker_name, nargs="+")
    parser.add_argument("--host", type=listen_host, default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=port, default=0, metavar="N", help="port to listen on (default: any free one)")
    parser.set_defaults(run=run)


def port(text: str) -> int:
    """The argument type of a TCP port."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text}: give a port from 0 to 65535")
    return value


def run(args: argparse.Namespace) -> int:
    """Serves the page until SIGINT or SIGTERM. Raises WorkerNotFound for a name that does not exist at the start, CommandError for an address that cannot be had."""
    for name in args.names:
        attach(name)  # later it may come and go
    try:
        application = importlib.import_module("gpuworker.frontends.dashboard")  # by name: applications are on top of the library
        server = application.Dashboard(list(dict.fromkeys(args.names)), args.host, args.port)
    except OSError as error:
        raise CommandError(f"{args.host} port {args.port}: {error.strerror or error}") from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    remark(server.url)
    if not is_loopback(str(server.server_address[0])):
        print("whoever can reach this address can see it", file=sys.stderr)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
