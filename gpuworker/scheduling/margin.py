"""By how much a prediction is raised so that few batches take longer."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterable

WINDOW = 128
HIGHEST = 2.0


class Margin:
    """The factor that all but `miss_rate` of the recent batches stayed within, from 1 to HIGHEST.

    Adaptive conformal inference (Gibbs and Candes, NeurIPS 2021): the factor is a quantile of the last WINDOW ratios of observed to predicted run time, and
    which quantile moves with every batch by `step`, towards a wider one after a miss, so that the rate of misses holds even while the ratios change. Being
    a quantile, it is exactly 1 where run times are predicted exactly, whatever their scale.
    """

    def __init__(self, miss_rate: float, step: float) -> None:
        self.value = 1.0
        self._miss_rate, self._step = miss_rate, step
        self._level = miss_rate
        self._recent: deque[tuple[float, Hashable]] = deque()
        self._sorted: list[float] = []

    def observe(self, ratio: float, used: float, of: Hashable = None) -> None:
        """A batch, `of` some shape, took `ratio` times its prediction when the factor in use was `used`. What no factor could cover is not looked at."""
        if not ratio <= HIGHEST:
            return
        has_missed = ratio > used
        if has_missed or used > 1:  # at 1 it cannot go lower: a level that rose all the same would take long to come back when noise does
            self._level = min(0.5, max(0.0, self._level + self._step * (self._miss_rate - has_missed)))
        if len(self._recent) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft()[0])]
        self._recent.append((ratio, of))
        insort(self._sorted, ratio)
        self._update()

    def restate(self, factor: float, of: Hashable) -> None:
        """The prediction `of` some shape has been multiplied by `factor`: its ratios are to the new one from now on."""
        self._recent = deque((ratio / factor if shape == of else ratio, shape) for ratio, shape in self._recent)
        self._sorted = sorted(ratio for ratio, _ in self._recent)
        self._update()

    def restart(self, ratios: Iterable[float]) -> None:
        """Forgets all ratios but these."""
        self._recent.clear()
        self._sorted.clear()
        self._update()
        for ratio in ratios:
            self.observe(ratio, ratio)

    def _update(self) -> None:
        rank = math.ceil((1 - self._level) * (len(self._sorted) + 1))
        highest = self._sorted[min(rank, len(self._sorted)) - 1] if self._sorted else 1.0
        self.value = min(HIGHEST, max(1.0, highest))
