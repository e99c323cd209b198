"""Starting an owner from another program: in a fresh interpreter, or in a thread of this one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import spawn
from types import TracebackType
from typing import Any

from gpuworker.client import Client
from gpuworker.errors import SegmentError, WorkerStartupError
from gpuworker.segment import Segment
from gpuworker.segment.stats import Stats
from gpuworker.worker.handler import name_of
from gpuworker.worker.options import WorkerOptions
from gpuworker.worker.session import Session

log = logging.getLogger("gpuworker")

BOOTSTRAPPING = False  # set in the owner process while it imports the program's main script


class Worker:
    """Runs an owner for as long as a `with` block (or from `start` to `stop`):

        with gpuworker.Worker(run_batch, max_batch_size=64, max_wait_ms=2) as worker:
            print(worker.connect().submit("hello"))

    The owner is a fresh interpreter, never a fork, and ends with this process, however this process ends. The handler is a function, a class or an
    instance that can be imported (also from the main script, which then needs `if __name__ == "__main__":` as with multiprocessing), or "module:attr".
    `in_process=True` runs the owner in a thread instead, for tests and small programs: then any callable will do.
    """

    def __init__(self, handler: Any, *, name: str | None = None, in_process: bool = False, **options: Any) -> None:
        if BOOTSTRAPPING:
            raise RuntimeError(
                "a Worker is started while its owner process imports the main script; put the code that starts it under if __name__ == '__main__':"
            )
        self.options = WorkerOptions.of(options)
        self.name = name or f"worker-{os.getpid()}-{os.urandom(4).hex()}"
        self._handler, self._in_process, self._options = handler, in_process, options
        self._made_by = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._session: Session | None = None
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The owner's process id; None when it is not running."""
        if self._in_process:
            return os.getpid() if self._thread is not None and self._thread.is_alive() else None
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> Worker:
        """Starts the owner and waits until it is ready.

        Raises WorkerStartupError with the owner's traceback, or when startup_timeout_s has passed; with in_process=True what the handler raises itself.
        """
        if self._process is not None or self._thread is not None:
            raise RuntimeError(f"worker {self.name!r} was started already")
        try:
            if self._in_process:
                self._start_thread()
            else:
                self._start_process()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Drains and stops the owner: SIGTERM, and SIGKILL when drain_timeout_s has passed. Stopping twice is fine; a forked child stops nothing."""
        if os.getpid() != self._made_by:
            return
        if self._session is not None and self._thread is not None:
            self._session.owner.stop()
            self._thread.join()
            self._session = self._thread = None
        if self._process is not None:
            process, self._process = self._process, None
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                process.wait(self.options.drain_timeout_s + 3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.returncode:  # it had no chance to clean up
                with contextlib.suppress(SegmentError):
                    Segment.discard(self.name)

    def connect(self, **options: Any) -> Client:
        """A client of this worker; options as for gpuworker.connect."""
        return Client(self.name, **options)

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

        self._thread = threading.Thread(target=main, name=f"gpuworker-owner-{self.name}", daemon=True)
        self._thread.start()
        ready.wait()
        if failure:
            raise failure[0]

    def _start_process(self) -> None:
        job = self._job()
        job_read, job_write = os.pipe()
        status_read, status_write = os.pipe()
        with open(status_read, "rb", buffering=0) as status:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "gpuworker.worker", str(job_read), str(status_write)],
                    pass_fds=(job_read, status_write),
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                )
            finally:
                os.close(job_read)
                os.close(status_write)
            with contextlib.suppress(BrokenPipeError), open(job_write, "wb") as pipe:
                pipe.write(len(job).to_bytes(8, "little") + job)
            self._wait_until_ready(status.fileno())

    def _job(self) -> bytes:
        """What the owner needs to know, pickled by reference: the handler itself travels as its import path."""
        try:
            handler = pickle.dumps(self._handler)
        except Exception as error:
            raise TypeError(
                f"handler {name_of(self._handler)} cannot be imported by another process ({error}); "
                "define it at the top level of a module, name it as 'module:attr', or use in_process=True"
            ) from None
        preparation = spawn.get_preparation_data(f"gpuworker {self.name}")
        preparation.pop("authkey", None)
        if b"__main__" not in handler:  # only a handler that lives in the main script makes the owner import that script
            preparation = {key: value for key, value in preparation.items() if not key.startswith("init_main")}
        return pickle.dumps((preparation, handler, self.name, self._options, os.getpid()))

    def _wait_until_ready(self, status_fd: int) -> None:
        assert self._process is not None
        give_up = time.monotonic() + self.options.startup_timeout_s
        message = b""
        while not message.endswith(b"\n"):
            gone = self._process.poll() is not None  # asked first: what it said last is then there to be read
            if not select.select([status_fd], [], [], 0.1)[0]:
                if time.monotonic() > give_up:
                    raise WorkerStartupError(f"worker {self.name!r} was not ready within startup_timeout_s={self.options.startup_timeout_s:g}")
                if not gone:
                    continue
            part = b"" if gone and not select.select([status_fd], [], [], 0)[0] else os.read(status_fd, 65536)
            if not part:  # or no end of file, while a process forked in between holds the pipe
                code = self._process.wait()
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
                raise WorkerStartupError(f"the owner of worker {self.name!r} {how} before it was ready; its own output says more")
            message += part
        report = json.loads(message)
        if "error" in report:
            self._process.wait()
            raise WorkerStartupError(f"worker {self.name!r} could not start: {report['error']}\n\nIn the owner:\n{report['traceback']}")
