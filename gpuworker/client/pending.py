"""A request on its way."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from gpuworker._native import lib
from gpuworker.client.locks import Lock
from gpuworker.errors import DeadlineExceeded, RequestCancelled, SegmentError

if TYPE_CHECKING:
    from gpuworker.client.link import Link


def deadline(timeout: float) -> int:
    """When `timeout` seconds from now will have passed, on CLOCK_MONOTONIC in ns. Raises ValueError for what is no number, a negative one or nan."""
    try:
        is_one = bool(timeout >= 0)
    except (TypeError, ValueError):
        is_one = False
    if not is_one:
        raise ValueError(f"timeout={timeout!r}: give seconds >= 0, or None for no limit")
    return time.monotonic_ns() + int(min(timeout, 1e9) * 1e9)


class Pending:
    """The answer-to-be of one request; made by `Client.enqueue`. All methods may be called from any thread of the process that made it."""

    __slots__ = ("__weakref__", "_cancelled", "_deadline_ns", "_error", "_link", "_lock", "_settled", "_ticket", "_value")

    def __init__(self, link: Link | None, ticket: int, deadline_ns: int) -> None:
        self._settled = self._cancelled = False
        self._link, self._ticket, self._deadline_ns = link, ticket, deadline_ns
        self._lock = Lock()
        self._value: Any = None
        self._error: Exception | None = None

    @classmethod
    def settled(cls, value: Any) -> Pending:
        """One that has its answer already (from a fallback)."""
        pending = cls(None, -1, 0)
        pending._value, pending._settled = value, True
        return pending

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the answer and returns it, or raises what `Client.submit` would.

        `timeout` in seconds counts from this call, beside the one given to `enqueue`. When either passes the request is withdrawn (it does not run if
        it has not started) and DeadlineExceeded is raised.
        """
        deadline_ns = self._deadline_ns
        if timeout is not None:
            own = deadline(timeout)
            deadline_ns = min(deadline_ns, own) if deadline_ns else own
        link = self._link
        if link is not None and link.pid != os.getpid():  # asked first: a thread that does not exist here may have held the lock
            raise SegmentError("this request belongs to another process (it was made before a fork)")
        if not self._lock.acquire(timeout=-1 if not deadline_ns else max(deadline_ns - time.monotonic_ns(), 0) / 1e9):
            raise DeadlineExceeded("the timeout passed while another thread was waiting for the same answer", "queued")
        try:
            if not self._settled:
                self._settle(deadline_ns)
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error
        return self._value

    def _settle(self, deadline_ns: int) -> None:
        if self._cancelled or self._link is None:
            self._error = RequestCancelled("the request was cancelled")
        else:
            try:
                self._value = self._link.answer(self._ticket, deadline_ns)
            except Exception as error:
                self._error = error
        self._settled, self._link = True, None

    def done(self) -> bool:
        """Whether `result` would return or raise without waiting."""
        link = self._link
        return self._settled or self._cancelled or link is None or link.is_answered(self._ticket)

    def cancel(self) -> bool:
        """Withdraws the request. True if its answer will not be delivered; then a waiting `result` raises RequestCancelled.

        A request that has not started never runs; one that has runs to its end and its result is dropped.
        """
        link = self._link
        if self._settled or link is None:
            return False
        if not self._cancelled and link.withdraw(self._ticket):
            self._cancelled = True
            lib.gw_count_client(link.port, lib.GW_CANCELLED)
        return self._cancelled

    def drop(self) -> None:
        """Gives its slot back now, also if it is answered and nobody has read the answer."""
        link = self._link
        if link is not None and not self.cancel():
            link.abandon(self._ticket)

    def __del__(self) -> None:
        link = getattr(self, "_link", None)
        if link is not None and not self._settled and not self._cancelled:
            link.abandon(self._ticket)
