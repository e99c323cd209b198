"""Boundaries learned from the traffic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpuworker.scheduling.boundaries import BatchCost, best_boundaries, cost_ratio

_FINEST = 4  # log2 of the narrowest bin
_DIGITS = 7  # leading binary digits that tell wider bins apart: they are 1.6 % of their lengths at most
_LONGEST = 2**32


class BoundaryLearner:
    """Watches lengths go by, and says when other boundaries would pad less.

    It keeps a histogram in bins of 16 tokens, wider from 2048 on, in which a request counts half as much after `half_life` more of them.
    `observe` belongs to the thread that serves, `propose` to any one other; neither waits for the other.
    """

    def __init__(self, k: int, *, max_length: int | None = None, half_life: int = 50_000, min_gain: float = 0.03, min_count: int = 1_000) -> None:
        """At most `k` boundaries, the last of them `max_length` (None: the longest length ever seen, rounded up to a bin).

        min_gain: share of the padded tokens (with a batch cost: of that cost) that new boundaries must save to be worth their graphs.
        min_count: requests, decayed, before anything is proposed.
        """
        if k < 1 or half_life < 1 or not 0 <= min_gain < 1 or min_count < 1:
            raise ValueError(f"out of range: k {k}, half_life {half_life}, min_gain {min_gain}, min_count {min_count}")
        if max_length is not None and not 1 <= max_length <= _LONGEST:
            raise ValueError(f"max_length {max_length} is not between 1 and 2**32")
        self.k, self.half_life, self.min_gain, self.min_count = k, half_life, min_gain, min_count
        self.max_length = max_length
        self._longest = max_length or _LONGEST
        self._bin_ends = np.minimum(_bin_ends(self._longest), self._longest)
        self._seen = [0] * len(self._bin_ends)  # only ever counts up, so that `propose` can take the difference without a lock
        self._absorbed = np.zeros(len(self._bin_ends), np.int64)
        self._weights = np.zeros(len(self._bin_ends))
        self._learned_from = 0.0

    def observe(self, length: int) -> None:
        """Counts a request, in constant time. One without a length (0) or that is too long to be served is left out."""
        if 0 < length <= self._longest:
            last = length - 1
            shift = last.bit_length() - _DIGITS
            if shift < _FINEST:
                shift = _FINEST
            self._seen[(last >> shift) + ((shift - _FINEST) << _DIGITS - 1)] += 1

    def propose(self, current: Sequence[int] = (), batch_cost: BatchCost | None = None) -> tuple[int, ...] | None:
        """Boundaries that are to replace `current`, or None where too little is known or they would save too little. Takes some 10 ms. With `batch_cost`
        batches are reckoned in, and how many boundaries there are is chosen too: give it wherever the run times are known.

        Less than min_gain is enough where `current` was learned from fewer requests, in proportion: so the first ones, of little data, are soon refined,
        and then stay. Any gain is enough if `current` was not learned here, and none is needed if there are none yet or they cannot hold what was seen.
        """
        lengths, weights = self.histogram()
        known = float(weights.sum())
        if known < self.min_count:
            return None
        top = self.max_length or int(self._bin_ends[np.flatnonzero(self._absorbed)[-1]])
        best = best_boundaries(lengths, weights, self.k, top, batch_cost)
        if current and current[-1] >= top:
            gain = 1 - cost_ratio(lengths, weights, best, batch_cost) / cost_ratio(lengths, weights, current, batch_cost)
            if gain <= self.min_gain * min(1.0, self._learned_from / known):
                return None
        self._learned_from = known
        return best

    def histogram(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Lengths, each the longest of its bin, and how often they occurred of late. For the thread that calls `propose`."""
        # What was seen since the last time joins the weights, which fade by as much.
        seen = np.array(self._seen.copy(), np.int64)  # list.copy does not let another thread in between
        fresh = seen - self._absorbed
        self._weights = self._weights * 0.5 ** (fresh.sum() / self.half_life) + fresh
        self._absorbed = seen
        some = self._weights > 0
        return self._bin_ends[some], self._weights[some]


def _bin_ends(longest: int) -> npt.NDArray[np.int64]:
    """The longest length of every bin, up to the bin of `longest`."""
    half = 1 << _DIGITS - 1
    ends = [np.arange(1, 2 * half + 1) << _FINEST]
    while ends[-1][-1] < longest:
        ends.append(np.arange(half + 1, 2 * half + 1) << _FINEST + len(ends))
    return np.concatenate(ends)
