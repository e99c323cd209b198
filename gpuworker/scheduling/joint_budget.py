"""Batching under a latency budget: waiting and running together must fit it. With length buckets, priorities and fair shares.

Also the scheduler for length buckets or token budgets alone: without any budget each bucket follows the size/timeout rule, and no request is rejected.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gpuworker.scheduling.bucket import Bucket, Plan
from gpuworker.scheduling.decision import Decision, Queued, Reason, Run, RunTimes, Wait

NEVER_NS = 1 << 62


class JointBudget:
    """See Scheduler. A bucket's batch is the largest that is feasible as a whole (feasible.py); it may wait for company (waiting.py); among buckets the one goes
    whose first request would be missed first (least laxity). Requests that cannot be in time are rejected, or served last (late="serve").

    run_times: predicted run times. budget_ns: from enqueue to answer; None: only requests that bring their own have one. max_wait_ns: cap of the wait; None: none.
    wait: "auto" or "until_deadline". length_buckets: ascending boundaries; a request longer than the last belongs to the last. max_batch_tokens bounds
    requests * padded length. allowed_batch_sizes: what batches are padded to. priority_ageing_ns: see Bucket.promote; 0: priorities never change.
    """

    def __init__(
        self,
        run_times: RunTimes,
        *,
        max_batch_size: int,
        budget_ns: int | None = None,
        max_wait_ns: int | None = None,
        late: str = "reject",
        wait: str = "auto",
        length_buckets: Sequence[int] = (),
        max_batch_tokens: int | None = None,
        allowed_batch_sizes: Sequence[int] = (),
        fair_share: bool = True,
        priority_ageing_ns: int = 0,
    ) -> None:
        self.run_times, self.budget_ns, self.max_wait_ns = run_times, budget_ns, max_wait_ns
        self._max_batch_size, self._max_batch_tokens, self._sizes = max_batch_size, max_batch_tokens, tuple(allowed_batch_sizes)
        self._serves_late, self._uses_worth = late == "serve", wait == "auto" and budget_ns is not None
        self._cap_ns = max_wait_ns if budget_ns is not None else max_wait_ns or 0
        self._fair_share, self._ageing_ns = fair_share, priority_ageing_ns
        self.buckets: list[Bucket] = []
        self.boundaries: tuple[int, ...] = ()
        self.set_boundaries(length_buckets)

    def set_boundaries(self, boundaries: Sequence[int]) -> None:
        """Goes over to other length buckets; what is queued moves with it."""
        queued = [request for bucket in self.buckets for request in bucket]
        self.boundaries = tuple(boundaries)
        self.buckets = [Bucket(length, self._cap(length)) for length in self.boundaries or (0,)]
        self._version: int | None = None
        self._refresh()
        for request in sorted(queued, key=lambda one: one.enqueue_ns):
            self.add(request)

    def _cap(self, length: int) -> int:
        return (
            self._max_batch_size if not self._max_batch_tokens or not length else max(1, min(self._max_batch_size, self._max_batch_tokens // length))
        )

    def _refresh(self) -> None:
        if self._version != self.run_times.version:
            self._version = self.run_times.version
            for bucket in self.buckets:
                bucket.run_ns = self.run_times.table(bucket.length)

    def bucket_of(self, length: int) -> Bucket:
        """Where a request of this length belongs."""
        return self.buckets[min(bisect_left(self.boundaries, length), len(self.buckets) - 1)]

    def __len__(self) -> int:
        return sum(len(bucket) + len(bucket.overdue) for bucket in self.buckets)

    def add(self, request: Queued) -> None:
        """See Scheduler.add."""
        bucket = self.bucket_of(request.length)
        bucket.arrivals.add(request.enqueue_ns)
        due_ns, is_firm = self.due_ns(request)
        bucket.add(request, request.priority, due_ns if is_firm else due_ns + bucket.run_ns[bucket.cap], is_firm)

    def due_ns(self, request: Queued) -> tuple[int, bool]:
        """When its answer has to be there, and True; or when it may leave at last, and False."""
        budget_ns = request.budget_ns or self.budget_ns
        if budget_ns is None:
            return request.enqueue_ns + (self.max_wait_ns or 0), False
        due_ns = request.enqueue_ns + budget_ns
        return (min(due_ns, request.deadline_ns) if request.deadline_ns else due_ns), True

    def discard(self, ticket: int) -> None:
        """See Scheduler.discard."""
        any(bucket.discard(ticket) for bucket in self.buckets)

    def observe(self, batch: Sequence[Queued], started_ns: int, ended_ns: int) -> None:
        """See Scheduler.observe."""
        size = next((size for size in self._sizes if size >= len(batch)), len(batch))
        self.run_times.observe(size, self.bucket_of(max(request.length for request in batch)).length, ended_ns - started_ns)

    def decide(self, now_ns: int, may_wait: bool = True) -> Decision:
        """See Scheduler.decide."""
        self._refresh()
        plans: list[Plan] = []
        rejected: list[Queued] = []
        for bucket in self.buckets:
            if self._ageing_ns:
                bucket.promote(now_ns, self._ageing_ns)
            plan = bucket.plan(now_ns, self._cap_ns, self._uses_worth)
            if plan is not None and plan.size:
                plans.append(plan)
            elif plan is not None:
                rejected += self._give_up(bucket, bucket.pop_late(now_ns + bucket.run_ns[1]))
        chosen = _urgent(plans, now_ns, may_wait)
        if chosen is not None:
            return self._run(chosen, now_ns, rejected)
        late = self._late(now_ns) if not plans else None
        if late is not None:
            return late._replace(rejected=rejected)
        return Wait(min((plan.leaves_ns for plan in plans), default=None), rejected)

    def _run(self, plan: Plan, now_ns: int, rejected: list[Queued]) -> Run:
        bucket = plan.bucket
        batch, blocked = bucket.take(plan, self._fair_share)
        rejected += self._give_up(bucket, blocked)
        reason = plan.reason if plan.leaves_ns <= now_ns else Reason.DRAIN
        end_ns = now_ns + plan.run_ns
        if len(self.buckets) > 1 and len(batch) < bucket.cap:
            limit_ns = min((due_ns for due_ns, is_firm in map(self.due_ns, batch) if is_firm), default=NEVER_NS)
            for shorter in self.buckets[: self.buckets.index(bucket)]:
                limit_ns = shorter.take_endangered(batch, end_ns, limit_ns, lambda n: now_ns + bucket.run_ns[n] if n <= bucket.cap else NEVER_NS + 1)
            end_ns = now_ns + bucket.run_ns[len(batch)]
        for other in self.buckets:
            rejected += self._give_up(other, other.pop_late(end_ns))
        return Run(len(batch), reason, batch, rejected, bucket.length, end_ns - now_ns)

    def _give_up(self, bucket: Bucket, requests: list[Queued]) -> list[Queued]:
        """-> those to reject."""
        if not self._serves_late:
            return requests
        bucket.overdue.extend(requests)
        return []

    def _late(self, now_ns: int) -> Run | None:
        """A batch of those that are past their budget; small enough that a request which comes just after it has left can still be in time."""
        bucket = min((bucket for bucket in self.buckets if bucket.overdue), key=lambda one: one.overdue[0].enqueue_ns, default=None)
        if bucket is None:
            return None
        size = min(bucket.cap, len(bucket.overdue))
        while size > 1 and self.budget_ns and bucket.run_ns[size] + bucket.run_ns[1] > self.budget_ns:
            size -= 1
        batch = [bucket.overdue.popleft() for _ in range(size)]
        return Run(size, Reason.LATE, batch, (), bucket.length, bucket.run_ns[size])


def _urgent(plans: Sequence[Plan], now_ns: int, may_wait: bool) -> Plan | None:
    """Of the plans whose time has come the one whose first request would be missed first. It lets another go before it whose first would be missed
    meanwhile, if it can afford to."""
    ready = [plan for plan in plans if plan.leaves_ns <= now_ns or not may_wait]
    if len(plans) < 2 or not ready:
        return ready[0] if ready else None
    best = min(ready, key=lambda plan: (-plan.level, plan.latest_start_ns, -plan.size / max(plan.run_ns, 1)))
    for other in plans:
        endangered = other.level >= best.level and other.latest_start_ns < now_ns + best.run_ns
        if other is not best and endangered and best.latest_start_ns >= now_ns + other.run_ns:
            return other
    return best
