"""The result: options, what they should achieve, and under which load that ends."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from gpuworker.testing import Simulation
from gpuworker.tuning import prediction
from gpuworker.tuning.measure import Profile
from gpuworker.tuning.prediction import Simulator, Traffic
from gpuworker.tuning.search import Candidate, Space, Trial, on_grid, search

SLOTS = 256
"""The worker's default capacity."""
MOST_SLOTS = 4096
SHOWN_FIGURES = ("goodput", "mean_latency_ms", "p50_latency_ms", "p99_latency_ms", "mean_batch_size", "busy_share", "padding")


class Impossible(ValueError):
    """No option can meet the budget."""


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """options: of the worker, those that differ from its defaults. predicted: on requests that the choice did not see. grid: what padding batches to a few
    sizes would cost, where that is little; curve: (share of the rate, what becomes of the requests then). capacity_per_s: None if there is none."""

    options: dict[str, Any]
    rate_per_s: float
    predicted: Simulation
    grid: Trial | None
    leader: Trial
    curve: list[tuple[float, Simulation]]
    capacity_per_s: float | None
    tried: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        grid = self.grid and {
            "allowed_batch_sizes": self.grid.candidate.allowed_batch_sizes,
            "more_in_time": self.grid.goodput - self.leader.goodput,
            "more_mean_latency": self.grid.mean_ns / self.leader.mean_ns - 1,
        }
        return {
            "options": self.options,
            "predicted": self.predicted.to_dict(),
            "curve": [{"load": load, "rate_per_s": load * self.rate_per_s, **figures(simulation)} for load, simulation in self.curve],
            "capacity_per_s": self.capacity_per_s,
            "grid": grid,
            "candidates": self.tried,
        }


def recommend(profile: Profile, traffic: Traffic, budget_ms: float, *, max_batch_size: int, target: float, pads: bool, seed: int) -> Recommendation:
    """The best options of at most max_batch_size. target: share of requests that has to be in time for a rate to count as served. pads: whether the handler
    pads its batches to allowed_batch_sizes, so that a grid of those may be chosen. Raises Impossible."""
    budget_ns = round(budget_ms * 1e6)
    simulator = Simulator(profile.cost(max_batch_size), tuple(profile.sizes), profile.noise, budget_ns, traffic.longest, seed)
    shortest = int(traffic.lengths.min())
    alone_ms = simulator.cost_ns(1, shortest) / 1e6
    if alone_ms > budget_ms:
        raise Impossible(f"no option can meet a latency budget of {budget_ms:g} ms: one request alone takes {alone_ms:.3g} ms")

    def evaluate(candidate: Candidate, on_all: bool) -> Trial:
        return simulator.trial(candidate, traffic.chosen_by if on_all else traffic.chosen_by[: prediction.FEW])

    buckets = simulator.buckets(traffic.lengths, traffic.rate_per_s * budget_ms / 1e3, max_batch_size)
    trials = search(Space(max_batch_size, budget_ms, buckets), evaluate)
    leader = trials[0]
    grid = on_grid(leader, evaluate)
    chosen = grid.candidate if grid is not None and pads else leader.candidate
    predicted = simulator.run(chosen, traffic.held_out)
    options: dict[str, Any] = {"latency_budget_ms": budget_ms, **chosen.options()}
    slots = prediction.most_in_flight(predicted) * 2  # as many again, for answers that nobody has read yet
    if slots > SLOTS:
        options["capacity"] = min(1 << math.ceil(math.log2(slots)), MOST_SLOTS)
    curve = [(load, predicted if load == 1 else simulator.run(chosen, prediction.at_load(traffic.held_out, load))) for load in prediction.LOADS]
    capacity_per_s = prediction.capacity(simulator, chosen, traffic.held_out, traffic.rate_per_s, target)
    return Recommendation(options, traffic.rate_per_s, predicted, grid, leader, curve, capacity_per_s, len(trials))


def figures(simulation: Simulation) -> dict[str, Any]:
    """Those that a curve is drawn of."""
    known = simulation.to_dict()
    return {name: known[name] for name in SHOWN_FIGURES}
