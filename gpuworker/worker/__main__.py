"""The owner process that gpuworker.Worker starts: `python -m gpuworker.worker JOB_FD STATUS_FD`. Not for people; they use `gpuworker serve`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import sys
import traceback
from multiprocessing import spawn
from typing import Any

from gpuworker._native import lib
from gpuworker.worker import process
from gpuworker.worker.options import WorkerOptions
from gpuworker.worker.session import Session

PARENT_GRACE_NS = 1_000_000_000


def main(job_fd: int, status_fd: int) -> int:
    """Runs one session; reports readiness or the error that prevented it as one line of JSON."""
    logging.basicConfig(level=os.environ.get("GPUWORKER_LOG", "WARNING"), format="%(asctime)s %(name)s[%(process)d] %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides what it means
    with open(job_fd, "rb") as pipe:
        preparation, handler_pickle, name, options, parent_pid = pickle.loads(pipe.read(int.from_bytes(pipe.read(8), "little")))
    end_with_parent(parent_pid)

    def report(message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(status_fd, json.dumps(message).encode() + b"\n")
        os.close(status_fd)
        reported.append(True)

    reported: list[bool] = []
    try:
        process.BOOTSTRAPPING = True
        spawn.prepare(preparation)
        handler = pickle.loads(handler_pickle)
        process.BOOTSTRAPPING = False
        session = Session(handler, name, WorkerOptions.of(options))
        signal.signal(signal.SIGTERM, session.on_signal)
        session.run(lambda: report({"ready": os.getpid()}))
    except BaseException as error:
        if reported:
            raise
        report({"error": "".join(traceback.format_exception_only(error)).strip(), "traceback": traceback.format_exc()})
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
