"""The client of one event loop: what it shares with the blocking one, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from gpuworker._native import lib
from gpuworker.client.async_watch import Awaited, Watch
from gpuworker.client.client import Client
from gpuworker.client.link import Link
from gpuworker.client.steps import Pause
from gpuworker.errors import GpuWorkerError, RequestCancelled, SegmentError


class Turn(NamedTuple):
    """A step: until this is done, or `until_ns` on CLOCK_MONOTONIC has come."""

    future: asyncio.Future[None]
    until_ns: int


_NO_SLOT = (-errno.EAGAIN, -errno.EDQUOT)


class LoopClient(Client):
    """A participant of its own, with a watch on what it has on its way. Used in its loop's thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, options: dict[str, Any], forget: Callable[[LoopClient], None]) -> None:
        super().__init__(name, **options)
        self.loop = loop
        self.watch: Watch | None = None
        self._retired: list[Watch] = []
        self._connecting: asyncio.Future[None] | None = None  # done when the task that connects has, or has not
        self._forget, self._is_shut_down = forget, False
        self._guard: AsyncGenerator[None, None] | None = self._until_shutdown()
        _step(self._guard.__anext__())

    def send(self, payload: Any, deadline_ns: int, terms: int) -> Awaited | int:
        """What waits for the answer, or the negative errno that says why the request is not on its way. Raises for payloads that cannot go."""
        watch = self.watch
        if watch is None or watch.line:  # others have come first
            return -errno.EAGAIN if watch is not None else -errno.ENOTCONN
        link = watch.link
        try:
            ticket = link.send(payload, deadline_ns, terms)
            if ticket < 0:
                return ticket
            awaited = watch.answer_soon(ticket, deadline_ns)
        except BaseException:
            link.undo()
            raise
        link.settle()
        return awaited

    def _send_now(self, link: Link, payload: Any, deadline_ns: int, terms: int) -> int:
        if self.watch is not None and self.watch.line:
            return -errno.EAGAIN
        ticket = link.send(payload, deadline_ns, terms)
        lib.gw_ring_doorbell(link.port)
        return ticket

    def settled(self, answer: Any) -> Awaited:
        """For an answer that came from elsewhere."""
        assert self.watch is not None
        future = self.loop.create_future()
        future.set_result(answer)
        return Awaited(self.watch, future, -1, 0, False)

    def let_go(self) -> None:
        """In a forked child."""
        for watch in (*self._retired, self.watch):
            if watch is not None:
                watch.let_go()

    async def live(self, deadline_ns: int) -> Link:
        """The link, see Client._connect."""
        link = self._link
        if link is None or link.lost:
            link = await self.drive(self._connect(deadline_ns))
            assert link is not None
        return link

    async def drive(self, steps: Any) -> Any:
        """Runs what waits, without keeping the loop from others."""
        has_looked = False
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    found = 0
                elif isinstance(step, Turn):
                    await asyncio.wait({step.future}, timeout=max(step.until_ns - time.monotonic_ns(), 0) / 1e9)
                    found = 0
                else:
                    watch = self.watch
                    assert watch is not None
                    watch.start_ticking()
                    is_served = await watch.line.wait(step.deadline_ns, has_looked)
                    has_looked = True
                    found = lib.gw_claim(step.link.port)
                    if not is_served and found in _NO_SLOT:
                        found = -errno.ETIMEDOUT
                step = steps.send(found)
        except StopIteration as over:
            return over.value
        finally:
            steps.close()

    def _connect(self, deadline_ns: int, give_up_ns: int | None = None) -> Any:
        """One task at a time; the others look at what has come of it. Their own time limits hold."""
        if give_up_ns is None:
            give_up_ns = time.monotonic_ns() + int(self.connect_timeout_s * 1e9)
        until_ns = min(deadline_ns, give_up_ns) if deadline_ns else give_up_ns
        while self._connecting is not None and time.monotonic_ns() < until_ns:
            yield Turn(self._connecting, until_ns)
            if self._link is not None and not self._link.lost:
                return self._link
        mine = self.loop.create_future()
        if self._connecting is None:
            self._connecting = mine
        try:
            return (yield from super()._connect(deadline_ns, give_up_ns))
        finally:
            if self._connecting is mine:
                self._connecting = None
                mine.set_result(None)

    def _try_to_link(self) -> GpuWorkerError | None:
        problem = super()._try_to_link()
        if self._link is not None:
            try:
                watch = Watch(self.loop, self._link)
            except SegmentError:
                self._link = None
                raise
            if self.watch is not None:
                self._retired = [old for old in self._retired if old.is_open]
                self._retired.append(self.watch)
                self.watch.retire()
            self.watch = watch
        return problem

    def __repr__(self) -> str:
        return f"<gpuworker.AsyncClient of {self.name!r}{', closed' if self._closed else ''}>"

    def close(self) -> None:
        """Leaves; what is on its way fails with RequestCancelled."""
        watches, self.watch, self._retired = [*self._retired, *([self.watch] if self.watch is not None else [])], None, []
        for watch in watches:
            watch.close(RequestCancelled("the client was closed"))
        super().close()
        for watch in watches:
            watch.link.segment.close()  # whatever still refers to it: a traceback may, for long
        guard, self._guard = self._guard, None
        if guard is not None and not self._is_shut_down:
            _step(guard.aclose())
        self._forget(self)

    async def _until_shutdown(self) -> AsyncGenerator[None, None]:
        """An event loop that ends in order (asyncio.run) closes the asynchronous generators that were begun in it: so this learns of it."""
        try:
            yield
        finally:
            self._is_shut_down = True
            if self._guard is not None:
                self.close()


def _step(awaitable: Any) -> None:
    """Runs what never waits."""
    with contextlib.suppress(StopIteration):
        awaitable.send(None)
