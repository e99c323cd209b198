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
    """Memory for one array: `pointer` is where it is copied to, `array` is over it; a fresh view of that goes to the caller."""

    __slots__ = ("_memory", "_unused", "array", "layout", "pointer")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
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

    def take(self, layout: Layout) -> Landing:
        """One for this layout. Raises SegmentError for a shape numpy refuses."""
        kept = self._kept
        for _ in range(len(kept)):
            try:
                landing = kept.pop(0)
            except IndexError:  # another thread was faster
                break
            if landing.layout is not layout:
                continue  # the shape has changed: let it go
            if landing.is_unused():
                return landing
            kept.append(landing)
        return Landing(layout)

    def keep(self, landing: Landing) -> None:
        """For the next time, if it is worth it."""
        if landing.layout.data_bytes <= KEPT_BYTES and len(self._kept) < KEPT:
            self._kept.append(landing)
