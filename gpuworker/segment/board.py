"""Where an owner's own counters are put for everybody to see: words in the segment's header."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpuworker._native import ffi, lib

SHOW_EVERY_NS = 50_000_000


def shown(port: Any, first: int = 0) -> list[int]:
    """All words from `first` on, as they are now; 0 where nobody has put anything."""
    words = ffi.new("uint64_t[]", lib.GW_EXECUTION)
    lib.gw_read_execution(port, words)
    return list(words)[first:]


class Board:
    """The words from `first` on, one for each of `names`. For the owner's thread."""

    def __init__(self, port: Any, first: int, names: Sequence[str]) -> None:
        assert first + len(names) <= lib.GW_EXECUTION
        self._port, self._first, self._names = port, first, names
        self._words = ffi.new("uint64_t[]", first + len(names))
        self._shown: list[int] = []
        self._shown_ns = 0

    @property
    def is_due(self) -> bool:
        """Whether what is shown is older than 50 ms: often enough for people, and cheap beside a batch."""
        return time.monotonic_ns() - self._shown_ns >= SHOW_EVERY_NS

    def show(self, values: Mapping[str, int]) -> None:
        """Puts a value for each name into the segment, where it stays when its owner has died. Others are passed over."""
        self._shown_ns = time.monotonic_ns()
        words = [values[name] for name in self._names]
        if words != self._shown:
            self._shown = words
            self._words[self._first : self._first + len(words)] = words
            lib.gw_publish_execution(self._port, self._words, self._first + len(words))
