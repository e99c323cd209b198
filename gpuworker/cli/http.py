"""`gpuworker http`: workers over HTTP, by uvicorn. What it serves is frontends/asgi.py."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from typing import Any

from gpuworker.cli.address import host, is_loopback
from gpuworker.cli.numbers import integer, positive, size_bytes
from gpuworker.cli.target import CommandError, worker_name


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "http",
        help="serve workers over HTTP: Open Inference Protocol, OpenAI's API",
        description="Serves workers over HTTP until SIGTERM or Ctrl-C: the Open Inference Protocol under /v2, OpenAI's API under /v1. docs/http.md",
        allow_abbrev=False,
    )
    parser.add_argument("models", metavar="NAME[=WORKER]", nargs="+", type=model, help="a model's name, and its worker's, if that is another")
    parser.add_argument("--host", type=host, default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=port, default=8000, metavar="N", help="port to listen on (default: 8000)")
    parser.add_argument("--workers", type=processes, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--api-keys-file", metavar="FILE", help="keys of which callers must send one, one a line")
    parser.add_argument("--timeout", type=positive, default=20.0, metavar="SECONDS", help="the longest that a request may take (default: 20)")
    parser.add_argument("--generation-timeout", type=positive, default=600.0, metavar="SECONDS", help="the same for generated text (default: 600)")
    parser.add_argument("--max-body-bytes", type=some_bytes, default=8 << 20, metavar="BYTES", help="longest body of a request (default: 8388608)")
    parser.add_argument("--max-json-bytes", type=some_bytes, default=4 << 20, metavar="BYTES", help="longest JSON in it (default: 4194304)")
    parser.add_argument("--access-log", action="store_true", help="a line on stdout for each request")
    parser.set_defaults(run=run, refuse=parser.error)


def model(text: str) -> tuple[str, str]:
    """The argument type of a model: (its name, its worker's)."""
    name, _, worker = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME, or NAME=WORKER")
    return name, worker_name(worker or name)


def port(text: str) -> int:
    """An argument type. Not 0: all processes listen on it."""
    return integer(text, 1, 65535)


def processes(text: str) -> int:
    """An argument type."""
    return integer(text, 1, 1024)


def some_bytes(text: str) -> int:
    """An argument type."""
    return size_bytes(text) or integer(text, 1, 1 << 40)


def run(args: argparse.Namespace) -> int:
    """Serves."""
    names = [name for name, _ in args.models]
    for name in names:
        if names.count(name) > 1:
            args.refuse(f"model {name} is there twice")
    if importlib.util.find_spec("uvicorn") is None:
        raise CommandError("gpuworker http needs uvicorn: pip install 'gpuworker[http]'")
    if args.api_keys_file is None and not is_loopback(args.host):
        print(f"gpuworker: everybody who reaches {args.host} may call; --api-keys-file asks for keys", file=sys.stderr)
    options = {
        "models": dict(args.models), "timeout": args.timeout, "generation_timeout": args.generation_timeout, "max_body_bytes": args.max_body_bytes,
        "max_json_bytes": args.max_json_bytes, "api_keys_file": args.api_keys_file,
    }  # fmt: skip
    application = importlib.import_module("gpuworker.frontends.http.serve")  # by name: applications are on top of the library
    try:
        return int(application.run(options, host=args.host, port=args.port, workers=args.workers, access_log=args.access_log))
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from None
