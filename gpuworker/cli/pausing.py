"""`gpuworker pause` and `gpuworker resume`: a word in the segment that the owner looks at before it begins anything."""

from __future__ import annotations

import argparse
from typing import Any

from gpuworker._native import lib
from gpuworker.cli.stdout import remark
from gpuworker.cli.target import CommandError, attach, worker_name
from gpuworker.segment import State
from gpuworker.segment.segment import state_name


def add_to(commands: Any) -> None:
    """Adds the commands to the parser."""
    pause = commands.add_parser(
        "pause",
        help="let a worker begin no more batches until it is resumed",
        description="From now on the worker begins no batch (and no step of generation) until it is resumed: requests queue, up to its capacity, and their "
        "deadlines go on; what has begun is finished. It stays paused when its owner is started again or reloaded; draining (stop) and a new start of the "
        "worker end it.",
        allow_abbrev=False,
    )
    pause.add_argument("name", metavar="NAME", type=worker_name)
    pause.set_defaults(run=run_pause)
    resume = commands.add_parser("resume", help="let a paused worker go on", description="Lets a paused worker go on.", allow_abbrev=False)
    resume.add_argument("name", metavar="NAME", type=worker_name)
    resume.set_defaults(run=run_resume)


def run_pause(args: argparse.Namespace) -> int:
    """Pauses the worker. Raises CommandError, WorkerNotFound or SegmentError when there is none that could be."""
    was = set_paused(args.name, True)
    remark(
        f"worker {args.name!r} {'was paused already' if was else 'is paused; what has begun is finished'}; `gpuworker resume {args.name}` lets it go on"
    )
    return 0


def run_resume(args: argparse.Namespace) -> int:
    """Resumes the worker. Raises as `run_pause` does."""
    was = set_paused(args.name, False)
    remark(f"worker {args.name!r} {'goes on' if was else 'was not paused'}")
    return 0


def set_paused(name: str, paused: bool) -> bool:
    """-> whether it was paused before. Raises CommandError where nothing runs that could be paused, WorkerNotFound, SegmentError."""
    segment = attach(name, read_only=False)
    try:
        overview = segment.overview()
        if segment.is_dead():
            raise CommandError(f"worker {name!r} is not running: its process has died; the next start of this name takes its segment over")
        if overview.state >= State.DRAINING:
            raise CommandError(f"worker {name!r} is {state_name(overview.state)}")
        lib.gw_set_paused(segment.port, int(paused))
        return bool(overview.paused)
    finally:
        segment.close()
