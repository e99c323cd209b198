"""Who goes first when not all can go: each client's first request before anybody's second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpuworker.scheduling.decision import Queued


def fair_front(queue: Sequence[Queued], count: int) -> list[Queued]:
    """`count` of `queue`, in its order: round robin over the clients, so one that has queued a thousand requests delays another's single one by no more than
    the batch that runs. Twin of fair_front in native/owner.c (tests/test_fairness.py compares them)."""
    if count >= len(queue):
        return list(queue)
    seen: Counter[int] = Counter()
    turns = []
    for request in queue:
        turns.append(seen[request.participant])
        seen[request.participant] += 1
    if len(seen) == 1:
        return list(queue[:count])
    last = sorted(turns)[count - 1] if count else -1
    room = count - sum(turn < last for turn in turns)
    chosen = []
    for request, turn in zip(queue, turns, strict=True):
        if turn < last or (turn == last and room > 0):
            room -= turn == last
            chosen.append(request)
    return chosen
