"""One owner process, as its supervisor sees it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

from gpuworker.worker import job as pipes
from gpuworker.worker import logs
from gpuworker.worker.job import Job

OWNER_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
"""For the owner's environment. OpenMP's threads (torch on the CPU) spin for each other by default, which is ruinous beside frontends on the same cores."""
LAST_WORDS_BYTES = 2048
READS = 32
"""At a time, of 64 KiB: more than a pipe holds, and an owner that never stops writing does not keep us from our other business."""


class OwnerProcess:
    """Started in a fresh interpreter; loads the handler; told to `go`, it takes the segment and serves. Call `pump` when one of `fds` is readable.

    `loaded`, `ready` (serving) and `released` (it has given the segment up to the next owner) are what it has reported so far; `error` and `traceback`
    why it could not get ready.
    """

    def __init__(self, job: Job) -> None:
        self.loaded = self.ready = self.released = self.is_told_to_release = False
        self.error = self.traceback = ""
        self.killed_because = ""
        self.started_s = time.monotonic()
        self._told = b""
        self._words = b""
        self._stops = 0
        job_read, self._job_fd = os.pipe()
        self._status_fd, status_write = os.pipe()
        self._stderr_fd, stderr_write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpuworker.worker", str(job_read), str(status_write)],
                stdin=subprocess.DEVNULL,
                stderr=stderr_write,
                pass_fds=(job_read, status_write),
                env={**OWNER_ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # Ctrl-C reaches a terminal's whole process group; when an owner stops is its supervisor's business
            )
        except BaseException:
            for fd in (self._job_fd, self._status_fd, self._stderr_fd):
                os.close(fd)
            raise
        finally:
            for fd in (job_read, status_write, stderr_write):
                os.close(fd)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._pass_on = logs.passing_on(job.name, self.pid)
        for fd in (self._status_fd, self._stderr_fd):
            os.set_blocking(fd, False)
        with contextlib.suppress(BrokenPipeError):
            pipes.send(self._job_fd, (job, os.getpid()))

    @property
    def fds(self) -> Iterable[int]:
        """What to wait for; fewer once the process has closed some."""
        return [fd for fd in (self._pidfd, self._status_fd, self._stderr_fd) if fd >= 0]

    def go(self) -> None:
        """Its turn to own the segment, now or as soon as it has loaded."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._job_fd, b"!")

    def release(self) -> None:
        """Asks it to finish its batch, give the segment up, and end."""
        self.is_told_to_release = True
        self._signal(signal.SIGUSR1)

    def stop(self) -> None:
        """Asks it to drain; asked again, it stops at once. (By another signal: a service manager may have sent SIGTERM to both of us.)"""
        self._signal(signal.SIGINT if self._stops else signal.SIGTERM)
        self._stops += 1

    def kill(self, because: str = "") -> None:
        """Ends it. `because` is what `end` then says."""
        self.killed_because = self.killed_because or because
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def pump(self) -> None:
        """Takes in what it has reported and passes on what it has written to stderr."""
        self._told += b"".join(self._read("_status_fd"))
        *lines, self._told = self._told.split(b"\n")
        for line in lines:
            vars(self).update(json.loads(line))
        for part in self._read("_stderr_fd"):
            self._words = (self._words + part)[-LAST_WORDS_BYTES:]
            self._pass_on(part)

    def _read(self, attribute: str) -> Iterable[bytes]:
        fd: int = getattr(self, attribute)
        for _ in range(READS if fd >= 0 else 0):
            try:
                part = os.read(fd, 65536)
            except BlockingIOError:
                return
            if not part:
                os.close(fd)
                setattr(self, attribute, -1)
                return
            yield part

    def has_ended(self) -> bool:
        """Whether the process is gone; then all that it has said is in."""
        if self._process.poll() is None:
            return False
        self.pump()
        return True

    @property
    def status(self) -> int:
        """Exit status, or the negative number of the signal that ended it."""
        return self._process.returncode

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.killed_because:
            return self.killed_because
        return f"was killed by {signal.Signals(-self.status).name}" if self.status < 0 else f"exited with status {self.status}"

    @property
    def last_words(self) -> str:
        """The end of what it wrote to stderr: whole lines, at most LAST_WORDS_BYTES."""
        words = self._words if len(self._words) < LAST_WORDS_BYTES else self._words.partition(b"\n")[2]
        return words.decode(errors="replace").strip()

    def close(self) -> None:
        """Gives the descriptors back, once it has ended."""
        self._process.wait()
        self._pass_on(b"")
        for fd in (self._job_fd, *self.fds):
            os.close(fd)
        self._job_fd = self._pidfd = self._status_fd = self._stderr_fd = -1
