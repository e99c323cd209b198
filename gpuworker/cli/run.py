"""`gpuworker run ... -- COMMAND`: a worker beside a web server that has no hooks for one. Started before the command, ended after it."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

from gpuworker.cli import serve
from gpuworker.cli.target import CommandError, worker_name
from gpuworker.errors import WorkerStartupError
from gpuworker.worker import Worker

log = logging.getLogger("gpuworker")

FORWARDED = {
    getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "TTIN", "TTOU", "WINCH")
}  # all that servers give a meaning to
_SI_KERNEL = 0x80
_PR_SET_PDEATHSIG = 1
_NOT_FOUND, _NOT_EXECUTABLE, _KILLED = 127, 126, 128
"""Exit statuses, as a shell's; killed by signal n: _KILLED + n."""


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "run",
        help="run a command, e.g. a web server, with a worker beside it",
        usage="%(prog)s (MODULE:ATTR | --hf-encoder DIR | --hf DIR | --gguf FILE) --name NAME [options] -- COMMAND [ARG ...]\n"
        "       %(prog)s --config FILE [NAME] [options] -- COMMAND [ARG ...]",
        description="Starts worker NAME as `gpuworker serve` does, then COMMAND once it is ready; hands signals on to COMMAND, and when that has ended drains the "
        "worker and exits with COMMAND's status. A worker that fails for good ends COMMAND, with status 1. docs/servers.md",
        allow_abbrev=False,
    )
    handler = parser.add_argument("handler", metavar="MODULE:ATTR", help="as for `gpuworker serve`; with --config, the name of the file's worker")
    handler.required = False
    parser.add_argument("--name", type=worker_name, help="what clients connect to")
    serve.add_settings(parser)
    parser.set_defaults(run=run, refuse=parser.error, command=[])


def run(args: argparse.Namespace) -> int:
    """Runs the command beside a worker. -> the exit status."""
    if not args.command:
        args.refuse("give the command to run after --: gpuworker run model:run_batch --name embed -- uvicorn app:app --workers 4")
    config = serve.config_of(args)
    worker = Worker(config.handler, name=config.name, **config.options)
    try:
        worker.start()
    except WorkerStartupError as error:
        raise CommandError(str(error)) from None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})
    try:
        return _beside(worker, args.command, before)
    finally:
        worker.stop()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _beside(worker: Worker, command: list[str], mask: set[int]) -> int:
    """Runs it until it ends. mask: the signals that it shall start with blocked."""
    try:
        process = subprocess.Popen(command, preexec_fn=_in_child(mask))
    except OSError as error:
        log.error("cannot run %s: %s", command[0], error.strerror)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
    has_failed = False
    while process.poll() is None:
        if worker.supervisor_pid is None and not has_failed:
            has_failed = True
            log.error("worker %s has ended; so must %s", worker.name, command[0])
            process.terminate()
        _reap_others({process.pid, worker.supervisor_pid})
        came = signal.sigwaitinfo(FORWARDED | {signal.SIGCHLD})
        if came.si_signo != signal.SIGCHLD and came.si_code != _SI_KERNEL:  # what a terminal sends, it sends to the command too: twice is another thing
            process.send_signal(came.si_signo)
    if has_failed:
        return 1
    return process.returncode if process.returncode >= 0 else _KILLED - process.returncode


def _in_child(mask: set[int]) -> Callable[[], None]:
    """What the child does before it becomes the command: a server whose worker is gone should not stay, were this process killed."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _reap_others(spare: set[int | None]) -> None:
    """As pid 1 of a container: processes that the command has left behind and that have ended."""
    while os.getpid() == 1:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid in spare:
            return
        os.waitpid(ended.si_pid, 0)
