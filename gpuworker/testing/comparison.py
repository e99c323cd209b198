"""Schedulers side by side: the same requests, the same device, the exact optimum as the ceiling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from gpuworker.scheduling import JointBudget, KnownRunTimes, Policy, Queued, RunTimes, Scheduler, SizeOrTimeout
from gpuworker.scheduling.cost_model import CostModel
from gpuworker.scheduling.sizes import at_least, doubling
from gpuworker.scheduling.token_bucket import coarse
from gpuworker.testing import rivals
from gpuworker.testing.admission import ForecastAdmission
from gpuworker.testing.costs import Cost
from gpuworker.testing.optimum import optimum
from gpuworker.testing.outcome import Simulation
from gpuworker.testing.simulation import simulate

MOST_CELLS = 1 << 25
"""Requests times batch size: of more, the optimum is not computed. It would take half a GiB, and minutes."""
SIZE_TIMEOUT_MS = 5.0
"""What the size/timeout rules wait where max_wait_ms is not given."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A device, and what is asked of it. `longest`: of the requests' lengths, 0 where they are not used; `max_wait_ms`: None for no cap; the others are as in
    WorkerOptions. As there, requests longer than the last of length_buckets, or than max_batch_tokens, are refused: `longest` is made no more than that."""

    cost_ns: Cost
    max_batch_size: int
    budget_ns: int
    max_wait_ms: float | None = None
    length_buckets: tuple[int, ...] = ()
    max_batch_tokens: int | None = None
    allowed_batch_sizes: tuple[int, ...] = ()
    late: str = "reject"
    wait: str = "auto"
    admission: str = "auto"
    longest: int = 0
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.limit is not None:
            object.__setattr__(self, "longest", min(self.longest, self.limit))

    @property
    def limit(self) -> int | None:
        """The longest request that is taken; None: any."""
        return min([limit for limit in (self.max_batch_tokens, *self.length_buckets[-1:]) if limit is not None], default=None)

    def takes(self, request: Queued) -> bool:
        """Whether the request is not too long."""
        return self.limit is None or request.length <= self.limit

    def fitting(self, length: int) -> int:
        """How many requests of a length a batch may hold."""
        padded = at_least(length, self.length_buckets)
        return max(min(self.max_batch_size, self.max_batch_tokens // max(padded, 1)), 1) if self.max_batch_tokens else self.max_batch_size

    def padded_ns(self, size: int, length: int) -> int:
        """Cost of a batch whose size is rounded up to an allowed one; a length that is not known is the longest."""
        return self.cost_ns(at_least(size, self.allowed_batch_sizes), length or self.longest)

    @cached_property
    def table_ns(self) -> list[int]:
        """Run times of batches of 0 to `fitting` of the longest requests: what schedulers plan with that know nothing of lengths."""
        padded = at_least(self.longest, self.length_buckets)
        return [0, *(self.padded_ns(size, padded) for size in range(1, self.fitting(self.longest) + 1))]

    def run_times(self) -> RunTimes:
        """What the worker would know after its warm-up; with noise it has to learn its margin."""
        if not self.noise:
            return KnownRunTimes(self._known_ns, self.max_batch_size)
        model = CostModel(self.max_batch_size, allowed_batch_sizes=self.allowed_batch_sizes)
        for (size, length), run_ns in self.profile(self.allowed_batch_sizes or doubling(self.max_batch_size)).items():
            model.seed(size, length, [run_ns] * 5)
        return model

    def profile(self, sizes: Sequence[int]) -> dict[tuple[int, int], int]:
        """Run times by (size, length), as a worker profiles them: of each bucket, without buckets of powers of two."""
        lengths = self.length_buckets or (doubling(coarse(self.longest)) if self.longest else (0,))
        shapes = ((size, length) for length in lengths for size in sizes if size == min(sizes) or size <= self.fitting(length))
        return {(size, length): self._known_ns(size, length) for size, length in shapes}

    def _known_ns(self, size: int, length: int) -> int:
        """As padded_ns: no batch is longer than the longest, though lengths are rounded up to powers of two."""
        return self.padded_ns(size, min(length, at_least(self.longest, self.length_buckets)))

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
            uses_lengths=bool(self.longest),
            max_batch_tokens=self.max_batch_tokens,
        )

    @property
    def timeout_ms(self) -> float:
        """For the size/timeout rules."""
        return SIZE_TIMEOUT_MS if self.max_wait_ms is None else self.max_wait_ms

    def simulate(self, policy: str, requests: Sequence[Queued]) -> Simulation:
        """Serves the requests under one of POLICIES. Only our own frontends forecast, and only where what is late is rejected."""
        scheduler = POLICIES[policy](self)
        forecasts = self.late == "reject" and self.admission != "off" and isinstance(scheduler, JointBudget)
        forecast = ForecastAdmission(cast(JointBudget, scheduler), self.admission) if forecasts else None
        return simulate(
            scheduler,
            requests,
            self.cost_ns,
            budget_ns=self.budget_ns,
            length_buckets=self.length_buckets,
            allowed_batch_sizes=self.allowed_batch_sizes,
            noise=self.noise,
            seed=self.seed,
            admit=lambda request, now_ns, busy_until_ns: self.takes(request) and (forecast is None or forecast(request, now_ns, busy_until_ns)),
        )

    def optimum(self, requests: Sequence[Queued]) -> int | None:
        """The most that could be in time, had all arrivals and run times been known; None where no bound can be computed (see `optimum`), nor with noise, nor of
        too many."""
        taken = [request for request in requests if self.takes(request)]
        shortest = min((request.length for request in taken), default=0)
        size = self.fitting(shortest)
        if self.noise or len(taken) * size > MOST_CELLS:
            return None
        try:
            return optimum(taken, self.padded_ns, size, self.budget_ns)
        except ValueError:
            return None


POLICIES: Mapping[str, Callable[[Setting], Scheduler | Policy]] = {
    "ours": Setting.ours,
    "eager": lambda setting: SizeOrTimeout(setting.fitting(setting.longest), 0),
    "size-timeout": lambda setting: SizeOrTimeout(setting.fitting(setting.longest), setting.timeout_ms),
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
