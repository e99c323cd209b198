"""Lengths to pad to: the boundaries of length buckets that waste the least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_MOST_CANDIDATES = 512
"""The search is quadratic in these: 512 take some 10 ms for 8 boundaries."""


class BatchCost(NamedTuple):
    """What splitting the traffic costs: each bucket fills batches of its own. For a run time of alpha + beta * padded tokens."""

    tokens: float
    """What a batch costs beside its tokens, in tokens: alpha / beta."""
    arrivals: float
    """Requests that come, to all buckets, within a latency budget: so long a first one can wait for company."""
    max_batch_size: int

    def of_request(self, share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """A request's part of its batch, in tokens, in a bucket with this share of the traffic."""
        return self.tokens / np.minimum(1 + self.arrivals * share, self.max_batch_size)


def best_boundaries(
    lengths: npt.ArrayLike, counts: npt.ArrayLike, k: int, top: int | None = None, batch_cost: BatchCost | None = None
) -> tuple[int, ...]:
    """The at most `k` boundaries, ascending, to which requests of these lengths are padded with the fewest tokens in all; or, with `batch_cost`, at the least
    cost in all, for which fewer than `k` may be best.

    `counts` says how often each length occurs, and may be fractional. The last boundary is `top`, or the longest length that occurs. A length of 0 counts as 1.
    One-sided k-medians on a line by interval dynamic programming (H. Wang and M. Song, "Ckmeans.1d.dp", The R Journal 2011, has the two-sided one). Exact
    for up to 512 distinct lengths; from there on neighbours share the longest of them, at no more than about 3 % of distance up to a range of 2**19.

    Raises ValueError if k < 1, if a length is negative or above `top`, or if nothing occurs and there is no `top`.
    """
    if k < 1:
        raise ValueError(f"k is {k}, and at least one boundary is needed")
    values, weights = _candidates(lengths, counts, top)
    until = np.cumsum(weights)
    held = np.maximum(until[:, None] - (until - weights)[None, :], 0)  # [j, i]: requests of the candidates i..j
    each = values[:, None] if batch_cost is None else values[:, None] + batch_cost.of_request(held / (until[-1] or 1))
    cost = np.where(np.tri(len(values), dtype=bool), held * each, np.inf)  # of the candidates i..j as one bucket, padded to j
    total = cost[:, 0]  # [j]: of the candidates 0..j in the buckets made so far
    totals = [total[-1]]
    starts: list[npt.NDArray[np.intp]] = []  # of each further bucket, by its end
    for _ in range(min(k, len(values)) - 1):
        options = cost[:, 1:] + total[:-1]
        best = options.argmin(axis=1)
        total = np.take_along_axis(options, best[:, None], axis=1)[:, 0]
        totals.append(total[-1])
        starts.append(best + 1)
    ends = [len(values) - 1]
    for start in reversed(starts[: int(np.argmin(totals))]):
        ends.append(int(start[ends[-1]]) - 1)
    return tuple(int(values[end]) for end in reversed(ends))


def cost_ratio(lengths: npt.ArrayLike, counts: npt.ArrayLike, boundaries: Sequence[int], batch_cost: BatchCost | None = None) -> float:
    """What a real token costs, in tokens: padding, and with `batch_cost` batches too. Raises ValueError as `padding`."""
    lengths, counts = np.asarray(lengths, np.int64), np.asarray(counts, np.float64)
    lengths, counts = lengths[counts > 0], counts[counts > 0]
    real = float(lengths @ counts)
    if real <= 0:
        raise ValueError("no tokens, so nothing to compare with")
    if lengths.max() > boundaries[-1]:
        raise ValueError(f"length {lengths.max()} is above the last boundary, {boundaries[-1]}")
    held = np.bincount(np.searchsorted(boundaries, lengths), counts, len(boundaries))
    each = np.asarray(boundaries, np.float64)
    if batch_cost is not None:
        each = each + batch_cost.of_request(held / held.sum())
    return float(held @ each) / real


def padding(lengths: npt.ArrayLike, counts: npt.ArrayLike, boundaries: Sequence[int]) -> float:
    """Padded tokens for each real one, at least 1. Raises ValueError if a length that occurs is above the last boundary, or if there are no tokens."""
    return cost_ratio(lengths, counts, boundaries)


def _candidates(lengths: npt.ArrayLike, counts: npt.ArrayLike, top: int | None) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The lengths that may become boundaries, distinct and ascending, each with the requests that are no longer than it but longer than the one before."""
    lengths, counts = np.asarray(lengths, np.int64), np.asarray(counts, np.float64)
    lengths, counts = lengths[counts > 0], counts[counts > 0]
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"length {lengths.min()} is negative")
    if top is not None:
        lengths, counts = np.append(lengths, top), np.append(counts, 0.0)
    if not lengths.size:
        raise ValueError("no lengths, and no top either")
    values, of_value = np.unique(np.maximum(lengths, 1), return_inverse=True)
    weights = np.bincount(of_value, counts)
    if top is not None and values[-1] > top:
        raise ValueError(f"length {values[-1]} is above the top, {top}")
    bits = 9
    while len(values) > _MOST_CANDIDATES:
        coarse = _rounded_up(values, bits)
        first = np.flatnonzero(np.diff(coarse, prepend=0))
        weights = np.add.reduceat(weights, first)
        values = values[np.append(first[1:], len(values)) - 1]
        bits -= 1
    return values, weights.astype(np.float64)


def _rounded_up(lengths: npt.NDArray[np.int64], bits: int) -> npt.NDArray[np.int64]:
    """Each to the end of its bin; bins are so wide that `bits` leading binary digits tell them apart, as in G. Tene's HdrHistogram (2012)."""
    shifts = np.maximum(np.frexp((lengths - 1).astype(np.float64))[1] - bits, 0).astype(np.int64)
    ends: npt.NDArray[np.int64] = (((lengths - 1) >> shifts) + 1) << shifts
    return ends
