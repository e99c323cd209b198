"""Batches that are padded to allowed sizes: padding up, or batching down."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def size_to_run(size: int, allowed: Sequence[int], run_ns: Sequence[int]) -> int:
    """How many of `size` requests to run at once: all of them, or the largest allowed size that they fill, with the rest right after it.

    The rest is split off where both runs together take no longer than the padded one: then nobody is answered later, and most are earlier. allowed:
    ascending. run_ns[n]: predicted ns of a batch of n, padded to the next allowed size; 0: unknown, and then all run.
    """
    at = bisect_right(allowed, size)
    below = allowed[at - 1] if at else 0
    if below in (0, size) or not run_ns[below]:
        return size
    return below if run_ns[below] + run_ns[size - below] <= run_ns[size] else size
