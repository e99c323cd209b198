"""The supervising process that gpuworker.Worker starts: `python -m gpuworker.worker.supervise JOB_FD STATUS_FD`. Not for people."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from gpuworker.errors import GpuWorkerError
from gpuworker.worker import logs
from gpuworker.worker.job import receive
from gpuworker.worker.supervisor import Supervisor


def main(job_fd: int, status_fd: int) -> int:
    """Tells its starter how it went, once, as one line of JSON."""
    job, parent_pid, wait_for_name = receive(job_fd)
    logs.belongs_to(job.name)
    os.close(job_fd)
    status = os.fdopen(status_fd, "w")

    def report(**message: Any) -> None:
        if not status.closed:
            with status:
                json.dump(message, status)
                status.write("\n")

    try:
        supervisor = Supervisor(job, report, parent_pid)
        return supervisor.run(wait_for_name) if os.getppid() == parent_pid else 1
    except GpuWorkerError as error:
        report(error=str(error), traceback="")
        return 1
    except Exception as error:
        report(error=f"{type(error).__name__}: {error}", traceback="")
        raise


if __name__ == "__main__":
    logs.set_up()
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
