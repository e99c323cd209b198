"""Logs of the processes we start: to stderr, at the level that GPUWORKER_LOG names."""

from __future__ import annotations

import contextlib
import logging
import os
import select

LEVEL = "GPUWORKER_LOG"
PATIENCE_MS = 1000


class Stderr:
    """This process's stderr, written to without ever being held up: a reader who has been asleep for a second loses some of it, as owners must be looked
    after all the same."""

    def __init__(self) -> None:
        self._is_stuck = False
        self._poll = select.poll()
        self._poll.register(2, select.POLLOUT)

    def write(self, words: str | bytes) -> None:
        """Writes it, or drops it."""
        raw = words.encode(errors="backslashreplace") if isinstance(words, str) else words
        for at in range(0, len(raw), select.PIPE_BUF):
            self._is_stuck = not self._poll.poll(0 if self._is_stuck else PATIENCE_MS)
            if not self._is_stuck:
                with contextlib.suppress(OSError):
                    os.write(2, raw[at : at + select.PIPE_BUF])  # so much a writable pipe takes at once

    def flush(self) -> None:
        """Nothing is kept back."""


stderr = Stderr()


def set_up(default: str = "WARNING") -> None:
    """GPUWORKER_LOG, or the default, is the level of our own logs; the processes that this one starts inherit it. DEBUG also lets other libraries say more."""
    level = os.environ.setdefault(LEVEL, default).upper()
    logging.basicConfig(
        stream=stderr, format="%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s", level="INFO" if level == "DEBUG" else "WARNING"
    )
    logging.getLogger("gpuworker").setLevel(level)
