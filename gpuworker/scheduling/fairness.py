"""Who goes first when not all can go: each client's first request before anybody's second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

from gpuworker.scheduling.decision import Queued

_participant = attrgetter("participant")


def fair_front(queue: Sequence[Queued], count: int) -> list[Queued]:
    """`count` of `queue`, in its order: the first ones, unless a client would get less than a quarter of its even share of them although it has more. Then
    round robin over the clients: so one that has queued a thousand requests delays another's single one by no more than the batch that runs.

    Twin of fair_front in native/owner.c (tests/test_fairness.py compares them).
    """
    first = list(queue[:count])
    if count >= len(queue):
        return first
    queued, goes = Counter(map(_participant, queue)), Counter(map(_participant, first))
    is_fair = all(goes[client] * 4 * len(queued) >= count or goes[client] == has for client, has in queued.items())
    return first if is_fair else _round_robin(queue, count)


def _round_robin(queue: Sequence[Queued], count: int) -> list[Queued]:
    asked: Counter[int] = Counter()
    turns = []
    for request in queue:
        turns.append(asked[request.participant])
        asked[request.participant] += 1
    last = sorted(turns)[count - 1]
    room = count - sum(turn < last for turn in turns)  # so many of the last turn's requests go
    chosen = []
    for request, turn in zip(queue, turns, strict=True):
        if turn < last:
            chosen.append(request)
        elif turn == last and room:
            room -= 1
            chosen.append(request)
    return chosen
