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
from typing import Any

import gpuworker
from gpuworker import Stats
from gpuworker.errors import GpuWorkerError, WorkerStartupError

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
    """The supervising process: starts owner after owner until SIGTERM. Tells its parent once: the first owner's pid, or why there is none."""
    end_with_parent(job["parent_pid"])
    status = os.fdopen(status_fd, "w")

    def tell(**message: object) -> None:
        if not status.closed:
            with status:
                json.dump(message, status)

    name = job["name"]
    if job["standby"] and (pid := live_owner(name)):
        tell(pid=pid)
        while live_owner(name):
            time.sleep(STANDBY_POLL_S)
    pause_s = FIRST_PAUSE_S
    while True:
        started_s = time.monotonic()
        try:
            with gpuworker.Worker(job["handler"], name=name, **job["options"]) as worker:
                pid = worker.pid or 0
                tell(pid=pid)
                log.warning("the owner of worker %s (pid %d) %s", name, pid, end_of(pid))
        except Exception as error:
            if not status.closed:
                tell(error=str(error) if isinstance(error, GpuWorkerError) else f"{type(error).__name__}: {error}")
                return 1
            log.error("no new owner of worker %s: %s", name, error)
        if time.monotonic() - started_s >= STABLE_S:
            pause_s = FIRST_PAUSE_S
        log.warning("starting an owner of worker %s in %g s", name, pause_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def end_with_parent(parent_pid: int) -> None:
    """SIGTERM, from whomever, ends this process and drains its owner; the kernel sends it when the parent is gone."""
    for number in (signal.SIGINT, signal.SIGHUP):  # these reach a terminal's whole process group: the master decides. The owner inherits this
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        sys.exit("the process that started this supervisor is gone")


def live_owner(name: str) -> int:
    """Pid of the process that owns `name`; 0 when there is none."""
    try:
        stats = Stats.of(name)
    except GpuWorkerError:
        return 0
    return stats.owner_pid if stats.owner_alive else 0


def end_of(pid: int) -> str:
    """Waits until this child has ended. -> how, in words. It is left for its Popen to reap."""
    if not pid:
        return "ended at once"
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        end = None
    if end is None:
        return "ended at once"
    return f"exited with status {end.si_status}" if end.si_code == os.CLD_EXITED else f"was killed by {signal.Signals(end.si_status).name}"


if __name__ == "__main__":
    logging.basicConfig(level=os.environ.get("GPUWORKER_LOG", "WARNING"), format="%(asctime)s %(name)s[%(process)d] %(levelname)s %(message)s")
    sys.exit(main(int(sys.argv[1]), json.loads(sys.argv[2])))
