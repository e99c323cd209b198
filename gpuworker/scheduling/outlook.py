"""What others need to know of the length buckets: frontends for their forecasts, and whoever learns boundaries."""

from __future__ import annotations

from collections.abc import Sequence

from gpuworker.scheduling.boundaries import BatchCost
from gpuworker.scheduling.bucket import Bucket
from gpuworker.scheduling.forecast import LaneView


def lane_views(buckets: Sequence[Bucket], now_ns: int) -> list[LaneView]:
    """What a forecast is made from."""
    return [LaneView(one.length, one.cap, one.run_ns[1], one.run_ns[one.cap], one.arrivals.gap_ns(now_ns), len(one), one.ran_ns) for one in buckets]


def batch_cost(buckets: Sequence[Bucket], budget_ns: int | None, max_batch_size: int, now_ns: int) -> BatchCost | None:
    """What boundaries are to be learned for; None while that is not known. May be asked by another thread than the one that serves."""
    bucket = buckets[-1]
    one_ns, full_ns, length = bucket.run_ns[1], bucket.run_ns[bucket.cap], bucket.length
    token_ns = (full_ns - one_ns) / max((bucket.cap - 1) * length, 1)
    rate = sum(1 / gap_ns for one in buckets if (gap_ns := one.arrivals.gap_ns(now_ns)))
    if not length or not budget_ns or not rate or token_ns <= 0 or one_ns <= token_ns * length:
        return None
    return BatchCost((one_ns - token_ns * length) / token_ns, rate * budget_ns, max_batch_size)
