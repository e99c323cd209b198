"""CPU time of one decision with a thousand requests in the queue."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from ipc.report import markdown
from ipc.targets import Target

from gpuworker.scheduling import JointBudget, KnownRunTimes, Queued, Run

QUEUED, BATCH = 1000, 32
BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
LIMIT_US = 20.0
_CLOCK = time.thread_time_ns


def run_ns(size: int, length: int) -> int:
    return 5_000_000 + size * (250_000 + 500 * length)


def measure(decisions: int, seed: int) -> list[dict[str, Any]]:
    """A record for each load and number of clients."""
    cells = itertools.product((("under load", False), ("overload", True)), (1, 16))
    return [
        {"load": load, "clients": clients, "buckets": len(buckets), **_cell(is_over, clients, buckets, decisions, seed)}
        for (load, is_over), clients in cells
        for buckets in (BUCKETS, ())
    ]


def _cell(is_over: bool, clients: int, buckets: tuple[int, ...], decisions: int, seed: int) -> dict[str, Any]:
    """What leaves the queue is replaced by new arrivals, so that there are always 1,000. In an overload these have budgets that a third of them miss; else all
    are in time."""
    drawn = random.Random(seed)
    longest = max(buckets, default=0)
    served_ns = sum(run_ns(BATCH, length) for length in buckets or (0,)) / len(buckets or (0,)) * QUEUED / BATCH
    budget_ns = round(served_ns * (0.6 if is_over else 100))
    scheduler = JointBudget(KnownRunTimes(run_ns, BATCH), max_batch_size=BATCH, budget_ns=budget_ns, length_buckets=buckets)
    tickets = itertools.count()

    def arrive(begin_ns: int, end_ns: int, count: int) -> None:
        for at_ns in sorted(drawn.randint(begin_ns, end_ns) for _ in range(count)):
            scheduler.add(Queued(next(tickets), at_ns, length=drawn.choice(buckets) if buckets else 0, participant=drawn.randrange(clients)))

    now_ns, rejected = round(served_ns), 0
    arrive(now_ns - min(budget_ns // 2, round(served_ns)), now_ns, QUEUED)
    times_ns = []
    gc.collect()
    for _ in _frozen(decisions):
        began_ns = _CLOCK()
        decision = scheduler.decide(now_ns)
        times_ns.append(_CLOCK() - began_ns)
        ended_ns = now_ns + (run_ns(decision.size, decision.length or longest) if isinstance(decision, Run) else 1_000_000)
        arrive(now_ns, ended_ns, QUEUED - len(scheduler))
        rejected += len(decision.rejected)
        now_ns = ended_ns
    times_ns = sorted(max(taken_ns - _OVERHEAD_NS, 0) for taken_ns in times_ns[decisions // 10 :])
    return {
        "median_us": median(times_ns) / 1e3,
        "p99_us": times_ns[len(times_ns) * 99 // 100] / 1e3,
        "rejected_each": rejected / decisions,
    }


def _frozen(count: int) -> Iterator[int]:
    """Without the garbage collector of this benchmark's own making."""
    gc.disable()
    try:
        yield from range(count)
    finally:
        gc.enable()


def _overhead_ns(clock: Callable[[], int], tries: int = 2000) -> int:
    return round(median(-clock() + clock() for _ in range(tries)))


_OVERHEAD_NS = _overhead_ns(_CLOCK)


def table(records: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"{r['load']}, {r['clients']} client(s), {r['buckets'] or 'no'} buckets",
            f"{r['median_us']:.1f}",
            f"{r['p99_us']:.1f}",
            f"{r['rejected_each']:.1f}",
        )
        for r in records
    ]
    return f"### CPU time of a decision, {QUEUED:,} requests queued\n\n" + markdown(("", "median µs", "p99 µs", "rejected by each"), rows)


def targets(records: list[dict[str, Any]]) -> list[Target]:
    return [
        Target(f"a decision, {r['load']}, {r['clients']} client(s), {r['buckets']} buckets: median µs", "<", LIMIT_US, r["median_us"])
        for r in records
        if r["buckets"]
    ]
