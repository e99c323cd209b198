"""`gpuworker list` and `gpuworker stats`: both only read, and work on workers that hang or are dead."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

from gpuworker.cli import screen
from gpuworker.cli.interval import Interval
from gpuworker.cli.numbers import interval
from gpuworker.cli.stdout import show
from gpuworker.cli.target import CommandError, attach, is_local, worker_name
from gpuworker.cli.text import WIDTH, shorten, span, table
from gpuworker.errors import SegmentError, WorkerNotFound
from gpuworker.segment import worker_names
from gpuworker.segment.stats import Stats

HOME_AND_CLEAR = "\x1b[H\x1b[J"


@dataclasses.dataclass(frozen=True)
class Row:
    """One worker in the list. `state`: as Stats.condition has it, or "unusable" (`problem` says why); `local`: its pid is of our pid namespace."""

    name: str
    state: str
    problem: str = ""
    pid: int = 0
    local: bool = True
    uptime_s: float = 0.0
    slots_in_use: int = 0
    capacity: int = 0
    clients: int = 0
    handler: str = ""


def add_to(commands: Any) -> None:
    """Adds the commands to the parser."""
    lister = commands.add_parser("list", help="all workers on this machine", description="All workers on this machine.", allow_abbrev=False)
    lister.add_argument("--json", action="store_true", help="print a JSON array")
    lister.set_defaults(run=run_list)
    stats = commands.add_parser(
        "stats", help="how a worker is doing", description="What a worker has done, and where its requests spend their time.", allow_abbrev=False
    )
    stats.add_argument("name", metavar="NAME", type=worker_name)
    stats.add_argument("--json", action="store_true", help="print one JSON document (with --watch, one a line)")
    stats.add_argument(
        "--watch", type=interval, nargs="?", const=2.0, metavar="SECONDS",
        help="show it again every SECONDS (default: 2) until Ctrl-C; rates, waits and batch sizes are then those since the reading before",
    )  # fmt: skip
    stats.set_defaults(run=run_stats)


def run_list(args: argparse.Namespace) -> int:
    """Lists the workers."""
    rows = [row for name in worker_names() if (row := look(name)) is not None]
    if args.json:
        show(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    elif rows:
        show("\n".join(listing(rows)) + "\n")
    else:
        print("no workers on this machine", file=sys.stderr)
    return 0


def look(name: str) -> Row | None:
    """A worker's row; None when it has just gone. Whatever lies in /dev/shm under such a name, this does not fail."""
    try:
        segment = attach(name)
        stats = Stats.read(segment)
    except WorkerNotFound:
        return None
    except (SegmentError, OSError, ValueError) as error:
        return Row(name, "unusable", str(error))
    state = stats.condition()
    uptime_s = 0.0 if state in ("dead", "failed") else stats.uptime_s
    return Row(
        name, state, "", stats.owner_pid, is_local(segment), uptime_s, stats.slots_in_use, stats.capacity, len(stats.clients), stats.handler
    )  # fmt: skip


def listing(rows: list[Row]) -> list[str]:
    """The list as a table, then what is wrong with workers that cannot be looked into."""
    cells = [("NAME", "STATE", "PID", "UP", "SLOTS", "CLIENTS", "HANDLER")]
    for row in rows:
        if row.problem:
            cells.append((row.name, row.state, "-", "-", "-", "-", "-"))
        else:
            pid = f"{row.pid}" if row.local else f"{row.pid}*"
            up = span(row.uptime_s) if row.uptime_s else "-"
            cells.append((row.name, row.state, pid, up, f"{row.slots_in_use}/{row.capacity}", f"{row.clients}", row.handler or "-"))
    lines = table(cells, "<<>>>><")
    lines += [f"{row.name}: {row.problem}" for row in rows if row.problem]
    if any(row.state in ("dead", "failed") for row in rows):
        lines.append("dead, failed: the next start of the same name takes the segment over, with the requests that were queued")
    if not all(row.local for row in rows):
        lines.append("*: of another pid namespace")
    return lines


def run_stats(args: argparse.Namespace) -> int:
    """Shows a worker's statistics, once or again and again."""
    before: tuple[float, Stats] | None = None
    while True:
        try:
            now = time.monotonic(), Stats.read(attach(args.name))
        except WorkerNotFound:
            if before is None:
                raise
            raise CommandError(f"worker {args.name!r} is gone") from None
        if args.json:
            show(json.dumps(now[1].to_dict(), indent=None if args.watch else 2) + "\n")
        else:
            recent = Interval.between(before[1], now[1], now[0] - before[0]) if before else None
            clear = HOME_AND_CLEAR if args.watch and sys.stdout is not None and sys.stdout.isatty() else "\n" if before else ""
            show(clear + "\n".join(shorten(line, WIDTH) for line in screen.lines(now[1], recent)) + "\n")
        if not args.watch:
            return 0
        before = now
        try:
            time.sleep(args.watch)
        except KeyboardInterrupt:
            return 0
