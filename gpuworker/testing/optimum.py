"""The most requests that any schedule could have answered in time, had it known all arrivals beforehand: the ceiling for every scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from gpuworker.scheduling import Queued

NEVER = 1 << 62


def optimum(arrivals: Iterable[int | Queued], cost_ns: Callable[[int, int], int], max_batch_size: int, budget_ns: int) -> int:
    """How many of `arrivals` (ns, ascending) can be answered within budget_ns on one device that runs a batch of n, without preemption, in cost_ns(n, 0).

    Exact for any cost_ns that nowhere falls as n grows, by dynamic programming: requests then expire in the order of their arrival, so by an exchange
    argument some best schedule runs contiguous stretches of the arrivals, in order, each as soon as it can. Philippe Baptiste, "Batching identical jobs",
    Mathematical Methods of Operations Research 52, 2000. Takes some seconds for 20,000 requests.

    Raises ValueError where this would be no bound: for budgets of the requests' own that let a later one expire earlier, for requests of different
    lengths of which cost_ns depends, and for a cost that falls.
    """
    requests = [at if isinstance(at, Queued) else Queued(0, int(at)) for at in arrivals]
    release = [request.enqueue_ns for request in requests]
    due = [request.enqueue_ns + (request.budget_ns or budget_ns) for request in requests]
    for times, what in ((release, "arrive"), (due, "expire")):
        if any(after < before for before, after in pairwise(times)):
            raise ValueError(f"no bound is known: the optimum is computed for requests that {what} in the order of their arrival (equal budgets)")
    return len(requests) - _fewest_given_up(release, due, _table(requests, cost_ns, max_batch_size))


def _table(requests: list[Queued], cost_ns: Callable[[int, int], int], max_batch_size: int) -> list[int]:
    lengths = sorted({request.length for request in requests} or {0})
    table = [cost_ns(size, lengths[0]) for size in range(1, max_batch_size + 1)]
    if table != [cost_ns(size, lengths[-1]) for size in range(1, max_batch_size + 1)]:
        raise ValueError("no bound is known: the optimum is computed for run times that do not depend on the requests' lengths")
    if table != sorted(table):
        raise ValueError(f"no bound is known: the optimum is computed for run times that do not fall as a batch grows, these are {table} ns")
    return table


def _fewest_given_up(release: list[int], due: list[int], table: list[int]) -> int:
    """free[i, q]: the earliest time at which the device can be free after the first i requests, when at most q of them were given up.

    Request i is given up, free[i + 1, q + 1] <= free[i, q], or it is the last of a batch of b, which starts at max(free[i + 1 - b, q], release[i]).
    Only q from `low` (with fewer given up there is no schedule) to `high` (with more, the device is no freer when request i comes) matter, and only the
    last max_batch_size rows: these lie in a ring, each of them twice, so that they can always be read as one block, oldest first.
    """
    most = len(table)
    costs = np.array(table[::-1], dtype=np.int64)[:, None]
    dues = np.array(due, dtype=np.int64)[:, None]
    fitting = _fitting(release, due, table)
    ring = np.full((2 * most, len(release) + most + 2), NEVER, dtype=np.int64)
    low = high = 0
    row = np.array([-NEVER])  # free[i, low : high + 1]
    for i, now in enumerate(release):
        for place in (i % most, i % most + most):
            ring[place, low : high + 1] = row
            ring[place, high + 1 : high + 1 + most] = row[-1]  # a later row looks at most so far, and it is free by then anyway
        row = np.append(NEVER, row)  # request i is given up ...
        size = fitting[i]
        if size:  # ... or ends a batch of 1 to `size`
            end = i % most + most + 1
            ends = np.maximum(ring[end - size : end, low : high + 2], now) + costs[most - size :]
            ends[ends > dues[i + 1 - size : i + 1]] = NEVER
            row = np.minimum(row, ends.min(axis=0))
        row = np.minimum.accumulate(row)
        soon = release[i + 1] if i + 1 < len(release) else NEVER - 1
        impossible, useful = int(np.count_nonzero(row == NEVER)), int(np.count_nonzero(row > soon))
        row = row[impossible : useful + 1]
        low, high = low + impossible, low + useful
    return low


def _fitting(release: list[int], due: list[int], table: list[int]) -> list[int]:
    """For each request, of how many the largest batch is that it can be the last of: all must be there, and the first must not expire."""
    arrived, expire = np.array(release, dtype=np.int64), np.array(due, dtype=np.int64)
    sizes = np.zeros(len(release), dtype=np.int64)
    for size, cost in enumerate(table[: len(release)], start=1):
        sizes[size - 1 :] += arrived[size - 1 :] + cost <= expire[: len(release) - size + 1]
    return [int(size) for size in sizes]
