"""The tasks of one event loop that wait for a free slot, first come, first served."""

from __future__ import annotations

import asyncio
import time
from collections import deque

LEAST_PAUSE_S, MOST_PAUSE_S = 0.001, 0.02


class Line:
    """A task at its front looks again when one of the loop's own answers has freed a slot, and else, as other processes free slots too, from time to time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = LEAST_PAUSE_S

    def __bool__(self) -> bool:
        while self._waiting and self._waiting[0].done():  # too late, or cancelled
            self._waiting.popleft()
        return bool(self._waiting)

    async def wait(self, deadline_ns: int, is_first: bool) -> bool:
        """Until it is this task's turn to look, or its deadline (0: none). is_first: it has looked in vain, and keeps its place. -> False when it was called to see
        that there is no worker any more, else True."""
        turn: asyncio.Future[bool] = self._loop.create_future()
        if is_first:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
            self._pause_s = LEAST_PAUSE_S
        if self._timer is None:
            self._timer = self._loop.call_later(self._pause_s, self._look_again)
        too_late = self._loop.call_later(max(deadline_ns - time.monotonic_ns(), 0) / 1e9, _call, turn, True) if deadline_ns else None
        try:
            return await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.call(1)  # its turn is the next one's
            raise
        finally:
            if too_late is not None:
                too_late.cancel()

    def call(self, n: int) -> None:
        """So many slots have become free."""
        while n and self._waiting:
            n -= _call(self._waiting.popleft(), True)

    def call_all(self) -> None:
        """There is no worker any more: all of them are to see it."""
        while self._waiting:
            _call(self._waiting.popleft(), False)

    def _look_again(self) -> None:
        self._timer = None
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)
        if self._waiting:
            self.call(1)
            self._timer = self._loop.call_later(self._pause_s, self._look_again)


def _call(turn: asyncio.Future[bool], is_served: bool) -> bool:
    if turn.done():
        return False
    turn.set_result(is_served)
    return True
