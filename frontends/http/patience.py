"""One timer for all the requests of an event loop that have just begun, in place of one each: only those that are still there when it comes round cost more."""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol

PERIOD_S = 0.02
"""Requests are looked at after one to two of these: most are answered by then."""


class Waiting(Protocol):
    """What may take long."""

    def watch(self) -> None:
        """It does."""


class Patience:
    """Of one loop; used in its thread only. What has entered and has not left is told to `watch` after one to two periods."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._new: set[Waiting] = set()
        self._old: set[Waiting] = set()
        self._is_ticking = False

    def enter(self, one: Waiting) -> None:
        """It begins."""
        self._new.add(one)
        if not self._is_ticking:
            self._is_ticking = True
            self.loop.call_later(PERIOD_S, self._tick)

    def leave(self, one: Waiting) -> None:
        """It is over."""
        self._new.discard(one)
        self._old.discard(one)

    def _tick(self) -> None:
        late, self._old, self._new = self._old, self._new, set()
        self._is_ticking = bool(self._old)
        if self._is_ticking:
            self.loop.call_later(PERIOD_S, self._tick)
        for one in late:
            one.watch()


_of_this_thread = threading.local()


def of(loop: asyncio.AbstractEventLoop) -> Patience:
    """That of the loop that runs in this thread."""
    found: Patience | None = getattr(_of_this_thread, "patience", None)
    if found is None or found.loop is not loop:
        found = _of_this_thread.patience = Patience(loop)
    return found
