"""Which options are best? A search from coarse to fine; pure: `evaluate` does the simulating."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gpuworker.scheduling.sizes import doubling

FINALISTS = 6
"""Candidates of the coarse round that are tried on all requests."""
ROUNDS = 4
"""Times that the neighbours of the best are tried."""
WAITS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Caps of the wait that are tried, as shares of the budget."""
GRID_RATIOS = (2.0, 1.5, 1.25)
GRID_GOODPUT, GRID_LATENCY = 0.005, 0.05
"""What padding to a grid of sizes may cost: share of requests in time, of the mean latency."""
DEFAULT_BATCH = 32


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Options of a worker, named as there; each is the worker's default unless given."""

    max_batch_size: int = DEFAULT_BATCH
    max_wait_ms: float | None = None
    wait: str = "auto"
    length_buckets: tuple[int, ...] = ()
    allowed_batch_sizes: tuple[int, ...] = ()

    def options(self) -> dict[str, Any]:
        """Those that differ from the defaults."""
        fields = ((field.name, field.default, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, default, value in fields if value != default}


class Trial(NamedTuple):
    """What came of a candidate. `late`, `busy`: shares of the requests, of the time."""

    candidate: Candidate
    goodput: float
    late: float
    mean_ns: float
    busy: float


Figure = Callable[[Trial], float]
FIGURES: tuple[tuple[Figure, float, float], ...] = (
    (lambda trial: 1 - trial.goodput, 0.0, 0.003),
    (lambda trial: trial.late, 0.0, 0.003),
    (lambda trial: trial.mean_ns if trial.mean_ns == trial.mean_ns else math.inf, 0.03, 0.0),
    (lambda trial: trial.busy, 0.0, 0.01),
)
"""What has to be small, in order of importance; and by how much of itself, and how much in all, it may be larger than the least."""
Evaluate = Callable[[Candidate, bool], Trial]
"""(candidate, whether on all requests or on few)."""


class Space(NamedTuple):
    """What may be chosen from. buckets: sets of boundaries, from few to many."""

    max_batch_size: int
    budget_ms: float
    buckets: Sequence[tuple[int, ...]] = ()

    def coarse(self) -> Iterator[Candidate]:
        """Every combination of a few values of each option."""
        for size in doubling(self.max_batch_size):
            for max_wait_ms, wait in ((None, "auto"), (None, "until_deadline"), (0.0, "auto"), (self._cap(1 / 4), "auto")):
                for buckets in ((), *self.buckets):
                    yield Candidate(size, max_wait_ms, wait, buckets)

    def near(self, center: Candidate) -> Iterator[Candidate]:
        """`center` with one option changed: to its default, or to something near."""
        yield dataclasses.replace(center, max_batch_size=min(DEFAULT_BATCH, self.max_batch_size))
        yield dataclasses.replace(center, max_wait_ms=None)
        yield dataclasses.replace(center, wait="auto")
        yield dataclasses.replace(center, length_buckets=())
        for factor in (0.5, 0.7, 0.84, 1.19, 1.42, 2.0):
            size = min(max(round(center.max_batch_size * factor), 1), self.max_batch_size)
            yield dataclasses.replace(center, max_batch_size=size)
        if center.wait == "auto":
            caps = (
                (*map(self._cap, WAITS), 0.0) if not center.max_wait_ms else tuple(_two_digits(center.max_wait_ms * by) for by in (0.5, 0.7, 1.4, 2))
            )
            for cap_ms in caps:
                yield dataclasses.replace(center, max_wait_ms=cap_ms)
        for buckets in self.buckets:
            yield dataclasses.replace(center, length_buckets=buckets)

    def _cap(self, share: float) -> float:
        return _two_digits(self.budget_ms * share)


def best(trials: Sequence[Trial]) -> Trial:
    """The most requests in time; then the fewest late, the lowest mean latency, the least time of the device, each within what chance may do; then the fewest
    options that have to be given, and the nearest to the default. The order of `trials` does not matter."""
    left = list(trials)
    for figure, share, tolerance in FIGURES:
        limit = min(map(figure, left)) * (1 + share) + tolerance
        left = [trial for trial in left if figure(trial) <= limit]
    return min(left, key=lambda trial: _complexity(trial.candidate))


def search(space: Space, evaluate: Evaluate) -> list[Trial]:
    """-> every trial on all requests, the best first."""
    left = [evaluate(candidate, False) for candidate in space.coarse()]
    finalists = {Candidate(min(DEFAULT_BATCH, space.max_batch_size)): None}
    for _ in range(min(FINALISTS, len(left))):
        leader = best(left)
        left.remove(leader)
        finalists[leader.candidate] = None
    tried = {candidate: evaluate(candidate, True) for candidate in finalists}
    leader = best(list(tried.values()))
    for _ in range(ROUNDS):
        for candidate in space.near(leader.candidate):
            if candidate not in tried:
                tried[candidate] = evaluate(candidate, True)
        before, leader = leader, best(list(tried.values()))
        if leader is before:
            break
    return [leader, *(trial for trial in tried.values() if trial is not leader)]


def on_grid(leader: Trial, evaluate: Evaluate) -> Trial | None:
    """The same with batches padded to the fewest sizes, each about the same factor larger than the one before, for which that costs little; None: it costs too
    much. Such a grid is what CUDA graphs can be captured for."""
    for ratio in GRID_RATIOS:
        sizes = grid(leader.candidate.max_batch_size, ratio)
        trial = evaluate(dataclasses.replace(leader.candidate, allowed_batch_sizes=sizes), True)
        if trial.goodput >= leader.goodput - GRID_GOODPUT and trial.mean_ns <= leader.mean_ns * (1 + GRID_LATENCY):
            return trial
    return None


def grid(max_batch_size: int, ratio: float) -> tuple[int, ...]:
    """1, ..., max_batch_size in steps of `ratio`."""
    sizes = [1]
    while sizes[-1] < max_batch_size:
        sizes.append(min(max(int(sizes[-1] * ratio), sizes[-1] + 1), max_batch_size))
    return tuple(sizes)


def _complexity(candidate: Candidate) -> tuple[int, int, float, float]:
    far = abs(math.log(candidate.max_batch_size / DEFAULT_BATCH))
    return len(candidate.options()), len(candidate.length_buckets), far, candidate.max_wait_ms or 0.0


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")
