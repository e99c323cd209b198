"""What a worker with given options will do with given traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gpuworker.scheduling import Queued
from gpuworker.scheduling.boundaries import BatchCost, best_boundaries
from gpuworker.scheduling.cost_model import CostModel
from gpuworker.scheduling.isotonic import theil_sen
from gpuworker.testing import Outcome, Simulation, poisson
from gpuworker.testing.comparison import Setting
from gpuworker.testing.traces import Trace
from gpuworker.tuning.search import Candidate, Trial
from gpuworker.worker.profile import sizes_to_profile

Cost = Callable[[int, int], int]

FEW = 1_500
"""Requests of the coarse round."""
LEAST_NOISE = 1e-3
LOADS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
MORE_BUCKETS = (2, 4, 8, 16)
CAPACITY_STEPS = 12


class Traffic(NamedTuple):
    """Requests to choose the options by, and others to predict with."""

    chosen_by: list[Queued]
    held_out: list[Queued]
    rate_per_s: float

    @property
    def lengths(self) -> np.ndarray:
        """Of all requests."""
        return np.array([request.length for request in (*self.chosen_by, *self.held_out)], dtype=np.int64)

    @property
    def longest(self) -> int:
        """Of the requests' lengths; 0 where they are not used."""
        return int(self.lengths.max())

    @classmethod
    def of_rate(cls, rate_per_s: float, count: int, lengths: Sequence[int], seed: int) -> Traffic:
        """Poisson arrivals, with lengths drawn from `lengths` (0 if there are none)."""
        random = np.random.default_rng((seed, 1))
        halves = [poisson(rate_per_s, count // 2, seed), poisson(rate_per_s, count - count // 2, seed + 1)]
        drawn = [random.choice(lengths, len(half)) if len(lengths) else np.zeros(len(half), np.int64) for half in halves]
        first, second = (Trace(half, its).requests() for half, its in zip(halves, drawn, strict=True))
        return cls(first, second, rate_per_s)

    @classmethod
    def of_trace(cls, trace: Trace) -> Traffic:
        """Its first half, and its second."""
        middle = len(trace.arrivals_ns) // 2
        halves = [Trace(times - times[0], its) for times, its in zip(*(np.split(column, [middle]) for column in trace), strict=True)]
        return cls(halves[0].requests(), halves[1].requests(), len(trace.arrivals_ns) / int(trace.arrivals_ns[-1]) * 1e9)


@dataclasses.dataclass(frozen=True)
class Device(Setting):
    """A Setting whose scheduler knows what a worker knows that has just started: run times of the sizes that were profiled. It learns the rest."""

    known_sizes: tuple[int, ...] = ()

    def run_times(self) -> CostModel:
        """See Setting."""
        model = CostModel(self.max_batch_size, allowed_batch_sizes=self.allowed_batch_sizes)
        known = self.profile(sizes_to_profile(self.max_batch_size, self.allowed_batch_sizes or self.known_sizes))
        shapes = [[*shape, run_ns] for shape, run_ns in known.items()]
        model.restore({**model.to_dict(), "shapes": shapes})
        return model


class Simulator(NamedTuple):
    """Runs candidates on the device that the cost describes. Times of runs vary by `noise`, see FakeGpu; known_sizes: see Device."""

    cost_ns: Cost
    known_sizes: tuple[int, ...]
    noise: float
    budget_ns: int
    longest: int
    seed: int = 0

    def run(self, candidate: Candidate, requests: Sequence[Queued]) -> Simulation:
        """Serves the requests."""
        device = Device(
            self.cost_ns,
            budget_ns=self.budget_ns,
            longest=self.longest,
            noise=max(self.noise, LEAST_NOISE),
            seed=self.seed,
            known_sizes=self.known_sizes,
            **dataclasses.asdict(candidate),
        )
        return device.simulate("ours", requests)

    def trial(self, candidate: Candidate, requests: Sequence[Queued]) -> Trial:
        """In the figures that candidates are compared by."""
        simulation = self.run(candidate, requests)
        late = simulation.late / len(requests)
        return Trial(candidate, simulation.goodput, late, simulation.mean_latency_ns, simulation.busy_share)

    def buckets(self, lengths: np.ndarray, arrivals: float, max_batch_size: int) -> list[tuple[int, ...]]:
        """Boundaries that cost the least, for different numbers of them. arrivals: how many requests come within the budget."""
        is_flat = all(self.cost_ns(size, self.longest) == self.cost_ns(size, 1) for size in (1, max_batch_size))
        if not self.longest or is_flat:
            return []
        seen = np.unique(np.quantile(lengths, (0, 0.5, 1)).astype(int)).tolist()
        tokens = [(float(size * length), float(self.cost_ns(size, length))) for size in self.known_sizes for length in seen]
        alpha, beta = theil_sen(*map(list, zip(*tokens, strict=True))) or (0.0, 0.0)
        values, counts = np.unique(lengths, return_counts=True)
        batch_cost = BatchCost(alpha / beta, arrivals, max_batch_size) if beta > 0 else None
        found = [best_boundaries(values, counts, k, self.longest, batch_cost) for k in MORE_BUCKETS]
        return [boundaries for boundaries in dict.fromkeys(found) if len(boundaries) > 1]


def at_load(requests: Sequence[Queued], load: float) -> list[Queued]:
    """The same requests, so many times as fast."""
    return [request._replace(enqueue_ns=round(request.enqueue_ns / load)) for request in requests]


def capacity(simulator: Simulator, candidate: Candidate, requests: Sequence[Queued], rate_per_s: float, target: float) -> float | None:
    """The highest rate at which a share of `target` of such requests is in time, per second; None: there is none."""
    size = candidate.max_batch_size
    lengths = [request.length for request in requests]
    fastest_ns = simulator.cost_ns(size, sum(lengths) // len(lengths)) / size
    too_high = 2e9 / fastest_ns / rate_per_s
    enough = too_high / 1000

    def is_enough(load: float) -> bool:
        return simulator.run(candidate, at_load(requests, load)).goodput >= target

    if not is_enough(enough):
        return None
    for _ in range(CAPACITY_STEPS):
        middle = (enough * too_high) ** 0.5
        enough, too_high = (middle, too_high) if is_enough(middle) else (enough, middle)
    return enough * rate_per_s


def most_in_flight(simulation: Simulation) -> int:
    """Requests that were queued or running at a time."""
    sent = simulation.outcome != Outcome.REJECTED_AT_ENQUEUE
    begun, ended = simulation.enqueue_ns[sent], np.sort(simulation.told_ns[sent])
    return int((np.arange(1, len(begun) + 1) - np.searchsorted(ended, begun)).max()) if len(begun) else 0
