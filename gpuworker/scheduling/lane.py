"""Requests of one length bucket and one priority, in the order in which they are due."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import compress

from gpuworker.scheduling.decision import Queued


class Lane:
    """Lists side by side: requests, when each is due, ascending, and who sent it."""

    __slots__ = ("due_ns", "is_mixed", "is_shared", "participants", "requests")

    def __init__(self) -> None:
        self.requests: list[Queued] = []
        self.due_ns: list[int] = []
        self.participants: list[int] = []
        self.is_shared = False
        """Whether several clients have sent requests, since it was empty last."""
        self.is_mixed = False
        """Whether their budgets differ."""

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Queued]:
        return iter(self.requests)

    def add(self, request: Queued, due_ns: int) -> None:
        """Nearly always at the end, as requests come nearly in order."""
        if not self.requests:
            self.is_shared = self.is_mixed = False
        else:
            first = self.requests[0]
            self.is_shared = self.is_shared or request.participant != first.participant
            self.is_mixed = self.is_mixed or request.budget_ns != first.budget_ns
        due = self.due_ns
        at = len(due) if not due or due[-1] <= due_ns else bisect_left(due, due_ns + 1)
        due.insert(at, due_ns)
        self.requests.insert(at, request)
        self.participants.insert(at, request.participant)

    def discard(self, ticket: int) -> bool:
        """Takes one out. False if it is not there."""
        for at, request in enumerate(self.requests):
            if request.ticket == ticket:
                self._delete(at, at + 1)
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
        self._delete(0, count)
        return early

    def pop_first(self) -> Queued:
        """Takes the first one out."""
        first = self.requests[0]
        self._delete(0, 1)
        return first

    def _delete(self, start: int, stop: int) -> None:
        del self.requests[start:stop], self.due_ns[start:stop], self.participants[start:stop]

    def remove(self, batch: Sequence[Queued]) -> None:
        """Takes `batch` out, which usually comes first."""
        count = len(batch)
        if not count or self.requests[:count] == batch:
            self._delete(0, count)
            return
        chosen = {request.ticket for request in batch}
        kept = [request.ticket not in chosen for request in self.requests]
        self.requests, self.due_ns = list(compress(self.requests, kept)), list(compress(self.due_ns, kept))
        self.participants = list(compress(self.participants, kept))

    def lift(self, into: Lane, level: int, now_ns: int, ageing_ns: int) -> None:
        """Moves into a lane of a higher level those first ones that have waited long enough for it, `ageing_ns` for each level above their own."""
        while self.requests and now_ns - self.requests[0].enqueue_ns >= ageing_ns * (level - self.requests[0].priority):
            due_ns = self.due_ns[0]
            into.add(self.pop_first(), due_ns)
