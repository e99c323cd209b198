"""What a supervisor listens to besides its owners: signals, and the end of the process that started it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any

RELOAD = signal.SIGUSR1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, RELOAD)


class Listener:
    """A context manager, in the main thread: signals are noted within its block, and handled as before after it."""

    def __init__(self, parent_pid: int | None, signals: Iterable[int] = _SIGNALS) -> None:
        self._signals = tuple(signals)
        self._parent = os.pidfd_open(parent_pid) if parent_pid is not None else -1
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._came: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Listener:
        self._before = {number: signal.signal(number, self._on_signal) for number in self._signals}
        self._wakeup_before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for fd in (self._wake_read, self._wake_write, self._parent):
            if fd >= 0:
                os.close(fd)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)

    def take_signals(self) -> list[int]:
        """Those that have come since the last call."""
        came, self._came = self._came, []
        return came

    def parent_is_gone(self) -> bool:
        """Whether the process that started this one has ended."""
        return self._parent >= 0 and bool(select.select([self._parent], [], [], 0)[0])

    def wait(self, fds: Iterable[int], longest_s: float, for_parent: bool = True) -> None:
        """Until a signal has come, one of the fds is readable, or the parent ends."""
        poll = select.poll()
        for fd in (self._wake_read, self._parent if for_parent else -1, *fds):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        if not self._came:
            poll.poll(longest_s * 1e3)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 512)
