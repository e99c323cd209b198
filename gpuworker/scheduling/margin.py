"""By how much a prediction is raised so that few batches take longer."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

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
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, ratio: float, used: float) -> None:
        """A batch took `ratio` times its prediction when the factor in use was `used`. What no factor could have covered is not looked at."""
        if not ratio <= HIGHEST:
            return
        self._level = min(0.5, max(0.0, self._level + self._step * (self._miss_rate - (ratio > used))))
        if len(self._recent) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(ratio)
        insort(self._sorted, ratio)
        rank = math.ceil((1 - self._level) * (len(self._sorted) + 1))
        self.value = max(1.0, self._sorted[min(rank, len(self._sorted)) - 1])

    def restart(self, ratios: Iterable[float]) -> None:
        """Forgets all ratios but these."""
        self._recent.clear()
        self._sorted.clear()
        self.value = 1.0
        for ratio in ratios:
            self.observe(ratio, ratio)
