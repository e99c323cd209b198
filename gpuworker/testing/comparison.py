"""Schedulers side by side: the same requests, the same device, the exact optimum as the ceiling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from gpuworker.scheduling import JointBudget, KnownRunTimes, Policy, Queued, RunTimes, Scheduler, SizeOrTimeout
from gpuworker.scheduling.cost_model import CostModel
from gpuworker.testing import rivals
from gpuworker.testing.admission import ForecastAdmission
from gpuworker.testing.costs import Cost
from gpuworker.testing.optimum import optimum
from gpuworker.testing.outcome import Simulation
from gpuworker.testing.simulation import simulate

SIZE_TIMEOUT_MS = 5.0
"""What the size/timeout rules wait where max_wait_ms is not given."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A device, and what is asked of it. `longest`: of the requests' lengths, 0 where they are not used; `max_wait_ms`: None for no cap; the others are as in
    WorkerOptions."""

    cost_ns: Cost
    max_batch_size: int
    budget_ns: int
    max_wait_ms: float | None = None
    length_buckets: tuple[int, ...] = ()
    allowed_batch_sizes: tuple[int, ...] = ()
    late: str = "reject"
    wait: str = "auto"
    admission: str = "auto"
    longest: int = 0
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length_buckets and self.length_buckets[-1] < self.longest:
            object.__setattr__(self, "length_buckets", (*self.length_buckets, self.longest))

    def padded_ns(self, size: int, length: int) -> int:
        """Cost of a batch whose size is rounded up to an allowed one; a length that is not known is the longest."""
        size = next((allowed for allowed in self.allowed_batch_sizes if allowed >= size), size)
        return self.cost_ns(size, length or self.longest)

    @cached_property
    def table_ns(self) -> list[int]:
        """Run times of batches of 0 to max_batch_size of the longest requests."""
        return [0, *(self.padded_ns(size, self.longest) for size in range(1, self.max_batch_size + 1))]

    def run_times(self) -> RunTimes:
        """What the worker would know after its warm-up; with noise it has to learn its margin."""
        if not self.noise:
            return KnownRunTimes(self.padded_ns, self.max_batch_size)
        model = CostModel(self.max_batch_size, allowed_batch_sizes=self.allowed_batch_sizes)
        for length in self.length_buckets or (0,):
            doubling = sorted(
                {*(1 << power for power in range(self.max_batch_size.bit_length())), self.max_batch_size}
            )  # as a warm-up profile has it
            for size in self.allowed_batch_sizes or doubling:
                model.seed(size, length, [self.padded_ns(size, length)] * 5)
        return model

    def ours(self) -> JointBudget:
        """The worker's own scheduler."""
        return JointBudget(
            self.run_times(),
            max_batch_size=self.max_batch_size,
            budget_ns=self.budget_ns,
            max_wait_ns=None if self.max_wait_ms is None else round(self.max_wait_ms * 1e6),
            late=self.late,
            wait=self.wait,
            length_buckets=self.length_buckets,
            allowed_batch_sizes=self.allowed_batch_sizes,
        )

    @property
    def timeout_ms(self) -> float:
        """For the size/timeout rules."""
        return SIZE_TIMEOUT_MS if self.max_wait_ms is None else self.max_wait_ms

    def simulate(self, policy: str, requests: Sequence[Queued]) -> Simulation:
        """Serves the requests under one of POLICIES. Only our own frontends forecast, and only where what is late is rejected."""
        scheduler = POLICIES[policy](self)
        forecasts = self.late == "reject" and self.admission != "off"
        return simulate(
            scheduler,
            requests,
            self.cost_ns,
            budget_ns=self.budget_ns,
            length_buckets=self.length_buckets,
            allowed_batch_sizes=self.allowed_batch_sizes,
            noise=self.noise,
            seed=self.seed,
            admit=ForecastAdmission(scheduler, self.admission) if forecasts and isinstance(scheduler, JointBudget) else None,
        )

    def optimum(self, requests: Sequence[Queued]) -> int | None:
        """The most that could be in time, had all arrivals and run times been known; None where no bound can be computed (see `optimum`), nor with noise."""
        try:
            return None if self.noise else optimum(requests, lambda size, length: self.padded_ns(size, length), self.max_batch_size, self.budget_ns)
        except ValueError:
            return None


POLICIES: Mapping[str, Callable[[Setting], Scheduler | Policy]] = {
    "ours": Setting.ours,
    "eager": lambda setting: SizeOrTimeout(setting.max_batch_size, 0),
    "size-timeout": lambda setting: SizeOrTimeout(setting.max_batch_size, setting.timeout_ms),
    "reject-expired": lambda setting: rivals.RejectExpired(setting.table_ns, setting.budget_ns, setting.timeout_ms),
    "clipper": lambda setting: rivals.ClipperAimd(setting.table_ns, setting.budget_ns),
    "clipper-e2e": lambda setting: rivals.ClipperAimd(setting.table_ns, setting.budget_ns, end_to_end=True),
    "clockwork": lambda setting: rivals.Clockwork(setting.table_ns, setting.budget_ns),
    "bentoml": lambda setting: rivals.BentoMl(setting.table_ns, setting.budget_ns),
    "nexus": lambda setting: rivals.NexusWindow(setting.table_ns, setting.budget_ns),
    "edf-head": lambda setting: rivals.EdfHead(setting.table_ns, setting.budget_ns),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Simulations by policy, under one load. `load`: the rate as a share of what full batches could serve; `best`: see Setting.optimum."""

    load: float
    rate_per_s: float
    simulations: dict[str, Simulation]
    best: int | None

    def ratio(self, policy: str) -> float | None:
        """Requests in time, as a share of the optimum."""
        return self.simulations[policy].on_time / self.best if self.best else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        policies = {name: {"ratio": self.ratio(name), **simulation.to_dict()} for name, simulation in self.simulations.items()}
        return {"load": self.load, "rate_per_s": self.rate_per_s, "optimum": self.best, "policies": policies}


def compare(setting: Setting, requests: Sequence[Queued], policies: Sequence[str], load: float, rate_per_s: float) -> Comparison:
    """Simulates each of the policies on the same requests."""
    simulations = {name: setting.simulate(name, requests) for name in policies}
    return Comparison(load, rate_per_s, simulations, setting.optimum(requests))
