"""What one event loop waits for in one segment: it looks at all of it with one call whenever the owner has rung (native/chime.c)."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from gpuworker._native import ffi, lib
from gpuworker.client.async_line import Line
from gpuworker.client.link import SLICE_NS, Link
from gpuworker.errors import RequestCancelled
from gpuworker.segment import State
from gpuworker.segment.chime import Chime
from gpuworker.segment.wire import SLOT_MASK

_TO_THE_END: int = lib.GW_TO_THE_END
_TICK_S = SLICE_NS / 1e9
MOST_AT_ONCE = 16
_poll_many, _ring_and_spin, _ring_doorbell, _unpack = lib.gw_poll_many, lib.gw_ring_and_spin, lib.gw_ring_doorbell, ffi.unpack


class Awaited(NamedTuple):
    """One request. `future` gets its answer, or only word that there is something to read (`is_stream`)."""

    watch: Watch
    future: asyncio.Future[Any]
    ticket: int
    deadline_ns: int
    is_stream: bool

    def drop(self) -> None:
        """Nobody waits for it any more: its slot goes back, and what became of it is no matter."""
        if not self.watch.forget(self) and self.future.done() and not self.future.cancelled():
            self.future.exception()  # or asyncio would say that nobody has asked for it


class Watch:
    """Of one link, for one loop; used in that loop's thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, link: Link) -> None:
        """Raises SegmentError when there is no FIFO to be had."""
        self.link, self.line = link, Line(loop)
        self._loop, self._port = loop, link.port
        capacity = link.segment.capacity
        self._tickets, self._seen = ffi.new("int64_t[]", [-1] * capacity), ffi.new("uint32_t[]", capacity)
        self._found, self._is_over = ffi.new("uint32_t[]", capacity), ffi.new("uint32_t *")
        self._awaited: dict[int, Awaited] = {}  # by slot
        self._timer: asyncio.TimerHandle | None = None
        self._next_tick_ns = self._at_once = 0
        self._is_last = self._is_quiet = False
        link.submit = lib.gw_submit_quietly
        self._chime = Chime(link.segment)
        self._fd = self._chime.fd
        loop.add_reader(self._fd, self.look)
        self.look()  # which arms it

    def answer(self, ticket: int, deadline_ns: int) -> Awaited:
        """A request that was just sent: its future will have its answer, or its error."""
        return self._add(ticket, _TO_THE_END, deadline_ns, is_stream=False)

    def answer_soon(self, ticket: int, deadline_ns: int) -> Awaited:
        """The same for one that was sent quietly (native/ring.c). While others are on their way, and always where waits do not spin, the doorbell is rung when the
        loop comes round: what all of its tasks send until then arrives together, with one system call. If nothing else is on its way it is rung now, and the answer
        may be there at once, after a spin of some us where such spins pay (native/wake.c); but not always: a task that sends one request after another has to let
        others run."""
        if self._awaited or self._at_once >= MOST_AT_ONCE or self.link.parks:
            if not self._is_quiet:
                self._is_quiet = True
                self._loop.call_soon(self._ring)
        elif _ring_and_spin(self._port, ticket):
            self._at_once += 1
            awaited = self._add(ticket, _TO_THE_END, deadline_ns, is_stream=False)
            self._deliver(ticket & SLOT_MASK)
            return awaited
        return self._add(ticket, _TO_THE_END, deadline_ns, is_stream=False)

    def _ring(self) -> None:
        self._is_quiet = False
        _ring_doorbell(self._port)

    def news(self, ticket: int, seen: int, deadline_ns: int) -> Awaited:
        """An answer that comes piece by piece: its future will be done when there are more than `seen` pieces, or it is over."""
        return self._add(ticket, seen, deadline_ns, is_stream=True)

    def _add(self, ticket: int, seen: int, deadline_ns: int, is_stream: bool) -> Awaited:
        slot = ticket & SLOT_MASK
        self._tickets[slot], self._seen[slot] = ticket, seen
        awaited = self._awaited[slot] = Awaited(self, self._loop.create_future(), ticket, deadline_ns, is_stream)
        if self._timer is None:
            self.start_ticking()
        if deadline_ns and deadline_ns < self._next_tick_ns:
            self._time(awaited)
        return awaited

    def forget(self, awaited: Awaited) -> bool:
        """Withdraws it, or gives its slot back. False if it has been delivered."""
        if not self.leave(awaited):
            return False
        if self.link.withdraw(awaited.ticket):
            lib.gw_count_client(self._port, lib.GW_CANCELLED)
        else:
            self.link.abandon(awaited.ticket)
        self.line.call(1)
        return True

    def leave(self, awaited: Awaited) -> bool:
        """Its slot is somebody else's concern. False if it has been delivered."""
        slot = awaited.ticket & SLOT_MASK
        if self._awaited.get(slot) is not awaited:
            return False
        self._drop(slot)
        return True

    def _drop(self, slot: int) -> None:
        del self._awaited[slot]
        self._tickets[slot] = -1
        if self._is_last and not self._awaited:
            self.close()

    def look(self) -> None:
        """Delivers what there is."""
        self._at_once = 0
        n = _poll_many(self._port, self._fd, self._tickets, self._seen, self._found, self._is_over)
        if n > 0:
            for slot in _unpack(self._found, n):
                self._deliver(slot)
            if self.line:
                self.line.call(n)
        if self._is_over[0]:
            self._judge()

    def _deliver(self, slot: int) -> None:
        awaited = self._awaited[slot]
        future, ticket = awaited.future, awaited.ticket
        self._drop(slot)
        if awaited.is_stream:
            if not future.done():
                future.set_result(None)
        elif future.done():  # cancelled in this moment
            self.link.abandon(ticket)
        else:
            try:
                value = self.link.answer(ticket, 0)
            except Exception as error:
                future.set_exception(error)
            except BaseException:
                future.set_exception(RequestCancelled("reading the answer was interrupted"))
                raise
            else:
                future.set_result(value)

    # What does not depend on being rung: deadlines, the owner's end, a chime that was lost.

    def start_ticking(self) -> None:
        """Looks every 50 ms for as long as anybody waits."""
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._tick)
            self._next_tick_ns = time.monotonic_ns() + SLICE_NS

    def _tick(self) -> None:
        self._timer = None
        if not self._awaited and not self.line:
            return
        self.start_ticking()
        self.look()
        for awaited in list(self._awaited.values()):
            if awaited.deadline_ns and awaited.deadline_ns < self._next_tick_ns:
                self._time(awaited)
        segment = self.link.segment
        if segment.overview().state >= State.STOPPED or segment.is_dead():
            self._judge()

    def _time(self, awaited: Awaited) -> None:
        left_ns = awaited.deadline_ns - time.monotonic_ns()
        if left_ns > 0:
            self._loop.call_later(left_ns / 1e9, self._time_is_up, awaited)
        else:
            self._loop.call_soon(self._time_is_up, awaited)

    def _time_is_up(self, awaited: Awaited) -> None:
        if self._awaited.get(awaited.ticket & SLOT_MASK) is not awaited or awaited.future.done():
            return
        if time.monotonic_ns() < awaited.deadline_ns:  # the loop's clock is coarser than ours
            self._time(awaited)
        else:
            self._check(awaited)

    def _judge(self) -> None:
        for awaited in list(self._awaited.values()):
            self._check(awaited)
        self.line.call_all()

    def _check(self, awaited: Awaited) -> None:
        if awaited.is_stream:  # reading it tells
            self._deliver(awaited.ticket & SLOT_MASK)
            return
        try:
            self.link.check(awaited.ticket, awaited.deadline_ns)
        except Exception as error:
            self._fail(awaited, error)

    def _fail(self, awaited: Awaited, error: Exception) -> None:
        self._drop(awaited.ticket & SLOT_MASK)
        self.link.abandon(awaited.ticket)
        if not awaited.future.done():
            awaited.future.set_exception(error)

    @property
    def is_closed(self) -> bool:
        """Whether its client was closed: its tickets are worth nothing any more."""
        return self.link.segment.fd < 0

    @property
    def is_open(self) -> bool:
        """Whether it may be waited with."""
        return self._fd >= 0

    def retire(self) -> None:
        """Closes when nobody waits for anything any more: another one is used from now on."""
        self._is_last = True
        self.line.call_all()
        if not self._awaited:
            self.close()

    def let_go(self) -> None:
        """In a forked child: its descriptor of the FIFO goes, and what is the parent's stays as it is."""
        self._fd = -1
        self._chime.close()

    def close(self, error: Exception | None = None) -> None:
        """Ends it, with this error for whoever waits."""
        self._is_last = False
        if self._fd >= 0:
            self._fd = -1
            if not self._loop.is_closed():
                self._loop.remove_reader(self._chime.fd)
                if self._timer is not None:
                    self._timer.cancel()
            self._timer = None
            self._chime.close()
        for awaited in list(self._awaited.values()):
            self._drop(awaited.ticket & SLOT_MASK)
            self.link.abandon(awaited.ticket)
            if error is not None and not self._loop.is_closed() and not awaited.future.done():
                awaited.future.set_exception(error)
        self.line.call_all()
