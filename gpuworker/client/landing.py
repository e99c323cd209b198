"""Where arrays land: memory of the caller's own, on a cache line, with the fewest allocations.

A client mostly receives arrays of one shape, and mostly drops one before or just after it asks for the next. So a few buffers of the last shape are
kept, and one is used again once nobody but this module refers to it, which CPython's reference count tells exactly: every array, view, memoryview or
tensor made from a result keeps the buffer referred to.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gpuworker._native import ffi
from gpuworker.payload import Layout, array_in
from gpuworker.segment.wire import LINE

KEPT = 3
KEPT_BYTES = 1 << 16  # larger ones cost less to allocate than to copy
_UINT8 = np.dtype(np.uint8)
_getrefcount, _from_buffer, _empty = sys.getrefcount, ffi.from_buffer, np.empty


class Landing:
    """Memory for one array: `pointer` is where it is copied to, `array` is over it; a fresh view of that goes to the caller.

    `meta` and `response` are what a response that fits looks like in its slot, for gw_wait_for.
    """

    __slots__ = ("_memory", "_unused", "array", "meta", "pointer", "response")

    def __init__(self, meta: bytes, response: int, layout: Layout) -> None:
        self.meta, self.response = meta, response
        self._memory = _empty(layout.data_bytes + LINE, _UINT8)
        start = _from_buffer(self._memory)
        skip = -int(ffi.cast("uintptr_t", start)) % LINE
        self.pointer = start + skip
        self.array: Any = array_in(layout, self._memory, skip)
        del start  # it refers to the memory, too
        self._unused = _getrefcount(self._memory)

    def is_unused(self) -> bool:
        """Whether no result that was made from it is alive."""
        return _getrefcount(self._memory) == self._unused


class Landings:
    """Hands out landings. Safe between threads: one that is handed out is in no list until it is given back."""

    def __init__(self) -> None:
        self._kept: list[Landing] = []

    def expected(self) -> Landing | None:
        """One for a response like the last ones, if there is one to spare. It is not given back when the response turns out to be another."""
        if not self._kept:
            return None
        try:
            landing = self._kept.pop()  # the one used last: it is in the cache
        except IndexError:  # another thread was faster
            return None
        return landing if landing.is_unused() else self._another(landing)

    def _another(self, used: Landing) -> Landing | None:
        """Taken out of the list before it is looked at: what is in the list may be another thread's in the next moment."""
        kept, others = self._kept, [used]
        found = None
        while found is None and kept:
            try:
                landing = kept.pop()
            except IndexError:  # another thread was faster
                break
            if landing.is_unused():
                found = landing
            else:
                others.append(landing)
        for landing in others:
            self.keep(landing)
        return found

    def keep(self, landing: Landing) -> None:
        """For the next time."""
        if len(self._kept) < KEPT:
            self._kept.append(landing)
