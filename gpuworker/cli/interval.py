"""What a worker did between two readings of its statistics: the same statistics, counted from the first one on. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gpuworker.segment.stats import Stats

COUNTERS = (
    ("submitted", "completed"), ("rejected", "failed"), ("expired", "cancelled"), ("fallbacks", "abandoned"), ("requeued", "reaped_clients"),
)  # fmt: skip
BUDGET_COUNTERS = (("on_time", "rejected_forecast"), ("late", "rejected_late"))
"""Both in the pairs in which they are shown."""
OUTCOMES = tuple(name for pair in (*COUNTERS, *BUDGET_COUNTERS) for name in pair)
STAGES = {
    "claim_wait": "for a free slot",
    "queue_wait": "for the owner to see it",
    "batch_wait": "for its batch to leave",
    "run": "run_batch",
    "wake": "for its caller to run again",
}
_GROW = (*OUTCOMES, "batches", "predicted_batches", "predicted_ns", "observed_ns", "overruns", "tokens", "padded_tokens")


@dataclasses.dataclass(frozen=True)
class Interval:
    """How long it was, and what was counted in it."""

    elapsed_s: float
    stats: Stats

    @classmethod
    def between(cls, before: Stats, now: Stats, elapsed_s: float) -> Interval | None:
        """None where the two do not belong together: another owner, or a new segment."""
        return cls(elapsed_s, since(before, now)) if elapsed_s > 0 and is_same_life(before, now) else None


def is_same_life(before: Stats, now: Stats) -> bool:
    """Whether the two are of one owner and one segment, as far as can be told."""
    return before.owner_pid == now.owner_pid and before.submitted <= now.submitted and before.batches <= now.batches


def since(before: Stats, now: Stats) -> Stats:
    """`now`, counted from `before` on. (Of tensors it is as it was: that counts from the owner's start.)"""
    change: dict[str, Any] = {name: max(getattr(now, name) - getattr(before, name), 0) for name in _GROW}
    change |= {stage: getattr(now, stage).since(getattr(before, stage)) for stage in STAGES}
    change |= {name: _less(getattr(now, name), getattr(before, name)) for name in ("batch_sizes", "dispatch_reasons")}
    predicted = change["predicted_batches"]
    change["predicted_run_ms"] = change["predicted_ns"] / predicted / 1e6 if predicted else 0.0
    change["observed_run_ms"] = change["observed_ns"] / predicted / 1e6 if predicted else 0.0
    answered = change["completed"] + change["failed"] + change["abandoned"]
    change["mean_batch_size"] = answered / change["batches"] if change["batches"] else 0.0
    change["goodput"] = change["on_time"] / (with_budget(change) or 1)
    change["padding"] = change["padded_tokens"] / change["tokens"] if change["tokens"] else 0.0
    if now.generation is not None:
        change["generation"] = now.generation.since(before.generation)
    return dataclasses.replace(now, **change)


def with_budget(counts: Mapping[str, Any]) -> int:
    """Requests that had a latency budget, and have ended."""
    return int(sum(counts[name] for row in BUDGET_COUNTERS for name in row))


def _less(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """The counts that grew, by how much."""
    return {name: grown for name, n in now.items() if (grown := n - before.get(name, 0)) > 0}
