"""`gpuworker stop`: ends an owner, and nobody else."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import time
from typing import Any

from gpuworker.cli.target import CommandError, attach, is_local, worker_name
from gpuworker.cli.text import span
from gpuworker.segment import Identity, Segment, State
from gpuworker.segment.liveness import start_ticks
from gpuworker.worker import WorkerOptions

DRAIN_MARGIN_S = 5.0
KILL_WAIT_S = 10.0
EXIT_GRACE_S = 2.0
"""How long the process may live on after the worker in it has stopped, before we say that it does."""
_TICK_MS = 100


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "stop",
        help="stop a worker",
        description="Asks a worker to finish what it has and stop, and waits until it is gone. Exit code 1 when it was not running or is not gone.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", type=worker_name)
    parser.add_argument(
        "--timeout-s", type=seconds, metavar="SECONDS", help=f"how long to wait (default: the worker's drain_timeout_s and {DRAIN_MARGIN_S:g} more)"
    )
    parser.add_argument("--kill", action="store_true", help="end it by force (SIGKILL) when the time is over")
    parser.set_defaults(run=run)


def seconds(text: str) -> float:
    """The argument type of a length of time."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give a number of seconds >= 0")
    return value


def run(args: argparse.Namespace) -> int:
    """Stops the worker. Raises CommandError when there is nothing to stop, or it does not stop."""
    segment = attach(args.name)
    owner = segment.owner()
    worker = f"worker {args.name!r}"
    if segment.owner_is_dead():
        raise CommandError(f"{worker} is not running: its process {owner.pid} has died; the next start of this name takes its segment over")
    if not is_local(segment):
        raise CommandError(f"{worker} runs in another pid namespace (process {owner.pid} of another container, or of the host); stop it from there")
    pidfd = open_process(owner)
    if pidfd < 0:
        raise CommandError(f"{worker} is not running: its process {owner.pid} has just ended")
    try:
        stop(segment, owner.pid, pidfd, drain_limit_s(segment) if args.timeout_s is None else args.timeout_s, args.kill)
    except PermissionError:
        raise CommandError(f"{worker}: this user may not signal process {owner.pid}") from None
    finally:
        os.close(pidfd)
    return 0


def open_process(who: Identity) -> int:
    """A pidfd of exactly this process; -1 when it is gone, also when another process has its pid now."""
    try:
        pidfd = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return -1
    try:
        if start_ticks(who.pid) == who.start_ticks:  # asked after opening: a pid in use again is seen now, and the pidfd does not move
            return pidfd
    except ProcessLookupError:
        pass
    os.close(pidfd)
    return -1


def drain_limit_s(segment: Segment) -> float:
    """How long the worker may take by its own options, and a little more."""
    options = json.loads(segment.info() or b"{}").get("options", {})
    return float(options.get("drain_timeout_s", WorkerOptions.drain_timeout_s)) + DRAIN_MARGIN_S


def stop(segment: Segment, pid: int, pidfd: int, timeout_s: float, kill: bool) -> None:
    """SIGTERM, wait, with `kill` SIGKILL and wait. Raises CommandError when it is not gone then."""
    worker, started = f"worker {segment.name!r} (process {pid})", time.monotonic()
    if segment.overview().state < State.DRAINING:  # a second SIGTERM would end the draining that a first one began
        send(pidfd, signal.SIGTERM)
    if wait_until_gone(segment, pidfd, timeout_s):
        lives_on = "" if has_ended(pidfd, 0) else f"; process {pid} goes on without it"
        print(f"{worker} has stopped after {span(time.monotonic() - started)}{lives_on}")
        return
    if not kill:
        advice = "wait longer (--timeout-s), or end it by force (--kill)"
        raise CommandError(f"{worker} has not stopped within {span(timeout_s)}, it is {doing(segment)}; {advice}")
    send(pidfd, signal.SIGKILL)
    if not has_ended(pidfd, KILL_WAIT_S * 1e3):
        raise CommandError(f"{worker} was killed and does not end: the kernel waits for something (a GPU driver, a disk)")
    print(f"{worker} was killed after {span(timeout_s)}; the next start of this name takes its segment over")


def send(pidfd: int, number: signal.Signals) -> None:
    """Signals the process, unless it is gone."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def wait_until_gone(segment: Segment, pidfd: int, timeout_s: float) -> bool:
    """Waits for the process to end, or for the worker in it: a program may call gpuworker.serve() and then do something else."""
    give_up = time.monotonic() + timeout_s
    stopped_at = None
    while not has_ended(pidfd, min(_TICK_MS, max(give_up - time.monotonic(), 0) * 1e3)):
        now = time.monotonic()
        if stopped_at is None and (segment.overview().state >= State.STOPPED or not segment.is_current()):
            stopped_at = now
        if stopped_at is not None and now >= min(stopped_at + EXIT_GRACE_S, give_up):
            return True
        if now >= give_up:
            return False
    return True


def has_ended(pidfd: int, timeout_ms: float) -> bool:
    """Whether the process ends within the time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def doing(segment: Segment) -> str:
    """What an owner that should stop is at."""
    state = State(segment.overview().state)
    return "still draining" if state == State.DRAINING else f"still {state.name.lower()} (its handler holds the GIL, or the process is stopped)"
