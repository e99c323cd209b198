"""The owner's queue as policies see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from gpuworker._native import ffi, lib
from gpuworker.scheduling import Queued

_MAX_LENGTH: int = lib.GW_MAX_LENGTH


class Backlog(Sequence[Queued]):
    """Requests collected and not yet taken, oldest first. It lies in C memory: a policy that only asks for its length and its first pays for no more.

    Valid until the next gw_collect or gw_take; its length is what gw_collect returned.
    """

    __slots__ = ("_items", "length")

    def __init__(self, port: Any) -> None:
        if lib.gw_open_backlog(port):
            raise MemoryError("no memory for the owner's queue")
        self._items = lib.gw_backlog(port)
        self.length = 0

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Queued: ...
    @overload
    def __getitem__(self, index: slice) -> list[Queued]: ...
    def __getitem__(self, index: int | slice) -> Queued | list[Queued]:
        if isinstance(index, slice):
            return list(self)[index]
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return queued(self._items[index % self.length])

    def __iter__(self) -> Iterator[Queued]:
        return map(queued, ffi.unpack(self._items, self.length))


def queued(item: Any) -> Queued:
    """A gw_item as policies see it; its terms unpacked as gw_terms packed them."""
    terms = item.terms
    return Queued(item.ticket, item.enqueue_ns, item.deadline_ns, (terms >> 32) * 1000, terms >> 8 & _MAX_LENGTH, terms & 0xFF, item.participant)
