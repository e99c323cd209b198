"""What became of simulated requests, and the figures that follow from it."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuworker.scheduling import Queued, Reason


class Outcome(enum.IntEnum):
    """How a request ended."""

    ON_TIME = 0
    """Answered within its latency budget."""
    LATE = 1
    """Answered after it."""
    REJECTED_AT_ENQUEUE = 2
    """Never queued."""
    REJECTED_AT_DISPATCH = 3
    """Queued, and given up by the scheduler."""


class SimulatedBatch(NamedTuple):
    """One batch: when it left and ended, why it left, which arrivals (by index) it held, and what size and length it was padded to."""

    start_ns: int
    end_ns: int
    reason: Reason
    requests: tuple[int, ...]
    padded_size: int
    padded_length: int


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """Every request with its outcome, by index, and the batches in order."""

    requests: Sequence[Queued]
    outcome: NDArray[np.int8]
    """An Outcome for each request."""
    told_ns: NDArray[np.int64]
    """When each caller got its answer or its rejection."""
    batches: list[SimulatedBatch]

    def count(self, outcome: Outcome) -> int:
        """Requests that ended so."""
        return int(np.count_nonzero(self.outcome == outcome))

    @property
    def on_time(self) -> int:
        """Requests that were answered within their budget."""
        return self.count(Outcome.ON_TIME)

    @property
    def late(self) -> int:
        """Requests that were answered, too late."""
        return self.count(Outcome.LATE)

    @property
    def rejected(self) -> int:
        """Requests that were not answered."""
        return len(self.requests) - self.on_time - self.late

    @property
    def goodput(self) -> float:
        """The share of all requests that were answered within their budget."""
        return self.on_time / len(self.requests) if self.requests else 1.0

    @cached_property
    def enqueue_ns(self) -> NDArray[np.int64]:
        """When each request arrived."""
        return np.array([request.enqueue_ns for request in self.requests], dtype=np.int64)

    @cached_property
    def latency_ns(self) -> NDArray[np.int64]:
        """From arrival to answer, of those that were answered, in the order of their arrival."""
        answered = self.outcome <= Outcome.LATE
        return self.told_ns[answered] - self.enqueue_ns[answered]

    @cached_property
    def rejection_ns(self) -> NDArray[np.int64]:
        """From arrival to rejection, of those that were rejected."""
        rejected = self.outcome > Outcome.LATE
        return self.told_ns[rejected] - self.enqueue_ns[rejected]

    @property
    def mean_latency_ns(self) -> float:
        """Mean latency of those that were answered; nan when there are none."""
        return float(self.latency_ns.mean()) if len(self.latency_ns) else float("nan")

    def latency_percentile_ns(self, percent: float) -> float:
        """The latency that `percent` % of those that were answered did not exceed; nan when there are none."""
        return float(np.percentile(self.latency_ns, percent)) if len(self.latency_ns) else float("nan")

    @property
    def mean_batch_size(self) -> float:
        """Requests in a batch, padding not counted; nan without batches."""
        return sum(len(batch.requests) for batch in self.batches) / len(self.batches) if self.batches else float("nan")

    @property
    def span_ns(self) -> int:
        """From the first arrival to the last time that somebody was told something."""
        return int(self.told_ns.max() - self.enqueue_ns[0]) if self.requests else 0

    @property
    def busy_share(self) -> float:
        """The share of span_ns in which the device ran."""
        busy_ns = sum(batch.end_ns - batch.start_ns for batch in self.batches)
        return busy_ns / self.span_ns if self.span_ns else 0.0

    @property
    def reasons(self) -> Counter[Reason]:
        """How many batches left for each reason."""
        return Counter(batch.reason for batch in self.batches)

    @property
    def padding(self) -> float:
        """Tokens run, padding of lengths and sizes included, for each token asked for; nan where there are no lengths."""
        real = sum(self.requests[i].length for batch in self.batches for i in batch.requests)
        padded = sum(batch.padded_size * batch.padded_length for batch in self.batches)
        return padded / real if real else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON; times in ms, what is undefined is None."""
        ms = {"mean": self.mean_latency_ns, **{f"p{p:g}": self.latency_percentile_ns(p) for p in (50, 90, 99)}}
        figures: dict[str, Any] = {
            "requests": len(self.requests),
            "goodput": self.goodput,
            "on_time": self.on_time,
            "late": self.late,
            "rejected_at_enqueue": self.count(Outcome.REJECTED_AT_ENQUEUE),
            "rejected_at_dispatch": self.count(Outcome.REJECTED_AT_DISPATCH),
            **{f"{name}_latency_ms": value / 1e6 for name, value in ms.items()},
            "batches": len(self.batches),
            "mean_batch_size": self.mean_batch_size,
            "busy_share": self.busy_share,
            "padding": self.padding,
        }
        figures = {name: None if value != value else value for name, value in figures.items()}  # nan is not JSON
        return {**figures, "reasons": {reason.name.lower(): batches for reason, batches in sorted(self.reasons.items())}}
