"""`gpuworker health`: one question with an exit code, for probes of Kubernetes, compose and monitoring. It only reads the segment, so a worker that hangs
is asked all the same."""

from __future__ import annotations

import argparse
from typing import Any

from gpuworker.cli.numbers import positive
from gpuworker.cli.stdout import remark
from gpuworker.cli.target import CommandError, attach, worker_name
from gpuworker.cli.text import span
from gpuworker.segment.stats import SILENT_S, Stats

ALIVE = ("starting", "serving", "paused", "restarting", "draining")
"""Conditions that a worker gets out of, or ends in, by itself; or that somebody wants it to be in."""


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "health",
        help="whether a worker serves, as an exit code",
        description="Says in one line how a worker is. Exit code 0 when it serves (its owner has written its heartbeat within "
        f"{SILENT_S:g} seconds), 1 otherwise. With --live also 0 while it loads, is being restarted, drains, or is paused: what a "
        "supervisor or a person looks after.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", type=worker_name)
    parser.add_argument("--live", action="store_true", help="is it to be left alone? (a liveness probe; without it: may it be sent requests?)")
    parser.add_argument("--long-batch-s", type=positive, metavar="SECONDS", help="a batch that has run for longer is a failure (default: no limit)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Asks. Raises CommandError for a worker that is not well, WorkerNotFound for one that is not there."""
    stats = Stats.read(attach(args.name))
    now = stats.condition()
    if now not in (ALIVE if args.live else ("serving",)):
        raise CommandError(f"worker {args.name!r} is {now}" + (f": {stats.note}" if stats.note and now in ("failed", "restarting") else ""))
    if args.long_batch_s is not None and stats.batch_running_s > args.long_batch_s:
        raise CommandError(f"worker {args.name!r} is stuck: its batch has run for {span(stats.batch_running_s)}")
    remark(f"worker {args.name!r} is {now}")
    return 0
