"""The owner's loop with nothing real in it: a policy, arrivals, a fake GPU. Exact to the nanosecond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpuworker.scheduling import Policy, Queued, Reason, Run
from gpuworker.testing.fakes import FakeClock, FakeGpu


class SimulatedBatch(NamedTuple):
    """One batch: when it left and ended, why it left, and which arrivals (by index) it held."""

    start_ns: int
    end_ns: int
    reason: Reason
    requests: tuple[int, ...]


def simulate(policy: Policy, arrivals_ns: Sequence[int], cost_ns: Callable[[int], int]) -> list[SimulatedBatch]:
    """Serves requests that arrive at `arrivals_ns` (ascending) on one device where a batch of n takes `cost_ns(n)`. Returns the batches in order."""
    clock = FakeClock()
    gpu = FakeGpu(clock, cost_ns)
    coming = [Queued(i, at, 0) for i, at in enumerate(arrivals_ns)]
    queue: list[Queued] = []
    batches: list[SimulatedBatch] = []
    while coming or queue:
        while coming and coming[0].enqueue_ns <= clock():
            queue.append(coming.pop(0))
        decision = policy.decide(queue, clock())
        if isinstance(decision, Run):
            start, batch = clock(), tuple(queued.ticket for queued in queue[: decision.size])
            del queue[: decision.size]
            batches.append(SimulatedBatch(start, gpu.run(len(batch)), decision.reason, batch))
            continue
        wakes = [coming[0].enqueue_ns] if coming else []
        wakes += [decision.until_ns] if decision.until_ns is not None else []
        if not wakes:
            raise AssertionError(f"{policy!r} leaves {len(queue)} requests waiting for ever")
        clock.advance(min(wakes) - clock())
    return batches
