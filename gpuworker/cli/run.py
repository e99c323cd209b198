"""`gpuworker run ... -- COMMAND`: a worker beside a web server that has no hooks for one. Started before the command, ended after it."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import warnings
from typing import Any

from gpuworker.cli import serve
from gpuworker.cli.target import CommandError, worker_name
from gpuworker.errors import WorkerStartupError
from gpuworker.worker import Worker
from gpuworker.worker.listener import Listener

log = logging.getLogger("gpuworker")

FORWARDED = [getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "TTIN", "TTOU", "WINCH")]
"""All that servers give a meaning to."""
OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH)
PR_SET_PDEATHSIG = 1
NOT_EXECUTABLE, NOT_FOUND, KILLED = 126, 127, 128
"""Exit statuses, as a shell's; killed by signal n: KILLED + n."""
LONGEST_WAIT_S = 60.0


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
    if shutil.which(args.command[0]) is None:  # a model may take minutes to load
        print(f"gpuworker: there is no command {args.command[0]}", file=sys.stderr)
        return NOT_FOUND
    config = serve.config_of(args)
    worker = Worker(config.handler, name=config.name, **config.options)
    try:
        worker.start()
        with Listener(None, [*(number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN), signal.SIGCHLD]) as listener:
            return _beside(worker, args.command, listener)
    except WorkerStartupError as error:
        raise CommandError(str(error)) from None
    finally:
        worker.stop()


def _beside(worker: Worker, command: list[str], listener: Listener) -> int:
    try:
        process = _start(command)
    except OSError as error:
        log.error("cannot run %s: %s", command[0], error.strerror)
        return NOT_EXECUTABLE
    has_failed = False
    while process.poll() is None:
        if worker.supervisor_pid is None and not has_failed:
            has_failed = True
            log.error("worker %s has ended, so %s must", worker.name, command[0])
            process.terminate()
        _reap_others({process.pid, worker.supervisor_pid})
        listener.wait((), LONGEST_WAIT_S)
        for number in listener.take_signals():
            if number != signal.SIGCHLD and not (number in OF_TERMINALS and _is_in_foreground()):
                process.send_signal(number)
    if has_failed:
        return 1
    return process.returncode if process.returncode >= 0 else KILLED - process.returncode


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    """It is told to end when this process is killed: no server should stay whose worker is gone."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks where there are threads: numpy's are no matter to these lines
        return subprocess.Popen(command, preexec_fn=in_child)


def _is_in_foreground() -> bool:
    """Whether a terminal sends what is typed there to the command, too: twice Ctrl-C is another thing than once."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _reap_others(spare: set[int | None]) -> None:
    """As pid 1 of a container: processes that the command has left behind and that have ended."""
    while os.getpid() == 1:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid in spare:
            return
        os.waitpid(ended.si_pid, 0)
