"""What is asked of which device: arrivals, budget, cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gpuworker.scheduling import Queued
from gpuworker.testing import mmpp, poisson
from gpuworker.testing.comparison import Setting
from gpuworker.testing.traces import Trace, read_trace, scaled

BATCH = 32
FIXED_MS, REQUEST_MS, TOKEN_MS = 5.0, 0.25, 0.0005
MEAN_LENGTH = 500


@dataclasses.dataclass(frozen=True)
class Cost:
    """T(b) = fixed + each * b, and per padded token where lengths are used; in ms."""

    fixed_ms: float = FIXED_MS
    request_ms: float = REQUEST_MS
    token_ms: float = 0.0

    def __call__(self, size: int, length: int) -> int:
        """In ns."""
        return round(1e6 * (self.fixed_ms + size * (self.request_ms + self.token_ms * length)))

    def times(self, scale: float) -> Cost:
        return Cost(self.fixed_ms * scale, self.request_ms * scale, self.token_ms * scale)


@dataclasses.dataclass(frozen=True)
class Workload:
    """`load`: the rate as a share of what full batches can serve; `budget`: in full batches. `limit`: which ratio to the optimum is to be reached."""

    name: str
    arrivals: str | Trace
    load: float
    budget: float
    limit: float | None = None
    lengths: tuple[int, ...] = ()
    """Length buckets, where lengths are used."""

    @property
    def title(self) -> str:
        return f"{self.name}, L = {self.budget:g} T(B), load {self.load:g}"

    def setting(self, cost: Cost, **options: object) -> Setting:
        """Device and budget."""
        longest = self.lengths[-1] if self.lengths else 0
        full_ns = cost(BATCH, longest)
        return Setting(cost, BATCH, round(self.budget * full_ns), length_buckets=self.lengths, longest=longest, **options)

    def requests(self, cost: Cost, count: int, seed: int) -> list[Queued]:
        """The first `count` arrivals."""
        rate_per_s = self.load * BATCH / cost(BATCH, MEAN_LENGTH if self.lengths else 0) * 1e9
        if isinstance(self.arrivals, Trace):
            cut = Trace(self.arrivals.arrivals_ns[:count], self.arrivals.lengths[:count])
            requests = scaled(cut, rate_per_s).requests()
            return [request._replace(length=min(request.length, self.lengths[-1]) if self.lengths else 0) for request in requests]
        times_ns = (mmpp if self.arrivals == "mmpp" else poisson)(rate_per_s, count, seed).tolist()
        lengths = synthetic_lengths(count, seed) if self.lengths else [0] * count
        return [Queued(i, at, length=length) for i, (at, length) in enumerate(zip(times_ns, lengths, strict=True))]


def synthetic_lengths(count: int, seed: int) -> list[int]:
    """Long-tailed, with a mean of about MEAN_LENGTH."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN_LENGTH) - 0.32, 0.8, count)
    return np.clip(np.rint(drawn), 1, 2048).astype(int).tolist()


def to_compare(traces: Sequence[Path]) -> list[Workload]:
    """Those with targets; traces of other names than the known ones come without."""
    known = {"code": 0.97, "conv": 0.995}
    recorded = [
        Workload(path.stem, read_trace(path), 0.9, 2.0, next((limit for word, limit in known.items() if f"_{word}" in path.stem), None))
        for path in traces
    ]
    return [
        Workload("Poisson", "poisson", 1.0, 2.0, 0.99),
        Workload("Poisson", "poisson", 0.8, 1.2, 0.97),
        Workload("MMPP, 4x bursts", "mmpp", 0.8, 2.0, 0.985),
        *recorded,
    ]


def to_drive(traces: Sequence[Path]) -> list[tuple[Workload, str]]:
    """Those that the real worker is put under, and with which policy."""
    return [
        *((workload, "ours") for workload in to_compare(traces)),
        (Workload("Poisson", "poisson", 0.8, 2.0), "eager"),
        (Workload("Poisson", "poisson", 1.3, 5.0), "ours"),  # room enough for forecasts at enqueue
        (Workload("Poisson, lengths in 4 buckets", "poisson", 0.9, 1.5, lengths=(256, 512, 1024, 2048)), "ours"),
    ]
