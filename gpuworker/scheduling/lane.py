"""Requests of one length bucket and one priority, in the order in which they are due."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from gpuworker.scheduling.decision import Queued


class Lane:
    """Two lists side by side: requests, and when each is due, ascending."""

    __slots__ = ("_participant", "due_ns", "is_shared", "requests")

    def __init__(self) -> None:
        self.requests: list[Queued] = []
        self.due_ns: list[int] = []
        self.is_shared = False
        """Whether several clients have sent requests, since it was empty last."""
        self._participant = 0

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Queued]:
        return iter(self.requests)

    def add(self, request: Queued, due_ns: int) -> None:
        """Nearly always at the end, as requests come nearly in order."""
        if not self.requests:
            self._participant, self.is_shared = request.participant, False
        elif request.participant != self._participant:
            self.is_shared = True
        due = self.due_ns
        at = len(due) if not due or due[-1] <= due_ns else bisect_left(due, due_ns + 1)
        due.insert(at, due_ns)
        self.requests.insert(at, request)

    def discard(self, ticket: int) -> bool:
        """Takes one out. False if it is not there."""
        for at, request in enumerate(self.requests):
            if request.ticket == ticket:
                del self.requests[at], self.due_ns[at]
                return True
        return False

    def feasible(self, end_ns: int) -> int:
        """How many may be in a batch that ends at `end_ns`."""
        due = self.due_ns
        return len(due) if not due or due[0] >= end_ns else len(due) - bisect_left(due, end_ns)

    def first_due_from(self, end_ns: int) -> int | None:
        """When the first is due that is not due before `end_ns`."""
        at = len(self.due_ns) - self.feasible(end_ns)
        return self.due_ns[at] if at < len(self.due_ns) else None

    def pop_before(self, end_ns: int) -> list[Queued]:
        """Takes out those that are due before `end_ns`."""
        if not self.due_ns or self.due_ns[0] >= end_ns:
            return []
        count = bisect_left(self.due_ns, end_ns)
        early = self.requests[:count]
        del self.requests[:count], self.due_ns[:count]
        return early

    def remove(self, batch: Sequence[Queued]) -> None:
        """Takes `batch` out, which usually comes first."""
        count = len(batch)
        if self.requests[:count] == batch:
            del self.requests[:count], self.due_ns[:count]
            return
        chosen = {request.ticket for request in batch}
        kept = [(request, due_ns) for request, due_ns in zip(self.requests, self.due_ns, strict=True) if request.ticket not in chosen]
        self.requests, self.due_ns = [request for request, _ in kept], [due_ns for _, due_ns in kept]

    def lift(self, into: Lane, level: int, now_ns: int, ageing_ns: int) -> None:
        """Moves into a lane of a higher level those first ones that have waited long enough for it, `ageing_ns` for each level above their own."""
        while self.requests and now_ns - self.requests[0].enqueue_ns >= ageing_ns * (level - self.requests[0].priority):
            into.add(self.requests.pop(0), self.due_ns.pop(0))
