"""`gpuworker http`: workers over HTTP, by uvicorn. What it serves is frontends/asgi.py."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import ipaddress
import sys
from typing import Any

from gpuworker.cli.target import CommandError, listen_host, worker_name


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "http",
        help="serve workers over HTTP: Open Inference Protocol, OpenAI's API",
        description="Serves workers over HTTP until SIGTERM or Ctrl-C: the Open Inference Protocol under /v2, OpenAI's API under /v1. docs/http.md",
        allow_abbrev=False,
    )
    parser.add_argument("models", metavar="NAME[=WORKER]", nargs="+", type=model, help="a model's name, and its worker's, if that is another")
    parser.add_argument("--host", type=listen_host, default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="(default: 8000)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--api-keys-file", metavar="FILE", help="keys of which callers must send one, one a line")
    parser.add_argument("--timeout", type=float, default=20.0, metavar="SECONDS", help="the longest that a request may take (default: 20)")
    parser.add_argument("--generation-timeout", type=float, default=600.0, metavar="SECONDS", help="the same for generated text (default: 600)")
    parser.add_argument("--max-body-bytes", type=int, default=8 << 20, metavar="BYTES", help="longest body of a request (default: 8388608)")
    parser.add_argument("--max-json-bytes", type=int, default=4 << 20, metavar="BYTES", help="longest JSON in it (default: 4194304)")
    parser.add_argument("--access-log", action="store_true", help="a line on stdout for each request")
    parser.set_defaults(run=run, refuse=parser.error)


def model(text: str) -> tuple[str, str]:
    """The argument type of a model: (its name, its worker's)."""
    name, _, worker = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME, or NAME=WORKER")
    return name, worker_name(worker or name)


def run(args: argparse.Namespace) -> int:
    """Serves."""
    names = [name for name, _ in args.models]
    for name in names:
        if names.count(name) > 1:
            args.refuse(f"model {name} is there twice")
    if not 1 <= args.port < 1 << 16 or not 1 <= args.workers <= 1024:
        args.refuse("--port goes from 1 to 65535, and --workers from 1 to 1024")
    for option in ("timeout", "generation_timeout", "max_body_bytes", "max_json_bytes"):
        if not 0 < getattr(args, option) < 1e12:
            args.refuse(f"--{option.replace('_', '-')} {getattr(args, option)}: give more than 0")
    if importlib.util.find_spec("uvicorn") is None:
        raise CommandError("gpuworker http needs uvicorn: pip install 'gpuworker[http]'")
    if args.api_keys_file is None and not _is_loopback(args.host):
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
