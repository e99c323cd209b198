"""Run times that are known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class KnownRunTimes:
    """RunTimes from a function cost_ns(size, length) that is non-decreasing in both: for simulations, and where a profile is to be trusted."""

    learns = False

    def __init__(self, cost_ns: Callable[[int, int], int], max_batch_size: int) -> None:
        self.version = 0
        self._cost_ns, self._max_batch_size = cost_ns, max_batch_size
        self._tables: dict[int, Sequence[int]] = {}

    def table(self, length: int) -> Sequence[int]:
        """See RunTimes.table."""
        if length not in self._tables:
            self._tables[length] = [0, *(self._cost_ns(size, length) for size in range(1, self._max_batch_size + 1))]
        return self._tables[length]

    def observe(self, size: int, length: int, run_ns: int) -> None:
        """What was observed changes nothing."""
