"""Requests of one length bucket and one priority, in the order in which they are due."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from gpuworker.scheduling.decision import Queued


class Lane:
    """Two sorted lists. `firm`: requests with a latency budget, by `due_ns`, when their answers have to be there. `patient`: those without, by when they would
    like to leave; they are never too late."""

    __slots__ = ("_participant", "firm", "firm_due_ns", "is_shared", "patient", "patient_due_ns")

    def __init__(self) -> None:
        self.firm: list[Queued] = []
        self.firm_due_ns: list[int] = []
        self.patient: list[Queued] = []
        self.patient_due_ns: list[int] = []
        self.is_shared = False
        """Whether several clients have sent requests, since it was empty last."""
        self._participant = 0

    def __len__(self) -> int:
        return len(self.firm) + len(self.patient)

    def __iter__(self) -> Iterator[Queued]:
        yield from self.firm
        yield from self.patient

    def add(self, request: Queued, due_ns: int, is_firm: bool) -> None:
        """Nearly always at the end, as requests come nearly in order."""
        if not self.firm and not self.patient:
            self._participant, self.is_shared = request.participant, False
        elif request.participant != self._participant:
            self.is_shared = True
        requests, due = (self.firm, self.firm_due_ns) if is_firm else (self.patient, self.patient_due_ns)
        at = len(due) if not due or due[-1] <= due_ns else bisect_left(due, due_ns + 1)
        due.insert(at, due_ns)
        requests.insert(at, request)

    def discard(self, ticket: int) -> bool:
        """Takes one out. False if it is not there."""
        for requests, due in ((self.firm, self.firm_due_ns), (self.patient, self.patient_due_ns)):
            for at, request in enumerate(requests):
                if request.ticket == ticket:
                    del requests[at], due[at]
                    return True
        return False

    def feasible(self, end_ns: int) -> int:
        """How many may be in a batch that ends at `end_ns`."""
        due = self.firm_due_ns
        if not due or due[0] >= end_ns:
            return len(due) + len(self.patient)
        return len(due) + len(self.patient) - bisect_left(due, end_ns)

    def firm_due_from(self, end_ns: int) -> int | None:
        """When the first firm one is due that is not due before `end_ns`."""
        due = self.firm_due_ns
        at = bisect_left(due, end_ns) if due and due[0] < end_ns else 0
        return due[at] if at < len(due) else None

    def pop_blocked(self, end_ns: int) -> list[Queued]:
        """Takes out those that a batch that ends at `end_ns` would be too late for."""
        if not self.firm_due_ns or self.firm_due_ns[0] >= end_ns:
            return []
        count = bisect_left(self.firm_due_ns, end_ns)
        blocked = self.firm[:count]
        del self.firm[:count], self.firm_due_ns[:count]
        return blocked

    def in_order(self) -> Sequence[Queued]:
        """All of them by when they are due."""
        if not self.patient:
            return self.firm
        if not self.firm:
            return self.patient
        due = (*zip(self.firm_due_ns, self.firm, strict=True), *zip(self.patient_due_ns, self.patient, strict=True))
        return [request for _, request in sorted(due, key=lambda pair: pair[0])]

    def remove(self, batch: Sequence[Queued]) -> None:
        """Takes `batch` out, which is usually the front of one list."""
        count = len(batch)
        for requests, due in ((self.firm, self.firm_due_ns), (self.patient, self.patient_due_ns)):
            if count <= len(requests) and requests[:count] == batch:
                del requests[:count], due[:count]
                return
        chosen = {request.ticket for request in batch}
        for requests, due in ((self.firm, self.firm_due_ns), (self.patient, self.patient_due_ns)):
            kept = [(request, when) for request, when in zip(requests, due, strict=True) if request.ticket not in chosen]
            requests[:], due[:] = [request for request, _ in kept], [when for _, when in kept]

    def lift(self, into: Lane, level: int, now_ns: int, ageing_ns: int) -> None:
        """Moves into a lane of a higher level those first ones that have waited long enough for it, `ageing_ns` for each level above their own."""
        for requests, due, is_firm in ((self.firm, self.firm_due_ns, True), (self.patient, self.patient_due_ns, False)):
            while requests and now_ns - requests[0].enqueue_ns >= ageing_ns * (level - requests[0].priority):
                into.add(requests.pop(0), due.pop(0), is_firm)
