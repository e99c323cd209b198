"""A policy for the front of a queue, with its queue: the Scheduler that it amounts to."""

from __future__ import annotations

from collections.abc import Sequence

from gpuworker.scheduling.decision import Decision, Policy, Queued, Reason, Run, Wait


class Fifo:
    """Requests in the order of their arrival, and a Policy that decides about them; see Scheduler."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._queue: list[Queued] = []

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Queued) -> None:
        """See Scheduler.add. Late comers are put where their enqueue time belongs."""
        at = len(self._queue)
        while at and self._queue[at - 1].enqueue_ns > request.enqueue_ns:
            at -= 1
        self._queue.insert(at, request)

    def discard(self, ticket: int) -> None:
        """See Scheduler.discard."""
        self._queue = [queued for queued in self._queue if queued.ticket != ticket]

    def decide(self, now_ns: int, may_wait: bool = True) -> Decision:
        """See Scheduler.decide."""
        decision = self.policy.decide(self._queue, now_ns)
        if isinstance(decision, Wait):
            self._remove(decision.rejected)
            if may_wait or not self._queue:
                return decision
            decision = Run(len(self._queue), Reason.DRAIN, rejected=decision.rejected)
        batch = self._queue[: decision.size] if decision.batch is None else decision.batch
        self._remove(decision.rejected)
        self._remove(batch)
        return decision._replace(batch=batch)

    def observe(self, batch: Sequence[Queued], started_ns: int, ended_ns: int) -> None:
        """Tells the policy, if it has an `observe`."""
        observe = getattr(self.policy, "observe", None)
        if observe is not None:
            observe(batch, started_ns, ended_ns)

    def _remove(self, gone: Sequence[Queued]) -> None:
        if gone and list(gone) == self._queue[: len(gone)]:
            del self._queue[: len(gone)]
        elif gone:
            tickets = {queued.ticket for queued in gone}
            self._queue = [queued for queued in self._queue if queued.ticket not in tickets]
