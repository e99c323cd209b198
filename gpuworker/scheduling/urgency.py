"""Whose turn it is, of several length buckets."""

from __future__ import annotations

from collections.abc import Sequence

from gpuworker.scheduling.bucket import Bucket


def most_urgent(buckets: Sequence[Bucket], now_ns: int, may_wait: bool, is_fair: bool) -> Bucket | None:
    """Of the buckets whose time has come the one whose first request would be missed first. It lets another go before it whose first would be missed
    meanwhile, if it can afford to; and to be fair, if it has run more recently: a flood is always the most urgent."""
    ready = [bucket for bucket in buckets if bucket.leave_ns <= now_ns or not may_wait]
    if len(buckets) < 2 or not ready:
        return ready[0] if ready else None
    best = min(ready, key=_urgency)
    end_ns = now_ns + best.planned_ns
    for other in buckets:
        if other.latest_start_ns < end_ns and other is not best and other.level >= best.level:
            can_afford = best.latest_start_ns >= now_ns + other.planned_ns
            if can_afford or (is_fair and other.ran_ns < best.ran_ns):
                return other
    return best


def _urgency(bucket: Bucket) -> tuple[int, int, float]:
    return -bucket.level, bucket.latest_start_ns, -bucket.size / (bucket.planned_ns or 1)
