"""Which requests can still be in time: the largest batch that is feasible as a whole.

The obvious rule ("shrink the batch until the oldest makes it") collapses under load: small batches lower the throughput, which ages the queue, which shrinks the
next batch. So the batch is the largest b of which b requests can be in time together, the earliest due of those; the ones due before them stand in its way
and are given up, explicitly. (Clockwork, Gujarati et al., OSDI 2020, has this rule per batch size.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from gpuworker.scheduling.lane import Lane

NEVER_NS = 1 << 62


class Share(NamedTuple):
    """What one lane gives to a batch: `size` requests; `end_ns` is when that batch ends as far as this lane is asked, so what is due before is blocked."""

    size: int
    end_ns: int


def select(lanes: Sequence[Lane], now_ns: int, run_ns: Sequence[int], cap: int) -> list[Share]:
    """The batch to run now from lanes in the order of their priority, highest first.

    A lane of lower priority joins only as far as it makes nobody above it late. `run_ns[b]`: predicted time of b requests, non-decreasing. At most `cap`
    requests. O(lanes * log(cap) * log(queued)); two comparisons where everybody, or a full batch, can be in time.
    """
    shares = []
    taken, limit_ns = 0, NEVER_NS
    for lane in lanes:
        size = _largest(lane, now_ns, run_ns, taken, min(len(lane), cap - taken), limit_ns)
        end_ns = now_ns + run_ns[taken + size if size else 1]
        shares.append(Share(size, end_ns))
        if size:
            taken += size
            if (due_ns := lane.first_due_from(end_ns)) is not None and due_ns < limit_ns:
                limit_ns = due_ns
    return shares


def _largest(lane: Lane, now_ns: int, run_ns: Sequence[int], taken: int, most: int, limit_ns: int) -> int:
    """The largest x <= most such that x of the lane can be in time in a batch of taken + x, and that batch ends by `limit_ns`. Feasibility only falls as x
    grows: the batch ends later, so fewer can be in it."""
    low, high = 0, most
    middle = most  # nearly always possible
    while low < high:
        end_ns = now_ns + run_ns[taken + middle]
        if end_ns <= limit_ns and lane.feasible(end_ns) >= middle:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low


def spare_heads(lane: Lane, now_ns: int, run_ns: Sequence[int], cap: int, share: Share) -> Share:
    """A smaller batch first, if that gives nobody up: the heads stand in the way of the larger one only because their budgets are smaller than others'. Only
    where the rest of the larger batch can follow in time: shrinking batches further would be the trap described above."""
    blocked = len(lane) - lane.feasible(share.end_ns)
    if not blocked or not share.size:
        return share
    smaller = min(bisect_right(run_ns, lane.due_ns[0] - now_ns, hi=cap + 1) - 1, cap)
    rest = blocked + share.size - smaller
    if smaller < 1 or not 0 < rest <= cap or now_ns + run_ns[smaller] + run_ns[rest] > lane.due_ns[smaller]:
        return share
    return Share(smaller, now_ns + run_ns[smaller])
