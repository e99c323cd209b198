"""One client that has queued a thousand requests does not keep the others waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpuworker.scheduling.decision import Queued

BATCHES = 4
"""Nobody waits for more batches than these because others have queued so much. Shorter queues, which most are, need no look."""


def fair_front(queue: Sequence[Queued], count: int, participants: Sequence[int] | None = None) -> list[Queued]:
    """`count` of `queue`, in its order: the first ones; but a client that would get less than a quarter of its even share of these and the next three batches,
    although it has more, gets a quarter of its even share of these, and at least one.

    participants: those of `queue`, where they are at hand. Twin of fair_front in native/owner.c (tests/test_fairness.py compares them).
    """
    if len(queue) <= BATCHES * count or not count:
        return list(queue[:count])
    if participants is None:
        participants = [request.participant for request in queue]
    has, soon = Counter(participants), Counter(participants[: BATCHES * count])
    least, share = BATCHES * count / 4 / len(has), max(count // 4 // len(has), 1)
    owed = {client: min(share, queued) for client, queued in has.items() if soon[client] < least and soon[client] < queued}
    return _with(queue, count, owed) if owed else list(queue[:count])


def _with(queue: Sequence[Queued], count: int, owed: dict[int, int]) -> list[Queued]:
    """The first `count`, among them so many of these clients, and no more of those."""
    room = max(count - sum(owed.values()), 0)
    chosen: list[Queued] = []
    for request in queue:
        if len(chosen) == count:
            break
        left = owed.get(request.participant)
        if left:
            owed[request.participant] = left - 1
            chosen.append(request)
        elif left is None and room:
            room -= 1
            chosen.append(request)
    return chosen
