"""The owner's loop with nothing real in it: a scheduler, arrivals, a fake GPU. Exact to the nanosecond."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import cast

import numpy as np

from gpuworker.scheduling import Policy, Queued, Run
from gpuworker.scheduling.decision import Scheduler
from gpuworker.scheduling.fifo import Fifo
from gpuworker.scheduling.sizes import at_least
from gpuworker.testing.fakes import FakeClock, FakeGpu
from gpuworker.testing.outcome import Outcome, SimulatedBatch, Simulation

Admit = Callable[[Queued, int, int], bool]


def simulate(
    scheduler: Scheduler | Policy,
    arrivals: Iterable[int | Queued],
    cost_ns: Callable[[int, int], int],
    *,
    budget_ns: int = 0,
    length_buckets: Sequence[int] = (),
    allowed_batch_sizes: Sequence[int] = (),
    noise: float = 0.0,
    seed: int = 0,
    admit: Admit | None = None,
) -> Simulation:
    """Serves `arrivals` on one device that runs one batch at a time.

    scheduler: a Scheduler, or a Policy, which then gets a Fifo. It is asked after each batch, at each arrival while the device is idle, and when it said.
    arrivals: times in ns, or Queued requests; ascending. Tickets are replaced by the position in `arrivals`.
    cost_ns(size, length): how long a batch really takes, with its size rounded up to one of allowed_batch_sizes, and to the length that the scheduler gives,
    else that of its longest request rounded up to one of length_buckets; noise, seed: see FakeGpu.
    budget_ns: latency budget of the requests that have none of their own; 0: whatever is served is on time.
    admit(request, now_ns, busy_until_ns): asked at each arrival whether the request may be queued at all; busy_until_ns: when the batch that is running
    should end (by the scheduler's prediction if it gives one), or a time that has passed.

    Raises ValueError for arrivals out of order, and AssertionError for a scheduler that loses a request, ends it twice or lets it wait for ever.
    """
    requests = _requests(arrivals)
    ledger = _Ledger(requests, budget_ns)
    queue = cast(Scheduler, scheduler if hasattr(scheduler, "add") else Fifo(scheduler))
    clock = FakeClock(requests[0].enqueue_ns if requests else 0)
    gpu = FakeGpu(clock, cost_ns, noise, seed)
    batches: list[SimulatedBatch] = []
    arrived, busy_until_ns = 0, clock()
    while True:
        now_ns = clock()
        while arrived < len(requests) and requests[arrived].enqueue_ns <= now_ns:
            request = requests[arrived]
            if admit is None or admit(request, request.enqueue_ns, busy_until_ns):
                queue.add(request)
            else:
                ledger.end(request, Outcome.REJECTED_AT_ENQUEUE, request.enqueue_ns)
            arrived += 1
        if arrived == len(requests) and not len(queue):
            return Simulation(requests, *ledger.arrays(), batches)
        decision = queue.decide(now_ns)
        for request in decision.rejected:
            ledger.end(request, Outcome.REJECTED_AT_DISPATCH, now_ns)
        if isinstance(decision, Run):
            batch = decision.batch or ()
            size = at_least(len(batch), allowed_batch_sizes)
            length = decision.length or at_least(max(request.length for request in batch), length_buckets)
            busy_until_ns = now_ns + (decision.predicted_ns or cost_ns(size, length))
            end_ns = gpu.run(size, length)
            for request in batch:
                ledger.served(request, end_ns)
            batches.append(SimulatedBatch(now_ns, end_ns, decision.reason, tuple(request.ticket for request in batch), size, length))
            queue.observe(batch, now_ns, end_ns)
            continue
        wakes = [requests[arrived].enqueue_ns] if arrived < len(requests) else []
        wakes += [decision.until_ns] if decision.until_ns is not None else []
        if wakes and (min(wakes) > now_ns or decision.rejected):
            clock.advance(max(min(wakes) - now_ns, 0))
        elif len(queue) or wakes:
            raise AssertionError(f"{scheduler!r} leaves {len(queue)} requests waiting for {'a time that has passed' if wakes else 'ever'}")


def _requests(arrivals: Iterable[int | Queued]) -> list[Queued]:
    if isinstance(arrivals, np.ndarray):
        arrivals = arrivals.tolist()
    requests = [at._replace(ticket=i) if isinstance(at, Queued) else Queued(i, int(at)) for i, at in enumerate(arrivals)]
    for before, after in pairwise(requests):
        if after.enqueue_ns < before.enqueue_ns:
            raise ValueError(f"arrivals must be in order: {after.enqueue_ns} ns comes after {before.enqueue_ns} ns")
    return requests


class _Ledger:
    """How each request ended, and when its caller was told. Nothing may end twice."""

    def __init__(self, requests: Sequence[Queued], budget_ns: int) -> None:
        self._budget_ns = budget_ns
        self._outcomes: list[Outcome | None] = [None] * len(requests)
        self._told_ns = [0] * len(requests)

    def end(self, request: Queued, outcome: Outcome, told_ns: int) -> None:
        before = self._outcomes[request.ticket]
        if before is not None:
            raise AssertionError(f"{request} ended twice: {before.name}, then {outcome.name}")
        self._outcomes[request.ticket] = outcome
        self._told_ns[request.ticket] = told_ns

    def served(self, request: Queued, end_ns: int) -> None:
        budget_ns = request.budget_ns or self._budget_ns
        late = budget_ns and end_ns > request.enqueue_ns + budget_ns
        self.end(request, Outcome.LATE if late else Outcome.ON_TIME, end_ns)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        lost = [i for i, outcome in enumerate(self._outcomes) if outcome is None]
        if lost:
            raise AssertionError(f"{len(lost)} requests were lost, the first of them number {lost[0]}")
        return np.array(self._outcomes, dtype=np.int8), np.array(self._told_ns, dtype=np.int64)
