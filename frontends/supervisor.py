"""Keeps an owner running beside a server that forks its workers, from a small process of its own.

A process of its own, because the server's master must not block while a model is loaded again after a crash, and must have no threads when it forks.
The chain is master -> supervisor -> owner; each ends when the one before it does, however that one ends. The supervisor never imports torch.

    Supervisor                        the master's side: start, stop
    python -m gpuworker.frontends.supervisor STATUS_FD JOB      the process; not for people
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gpuworker
from gpuworker.errors import GpuWorkerError, WorkerStartupError
from gpuworker.segment.stats import Stats

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before an owner is started again; doubles while owners keep dying young
STABLE_S = 60.0  # an owner that lived this long did not die young
STANDBY_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1

log = logging.getLogger("gpuworker.supervisor")


class Supervisor:
    """Starts the supervising process and ends it. `options`: as for gpuworker.Worker, plain values only."""

    def __init__(self, handler: str, name: str, options: dict[str, Any]) -> None:
        self.handler, self.name, self.options = handler, name, options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def job(self) -> dict[str, Any]:
        """What this supervisor was made to run."""
        return {"handler": self.handler, "name": self.name, "options": self.options}

    def is_running(self) -> bool:
        """Whether the supervising process lives. The owner may be dead nevertheless, and about to be started again."""
        return self._process is not None and self._process.poll() is None

    def start(self, standby: bool = False, user: int | None = None, group: int | None = None) -> int:
        """Waits until the owner is ready. -> its pid. Raises WorkerStartupError with the owner's own traceback.

        standby: where another live process owns the name, that is no error: return its pid now and start an owner when it is gone.
        user, group: ids to run as, for a master that runs as root.
        """
        job = json.dumps({**self.job, "parent_pid": os.getpid(), "standby": standby})
        status_read, status_write = os.pipe()
        with open(status_read, "rb") as status:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(status_write), job],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(status_write,),
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                    user=user,
                    group=group,
                )
            finally:
                os.close(status_write)
            try:
                report = json.loads(status.readline() or b"{}")  # nothing: it was killed
                if "pid" not in report:
                    raise WorkerStartupError(report.get("error", f"the supervisor of worker {self.name!r} ended before the owner was ready"))
                return int(report["pid"])
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Has the owner drain (within its drain_timeout_s) and ends both processes. Stopping twice is fine."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()


def main(status_fd: int, job: dict[str, Any]) -> int:
    """The supervising process."""
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach the whole terminal group: the master decides. The owner inherits this
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    logging.basicConfig(level=os.environ.get("GPUWORKER_LOG", "WARNING"), format="%(asctime)s %(name)s[%(process)d] %(levelname)s %(message)s")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != job["parent_pid"]:  # it died before we asked
        return 1

    def report(**message: object) -> None:
        nonlocal status_fd
        if status_fd >= 0:
            os.write(status_fd, json.dumps(message).encode() + b"\n")
            os.close(status_fd)
            status_fd = -1

    if job["standby"] and (pid := live_owner(job["name"])):
        report(pid=pid)
        while live_owner(job["name"]):
            time.sleep(STANDBY_POLL_S)
    try:
        run_owner(job, lambda pid: report(pid=pid))
    except Exception as error:
        if status_fd >= 0:
            report(error=str(error) if isinstance(error, GpuWorkerError) else f"{type(error).__name__}: {error}")
            return 1
        log.exception("worker %s", job["name"])
    keep_running(job)
    return 0


def keep_running(job: dict[str, Any]) -> None:
    """Starts owners for ever, with growing pauses between those that die young."""


def run_owner(job: dict[str, Any], on_ready: Callable[[int], None]) -> None:
    """One life of an owner, from its start to its end."""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), json.loads(sys.argv[2])))
