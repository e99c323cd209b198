"""Batching under a latency budget: waiting and running together must fit it. With length buckets, priorities and fair shares.

Also the scheduler for length buckets or token budgets alone: without any budget each bucket follows the size/timeout rule, and no request is rejected.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gpuworker.scheduling.bucket import Bucket, coarse, longest
from gpuworker.scheduling.decision import Decision, Queued, Reason, Run, RunTimes, Wait
from gpuworker.scheduling.feasible import NEVER_NS
from gpuworker.scheduling.forecast import PROBE_AFTER_NS
from gpuworker.scheduling.urgency import most_urgent


class JointBudget:
    """See Scheduler. A bucket's batch is the largest that is feasible as a whole (feasible.py); it may wait for company (waiting.py); among buckets the one goes
    whose first request would be missed first (least laxity). Requests that cannot be in time are rejected, or served last (late="serve").

    run_times: predicted run times. budget_ns: from enqueue to answer, for requests that do not bring their own; None: no request has one. max_wait_ns: cap of
    the wait; None: none. wait: "auto" or "until_deadline". length_buckets: ascending boundaries; a request longer than the last belongs to the last.
    max_batch_tokens bounds requests * padded length. allowed_batch_sizes: what batches are padded to. priority_ageing_ns: see Bucket.promote; 0: never.
    slack_ns: how much later than asked for `decide` may be called; spared where a batch waits until the last instant.
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
        slack_ns: int = 0,
    ) -> None:
        self.run_times, self.budget_ns, self.max_wait_ns = run_times, budget_ns, max_wait_ns
        self._max_batch_size, self._max_batch_tokens, self._sizes = max_batch_size, max_batch_tokens, tuple(allowed_batch_sizes)
        self._serves_late, self._worth_ns = late == "serve", budget_ns if wait == "auto" else None
        self._cap_ns = max_wait_ns if budget_ns is not None else max_wait_ns or 0
        self._fair_share, self._ageing_ns, self._slack_ns = fair_share, priority_ageing_ns, slack_ns
        self.buckets: list[Bucket] = []
        self.boundaries: tuple[int, ...] = ()
        self._ran_ns = -PROBE_AFTER_NS
        self.set_boundaries(length_buckets)

    def set_boundaries(self, boundaries: Sequence[int]) -> None:
        """Goes over to other length buckets; what is queued moves with it."""
        queued = [request for bucket in self.buckets for request in bucket]
        self.boundaries = tuple(boundaries)
        firm = self.budget_ns is not None
        self.buckets = [
            Bucket(length, self._cap(length), self.run_times, firm, self._max_batch_tokens, self._slack_ns) for length in self.boundaries or (0,)
        ]
        self._version: int | None = None
        self._refresh()
        for request in sorted(queued, key=lambda one: one.enqueue_ns):
            self.add(request)

    def _cap(self, length: int) -> int:
        if not self._max_batch_tokens or not length:
            return self._max_batch_size
        return max(1, min(self._max_batch_size, self._max_batch_tokens // length))

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
        bucket.add(request, self.due_ns(request))

    def due_ns(self, request: Queued) -> int:
        """When its answer has to be there; without a budget, when it is to be there as far as that is possible."""
        if self.budget_ns is None:
            bucket = self.bucket_of(request.length)
            return request.enqueue_ns + (self.max_wait_ns or 0) + bucket.run_ns[bucket.cap]
        due_ns = request.enqueue_ns + (request.budget_ns or self.budget_ns)
        return min(due_ns, request.deadline_ns) if request.deadline_ns else due_ns

    def discard(self, ticket: int) -> None:
        """See Scheduler.discard."""
        any(bucket.discard(ticket) for bucket in self.buckets)

    def observe(self, batch: Sequence[Queued], started_ns: int, ended_ns: int) -> None:
        """See Scheduler.observe."""
        self._ran_ns = ended_ns
        size = next((size for size in self._sizes if size >= len(batch)), len(batch))
        length = longest(batch)
        padded = self.bucket_of(length).length or (coarse(length) if self._max_batch_tokens else 0)
        self.run_times.observe(size, padded, ended_ns - started_ns)

    def decide(self, now_ns: int, may_wait: bool = True) -> Decision:
        """See Scheduler.decide."""
        self._refresh()
        runnable: list[Bucket] = []
        rejected: list[Queued] = []
        hopeless: list[tuple[Bucket, list[Queued]]] = []
        for bucket in self.buckets:
            if self._ageing_ns:
                bucket.promote(now_ns, self._ageing_ns)
            bucket.plan(now_ns, self._cap_ns, self._worth_ns)
            if bucket.size:
                runnable.append(bucket)
            elif late := bucket.pop_late(now_ns + bucket.run_ns[1]):
                hopeless.append((bucket, late))
        is_idle = now_ns - self._ran_ns >= PROBE_AFTER_NS
        if hopeless and not runnable and is_idle and self.run_times.learns and (probe := self._probe(hopeless, now_ns)) is not None:
            return probe
        for bucket, late in hopeless:
            rejected += self._give_up(bucket, late)
        chosen = most_urgent(runnable, now_ns, may_wait, self._fair_share)
        if chosen is not None:
            return self._run(chosen, now_ns, rejected)
        late_run = self._late(self.budget_ns) if self.budget_ns and not runnable else None
        if late_run is not None:
            return late_run._replace(rejected=rejected)
        return Wait(min([bucket.leave_ns for bucket in runnable], default=None), rejected)

    def _run(self, bucket: Bucket, now_ns: int, rejected: list[Queued]) -> Run:
        bucket.served_ns = self._ran_ns = now_ns
        reason = bucket.reason if bucket.leave_ns <= now_ns else Reason.DRAIN
        batch, blocked = bucket.take(self._fair_share, self.due_ns)
        if blocked:
            rejected += self._give_up(bucket, blocked)
        end_ns = now_ns + bucket.planned_ns
        if bucket.firm and len(batch) < bucket.cap and bucket is not self.buckets[0]:
            end_ns = now_ns + self._merge_upward(bucket, batch, now_ns)
        for other in self.buckets:
            if late := other.pop_late(end_ns):
                rejected += self._give_up(other, late)
        return Run(len(batch), reason, batch, rejected, self._padding(bucket, batch)[0], end_ns - now_ns)

    def _merge_upward(self, bucket: Bucket, batch: list[Queued], now_ns: int) -> int:
        """Fills a batch up with requests of shorter buckets that would be missed otherwise. -> how long it takes now."""
        run_ns, cap = bucket.run_ns, bucket.cap
        limit_ns = min(map(self.due_ns, batch))
        end_ns = now_ns + run_ns[len(batch)]
        for shorter in self.buckets[: self.buckets.index(bucket)]:
            limit_ns = shorter.take_endangered(batch, end_ns, limit_ns, lambda n: now_ns + run_ns[n] if n <= cap else NEVER_NS + 1)
        return run_ns[len(batch)]

    def _probe(self, hopeless: list[tuple[Bucket, list[Queued]]], now_ns: int) -> Run | None:
        """Runs the request that has the most time left, though that seems too little: else a prediction that is too high would never be corrected."""
        bucket, late = max(hopeless, key=lambda one: self.due_ns(one[1][-1]))
        if self.due_ns(late[-1]) <= now_ns:
            return None
        probe = late.pop()
        self._ran_ns = now_ns
        rejected = [request for one, requests in hopeless for request in self._give_up(one, requests)]
        padded, run_ns = self._padding(bucket, [probe])
        return Run(1, Reason.PROBE, [probe], rejected, padded, run_ns[1])

    def _give_up(self, bucket: Bucket, requests: list[Queued]) -> list[Queued]:
        """-> those to reject."""
        if not self._serves_late:
            return requests
        bucket.overdue.extend(requests)
        return []

    def _late(self, budget_ns: int) -> Run | None:
        """A batch of requests that are past their budget."""
        bucket = min((bucket for bucket in self.buckets if bucket.overdue), key=lambda one: one.overdue[0].enqueue_ns, default=None)
        if bucket is None:
            return None
        batch = bucket.take_overdue(budget_ns)
        padded, run_ns = self._padding(bucket, batch)
        return Run(len(batch), Reason.LATE, batch, (), padded, run_ns[len(batch)])

    def _padding(self, bucket: Bucket, batch: Sequence[Queued]) -> tuple[int, Sequence[int]]:
        """What a batch is padded to, and what batches of that length take."""
        if bucket.length or not self._max_batch_tokens:
            return bucket.length, bucket.run_ns
        return longest(batch), self.run_times.table(coarse(longest(batch)))
