"""`gpuworker stop` and `gpuworker reload`: a signal to a worker's supervisor, and nobody else, and then what came of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

from gpuworker.cli.numbers import wait
from gpuworker.cli.stdout import remark
from gpuworker.cli.target import CommandError, attach, is_local, worker_name
from gpuworker.cli.text import span
from gpuworker.segment import Identity, Segment, State
from gpuworker.segment.liveness import has_mapped, start_ticks
from gpuworker.segment.segment import state_name
from gpuworker.segment.stats import Stats
from gpuworker.worker import WorkerOptions

DRAIN_MARGIN_S = 5.0
KILL_WAIT_S = 10.0
EXIT_GRACE_S = 2.0
"""How long the process may live on after the worker in it has stopped, before we say that it does."""
_TICK_MS = 100


def add_to(commands: Any) -> None:
    """Adds the commands to the parser."""
    parser = commands.add_parser(
        "stop",
        help="stop a worker",
        description="Asks a worker to finish what it has and stop, and waits until it is gone. Exit code 1 when it was not running or is not gone.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", type=worker_name)
    parser.add_argument(
        "--timeout-s", type=wait, metavar="SECONDS", help=f"how long to wait (default: the worker's drain_timeout_s and {DRAIN_MARGIN_S:g} more)"
    )
    parser.add_argument("--kill", action="store_true", help="end it by force (SIGKILL) when the time is over")
    parser.set_defaults(run=run)
    reload = commands.add_parser(
        "reload",
        help="replace a worker's owner by one that loads its handler anew",
        description="Starts a new owner, which loads the handler as it is now, while the old one goes on; when it is ready it takes over, and no request "
        "fails. Needs room for two models meanwhile. Exit code 1 when the new owner could not be loaded: then the old one goes on.",
        allow_abbrev=False,
    )
    reload.add_argument("name", metavar="NAME", type=worker_name)
    reload.set_defaults(run=run_reload)


def run(args: argparse.Namespace) -> int:
    """Stops the worker. Raises CommandError when there is nothing to stop, or it does not stop."""
    segment = attach(args.name)
    with opened(segment) as (pid, pidfd):
        stop(segment, pid, pidfd, drain_limit_s(segment) if args.timeout_s is None else args.timeout_s, args.kill)
    return 0


def run_reload(args: argparse.Namespace) -> int:
    """Reloads the worker. Raises CommandError when there is nothing to reload, or the new owner could not be loaded."""
    segment = attach(args.name)
    worker = f"worker {args.name!r}"
    before, started = segment.overview(), time.monotonic()
    if segment.supervisor() == segment.owner():
        raise CommandError(f"{worker} has no supervisor that could start a new owner: it runs inside a program, by gpuworker.serve()")
    with opened(segment) as (_, pidfd):
        send(pidfd, signal.SIGUSR1)
        while True:
            ended = has_ended(pidfd, _TICK_MS)
            now = segment.overview()
            if now.failed_reloads != before.failed_reloads:
                raise CommandError(f"{worker}: {segment.note()}")
            if now.reloads != before.reloads:
                remark(
                    f"{worker} has been reloaded in {span(time.monotonic() - started)}: process {now.owner.pid} took over from process {before.owner.pid}"
                )
                return 0
            if ended or now.state >= State.DRAINING:
                raise CommandError(f"{worker} has stopped meanwhile")


@contextlib.contextmanager
def opened(segment: Segment) -> Iterator[tuple[int, int]]:
    """Pid and pidfd of the worker's supervisor (an owner without one is its own). Raises CommandError when it is not there, or not ours to signal."""
    pid, worker = segment.supervisor().pid, f"worker {segment.name!r}"
    if segment.is_dead():
        raise CommandError(f"{worker} is not running: its process {pid} has died; the next start of this name takes its segment over")
    if not is_local(segment):
        raise CommandError(f"{worker} runs in another pid namespace (process {pid} of another container, or of the host); do it there")
    pidfd = open_process(segment.supervisor())
    if pidfd >= 0 and not has_mapped(pid, segment.fd):  # never signal a process because of what somebody wrote into a segment
        os.close(pidfd)
        raise CommandError(
            f"{worker} says that it is process {pid}, which has nothing to do with it: somebody wrote there; signal its process yourself"
        )
    if pidfd < 0:
        raise CommandError(f"{worker} is not running: its process {pid} has just ended")
    try:
        yield pid, pidfd
    except PermissionError:
        raise CommandError(f"{worker}: this user may not signal process {pid}") from None
    finally:
        os.close(pidfd)


def open_process(who: Identity) -> int:
    """A pidfd of exactly this process; -1 when it is gone, also when another process has its pid now."""
    try:
        pidfd = os.pidfd_open(who.pid)
    except (OSError, OverflowError):  # gone, or no pid at all
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
    limit_s = Stats.read(segment).number("drain_timeout_s")
    return (WorkerOptions.drain_timeout_s if limit_s is None else limit_s) + DRAIN_MARGIN_S


def stop(segment: Segment, pid: int, pidfd: int, timeout_s: float, kill: bool) -> None:
    """SIGTERM, wait, with `kill` SIGKILL and wait. Raises CommandError when it is not gone then."""
    worker, started = f"worker {segment.name!r} (process {pid})", time.monotonic()
    if segment.overview().state < State.DRAINING:  # a second SIGTERM would end the draining that a first one began
        send(pidfd, signal.SIGTERM)
    if wait_until_gone(segment, pidfd, timeout_s):
        lives_on = "" if has_ended(pidfd, 0) else f"; process {pid} goes on without it"
        remark(f"{worker} has stopped after {span(time.monotonic() - started)}{lives_on}")
        return
    if not kill:
        advice = "wait longer (--timeout-s), or end it by force (--kill)"
        raise CommandError(f"{worker} has not stopped within {span(timeout_s)}, it is {doing(segment)}; {advice}")
    send(pidfd, signal.SIGKILL)
    if not has_ended(pidfd, KILL_WAIT_S * 1e3):
        raise CommandError(f"{worker} was killed and does not end: the kernel waits for something (a GPU driver, a disk)")
    remark(f"{worker} was killed after {span(timeout_s)}; the next start of this name takes its segment over")


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
    state = state_name(segment.overview().state)
    return "still draining" if state == "draining" else f"still {state} (its handler holds the GIL, or the process is stopped)"
