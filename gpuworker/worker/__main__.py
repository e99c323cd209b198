"""The owner process that a supervisor starts: `python -m gpuworker.worker JOB_FD STATUS_FD`. Not for people; they use `gpuworker serve`.

From JOB_FD it reads what to run, and later one byte when it is its turn to own the segment. To STATUS_FD it reports, in lines of JSON, `loaded`, `ready`,
`released`, or the `error` and `traceback` that prevented them (see owner_process.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import signal
import sys
from multiprocessing import spawn
from types import FrameType
from typing import Any

from gpuworker._native import lib
from gpuworker.worker import blame, logs, process
from gpuworker.worker.job import receive
from gpuworker.worker.options import WorkerOptions
from gpuworker.worker.session import Session

PARENT_GRACE_NS = 1_000_000_000


def main(job_fd: int, status_fd: int) -> int:
    """Runs one session."""
    logs.set_up()
    faulthandler.enable()  # a crash's last words
    job, parent_pid = receive(job_fd)
    logs.belongs_to(job.name)
    end_with_parent(parent_pid)
    is_ready = False

    def report(**message: Any) -> None:
        nonlocal is_ready
        is_ready = is_ready or "ready" in message
        with contextlib.suppress(BrokenPipeError):
            os.write(status_fd, json.dumps(message).encode() + b"\n")

    def await_turn() -> None:
        report(loaded=True)
        if not os.read(job_fd, 1):
            sys.exit("the supervisor of this owner is gone")

    handler: Any = None
    try:
        process.BOOTSTRAPPING = True
        if job.preparation:
            spawn.prepare(job.preparation)
        handler = pickle.loads(job.handler)
        process.BOOTSTRAPPING = False
        session = Session(handler, job.name, WorkerOptions.of(job.options), await_turn=await_turn)

        def drain(number: int, frame: FrameType | None) -> None:
            if session.owner.stop_ns is None:  # a service manager may have sent it too
                session.on_signal(number, frame)

        signal.signal(signal.SIGTERM, drain)
        signal.signal(signal.SIGINT, session.on_signal)
        signal.signal(signal.SIGUSR1, lambda *_: session.owner.hand_over())
        session.run(lambda: report(ready=True), lambda: report(released=session.owner.is_handing_over))
    except BaseException as error:
        if is_ready:
            raise
        report(**blame.explain(error, handler))
        return 1
    return 0


def end_with_parent(parent_pid: int) -> None:
    """Makes this process drain and end when its parent does, even while a handler holds the GIL (native/watch.c)."""
    try:
        pidfd = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        sys.exit("the process that started this owner is gone")
    if os.getppid() != parent_pid:
        sys.exit("the process that started this owner is gone")
    lib.gw_watch_parent(pidfd, PARENT_GRACE_NS)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
