"""Who goes first when not all can go: each client's first request before anybody's second."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from gpuworker.scheduling.decision import Queued

BATCHES = 4
"""Nobody waits for more batches than these because others have queued so much. Shorter queues, which most are, need no look."""


def fair_front(queue: Sequence[Queued], count: int, participants: Sequence[int] | None = None) -> list[Queued]:
    """`count` of `queue`, in its order: the first ones, unless a client would get less than a quarter of its even share of these and the next three batches
    although it has more. Then round robin over the clients: so one that has queued a thousand requests delays another's single one by four batches at most.

    participants: those of `queue`, where they are at hand. Twin of fair_front in native/owner.c (tests/test_fairness.py compares them).
    """
    if len(queue) <= BATCHES * count or not count:
        return list(queue[:count])
    if participants is None:
        participants = [request.participant for request in queue]
    has, soon = Counter(participants), Counter(participants[: BATCHES * count])
    least = BATCHES * count / 4 / len(has)
    for client, queued in has.items():
        if soon[client] < least and soon[client] < queued:
            return _round_robin(queue, count)
    return list(queue[:count])


def _round_robin(queue: Sequence[Queued], count: int) -> list[Queued]:
    asked: dict[int, int] = {}
    turns = []
    for request in queue:
        turn = asked.get(request.participant, 0)
        asked[request.participant] = turn + 1
        turns.append(turn)
    ascending = sorted(turns)
    last = ascending[count - 1]
    room = count - bisect_left(ascending, last)  # so many of the last turn's requests go
    chosen = []
    for request, turn in zip(queue, turns, strict=True):
        if turn < last:
            chosen.append(request)
        elif turn == last and room:
            room -= 1
            chosen.append(request)
    return chosen
