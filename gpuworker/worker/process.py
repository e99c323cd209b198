"""Starting an owner from another program: in a fresh interpreter, or in a thread of this one."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any

from gpuworker.client import Client
from gpuworker.errors import SegmentError, WorkerNotFound, WorkerStartupError
from gpuworker.segment import Segment
from gpuworker.segment.files import why
from gpuworker.segment.segment import ORPHAN_S
from gpuworker.segment.stats import Stats
from gpuworker.worker.job import Job, send
from gpuworker.worker.options import WorkerOptions
from gpuworker.worker.session import Session
from gpuworker.worker.supervisor import STOP_MARGIN_S

log = logging.getLogger("gpuworker")

_MORE = {"traceback": "In the owner", "words": "Its last words"}
BOOTSTRAPPING = False  # set in the owner process while it imports the program's main script


class Worker:
    """Runs an owner for as long as a `with` block (or from `start` to `stop`):

        with gpuworker.Worker(run_batch, max_batch_size=64, max_wait_ms=2) as worker:
            print(worker.connect().submit("hello"))

    The owner is a fresh interpreter, never a fork, started again when it dies, and ends with this process, however this process ends. The handler is a
    function, a class or an instance that can be imported (also from the main script, which then needs `if __name__ == "__main__":` as with
    multiprocessing), or "module:attr". `in_process=True` runs the owner in a thread instead, for tests and small programs: then any callable will do.
    """

    def __init__(self, handler: Any, *, name: str | None = None, in_process: bool = False, **options: Any) -> None:
        if BOOTSTRAPPING:
            raise RuntimeError(
                "a Worker is started while its owner process imports the main script; put the code that starts it under if __name__ == '__main__':"
            )
        self.options = WorkerOptions.of(options)
        if in_process and (self.options.run_timeout_s is not None or self.options.standby):
            raise ValueError("run_timeout_s and standby need an owner that is a process: a thread cannot be ended or replaced")
        self.name = name or f"worker-{os.getpid()}-{os.urandom(4).hex()}"
        self._handler, self._in_process, self._options = handler, in_process, options
        self._made_by = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None  # the supervisor
        self._session: Session | None = None
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The present owner's process id; None while there is none."""
        if self._in_process:
            return os.getpid() if self._thread is not None and self._thread.is_alive() else None
        try:
            segment = Segment.attach(self.name, read_only=True)
        except (WorkerNotFound, SegmentError):
            return None
        return None if segment.owner_is_dead() else segment.owner().pid

    @property
    def supervisor_pid(self) -> int | None:
        """The process that starts a new owner when one dies; None when it does not run, as with in_process=True."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, *, user: int | None = None, group: int | None = None, wait_for_name: bool = False) -> Worker:
        """Starts the owner and waits until it is ready.

        user, group: ids for supervisor and owner to run as, for a program that runs as root. wait_for_name: where another live worker has this name,
        that is no error: return, and take the name over when it is free.

        Raises WorkerStartupError with the owner's traceback, or when startup_timeout_s has passed; with in_process=True what the handler raises itself.
        """
        if self._process is not None or self._thread is not None:
            raise RuntimeError(f"worker {self.name!r} was started already")
        try:
            if self._in_process:
                self._start_thread()
            else:
                try:
                    self._start_supervisor(user, group, wait_for_name)
                except OSError as error:
                    raise WorkerStartupError(f"worker {self.name!r} could not start: {why(error)}") from error
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Drains and stops the owner, by force when drain_timeout_s has passed. Stopping twice is fine; a forked child stops nothing."""
        if os.getpid() != self._made_by:
            return
        if self._session is not None and self._thread is not None:
            self._session.owner.stop()
            self._thread.join()
            self._session = self._thread = None
            atexit.unregister(self.stop)
        if self._process is not None:
            process, self._process = self._process, None
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                process.wait(self.options.drain_timeout_s + 2 * STOP_MARGIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.returncode:  # it had no chance to clean up
                with contextlib.suppress(SegmentError):
                    Segment.discard(self.name, ORPHAN_S)

    def connect(self, **options: Any) -> Client:
        """A client of this worker; options as for gpuworker.connect, pickles allowed where they are for the worker."""
        return Client(self.name, **{"allow_pickle": self.options.allow_pickle, **options})

    def stats(self) -> Stats:
        """The worker's statistics now."""
        return Stats.of(self.name)

    def __enter__(self) -> Worker:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    def _start_thread(self) -> None:
        ready = threading.Event()
        failure: list[BaseException] = []
        self._session = session = Session(self._handler, self.name, self.options, may_exit=False)

        def main() -> None:
            try:
                session.run(ready.set)
            except BaseException as error:
                if ready.is_set():
                    log.error("worker %s has ended in", self.name, exc_info=error)
                failure.append(error)
            finally:
                ready.set()

        atexit.register(self.stop)  # the thread would be cut off, and leave its segment
        self._thread = threading.Thread(target=main, name=f"gpuworker-owner-{self.name}", daemon=True)
        self._thread.start()
        ready.wait()
        if failure:
            raise failure[0]

    def _start_supervisor(self, user: int | None, group: int | None, wait_for_name: bool) -> None:
        message = (Job.of(self._handler, self.name, self._options), os.getpid(), wait_for_name)
        job_read, job_write = os.pipe()
        status_read, status_write = os.pipe()
        with open(status_read, "rb", buffering=0) as status:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "gpuworker.worker.supervise", str(job_read), str(status_write)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(job_read, status_write),
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                    start_new_session=True,  # a terminal's Ctrl-C is for this process, which decides what it means
                    user=user,
                    group=group,
                )
            finally:
                os.close(job_read)
                os.close(status_write)
            try:
                with contextlib.suppress(BrokenPipeError):
                    send(job_write, message)
            finally:
                os.close(job_write)
            self._wait_until_ready(status.fileno())

    def _wait_until_ready(self, status_fd: int) -> None:
        assert self._process is not None
        message = b""
        while not message.endswith(b"\n"):
            gone = self._process.poll() is not None  # asked first: what it said last is then there to be read
            if not select.select([status_fd], [], [], 0.1)[0] and not gone:
                continue
            part = b"" if gone and not select.select([status_fd], [], [], 0)[0] else os.read(status_fd, 65536)
            if not part:  # or no end of file, while a process forked in between holds the pipe
                raise WorkerStartupError(
                    f"the supervisor of worker {self.name!r} ended with status {self._process.wait()} before the owner was ready"
                )
            message += part
        report = json.loads(message)
        if "error" in report:
            self._process.wait()
            more = "".join(f"\n\n{title}:\n{report[key]}" for key, title in _MORE.items() if report.get(key))
            raise WorkerStartupError(f"worker {self.name!r} could not start: {report['error']}{more}")
