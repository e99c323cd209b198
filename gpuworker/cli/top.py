"""`gpuworker top`: what a worker does now. Here are the command, one look (`--once`) and the source of looks; the live view is live.py."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from typing import Any

from gpuworker.cli import board
from gpuworker.cli.numbers import interval
from gpuworker.cli.rates import Rates
from gpuworker.cli.stdout import show
from gpuworker.cli.target import CommandError, attach, worker_name
from gpuworker.cli.text import WIDTH
from gpuworker.errors import WorkerNotFound
from gpuworker.segment.stats import Stats

LINES = 24


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "top",
        help="watch a worker: rates, waits, batches, occupancy",
        description="A live view of what a worker does: rates, waits, batch sizes, why batches leave, who holds slots, padding, device and generation. Keys: p "
        "pauses and resumes it, d drains it (as stop does), r reloads it, q leaves. The live view needs pip install 'gpuworker[top]'; --once does not.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", type=worker_name)
    parser.add_argument("--interval", type=interval, default=1.0, metavar="SECONDS", help="over which rates are taken (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one screen, over one interval, and end")
    parser.add_argument("--json", action="store_true", help="with --once: print one JSON document")
    parser.set_defaults(run=run, refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    """Shows the worker. Raises WorkerNotFound, SegmentError, or CommandError where the live view cannot be."""
    if args.json and not args.once:
        args.refuse("--json is for --once; `gpuworker stats --watch --json` goes on")
    if args.once:
        rates = once(args.name, args.interval)
        if args.json:
            show(json.dumps(rates.to_dict(), indent=2) + "\n")
        else:
            show("\n".join(board.plain(board.lines(rates, {}, WIDTH, LINES, board.ASCII))) + "\n")
        return 0
    if importlib.util.find_spec("textual") is None:
        raise CommandError("the live view needs textual: pip install 'gpuworker[top]'; or use --once")
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty()):
        raise CommandError("the live view needs a terminal; use --once")
    from gpuworker.cli.live import Top

    Stats.read(attach(args.name))  # a wrong name is a line on stderr, not a screen
    app = Top(args.name, args.interval)
    app.run()
    return app.return_code or 0


def once(name: str, interval_s: float) -> Rates:
    """Two looks. Raises WorkerNotFound or SegmentError, and CommandError when it goes away between them."""
    watch = Watch(name)
    watch.look()
    time.sleep(interval_s)
    try:
        return watch.look()
    except WorkerNotFound:
        raise CommandError(f"worker {name!r} is gone") from None


class Watch:
    """Looks at a worker again and again; each time under its name, as it may have been replaced."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._before: tuple[float, Stats] | None = None

    def look(self) -> Rates:
        """Rates since the look before; the first one knows none. Raises WorkerNotFound or SegmentError."""
        now = Stats.read(attach(self.name))
        now_s = time.monotonic()
        before_s, before = self._before or (now_s - 1, now)
        self._before = now_s, now
        return Rates.between(before, now, max(now_s - before_s, 1e-3))
