"""Batching under a latency budget: waiting and running together must fit it. With length buckets, priorities and fair shares.

Also the scheduler for length buckets or token budgets alone: without any budget each bucket follows the size/timeout rule, and no request is rejected.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gpuworker.scheduling.bucket import Bucket
from gpuworker.scheduling.decision import Decision, Queued, Reason, Run, RunTimes, Wait
from gpuworker.scheduling.forecast import PROBE_AFTER_NS
from gpuworker.scheduling.token_bucket import TokenBucket, longest_of
from gpuworker.scheduling.urgency import most_urgent
from gpuworker.scheduling.waiting import Waits


class JointBudget:
    """See Scheduler. A bucket's batch is the largest that is feasible as a whole (feasible.py); it may wait for company (waiting.py); among buckets the one goes
    whose first request would be missed first (urgency.py). Requests that cannot be in time are rejected, or served last (late="serve").

    run_times: predicted run times. budget_ns: from enqueue to answer, for requests that do not bring their own; None: no request has one. max_wait_ns: cap of
    the wait; None: none. wait: "auto" or "until_deadline". length_buckets: ascending boundaries; a request longer than the last belongs to the last.
    uses_lengths: requests have lengths, also where there are no boundaries. max_batch_tokens bounds requests * padded length. priority_ageing_ns: after so long a
    request counts as one level higher; 0: never. slack_ns: how much later than asked for `decide` may be called; spared where a batch waits until the last instant.
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
        uses_lengths: bool = False,
        max_batch_tokens: int | None = None,
        fair_share: bool = True,
        priority_ageing_ns: int = 0,
        slack_ns: int = 0,
    ) -> None:
        self.run_times, self.budget_ns, self._max_wait_ns = run_times, budget_ns, max_wait_ns or 0
        self._max_batch_size, self._max_batch_tokens = max_batch_size, max_batch_tokens
        self._uses_lengths = uses_lengths or bool(length_buckets or max_batch_tokens)
        self._serves_late, self._fair_share, self._ageing_ns = late == "serve", fair_share, priority_ageing_ns
        is_auto = wait == "auto" and budget_ns is not None
        self._waits = Waits(max_wait_ns if budget_ns is not None else self._max_wait_ns, budget_ns if is_auto else None, slack_ns)
        self.buckets: list[Bucket] = []
        self.boundaries: tuple[int, ...] = ()
        self.set_boundaries(length_buckets)

    def set_boundaries(self, boundaries: Sequence[int]) -> None:
        """Goes over to other length buckets; what is queued moves with it."""
        before, self.boundaries = self.buckets, tuple(boundaries)
        firm = self.budget_ns is not None
        self.buckets = [Bucket(length, self._cap(length), self.run_times, firm) for length in self.boundaries or (0,)]
        if self._uses_lengths and not self.boundaries:
            self.buckets = [TokenBucket(self._max_batch_size, self.run_times, firm, self._max_batch_tokens)]
        self._version = self.run_times.version
        for bucket in self.buckets:
            bucket.ran_ns = max((one.ran_ns for one in before), default=bucket.ran_ns)
        for request in sorted((request for bucket in before for request in bucket), key=lambda one: one.enqueue_ns):
            self.add(request)

    def _cap(self, length: int) -> int:
        if not self._max_batch_tokens or not length:
            return self._max_batch_size
        return max(1, min(self._max_batch_size, self._max_batch_tokens // length))

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

    def put_back(self, requests: Sequence[Queued]) -> None:
        """They were in a batch that `decide` has returned, and are to run right after the others of it: they do not wait again."""
        for request in requests:
            bucket = self.bucket_of(request.length)
            bucket.add(request, self.due_ns(request))
            bucket.has_waited = True

    def due_ns(self, request: Queued) -> int:
        """When its answer has to be there; without a budget, when it is to be there as far as that is possible."""
        if self.budget_ns is None:
            bucket = self.bucket_of(request.length)
            return request.enqueue_ns + self._max_wait_ns + bucket.table(request.length)[bucket.cap]
        due_ns = request.enqueue_ns + (request.budget_ns or self.budget_ns)
        return min(due_ns, request.deadline_ns) if request.deadline_ns else due_ns

    def discard(self, ticket: int) -> None:
        """See Scheduler.discard."""
        any(bucket.discard(ticket) for bucket in self.buckets)

    def observe(self, batch: Sequence[Queued], started_ns: int, ended_ns: int) -> None:
        """See Scheduler.observe."""
        longest = longest_of(batch)
        bucket = self.bucket_of(longest)
        bucket.ran_ns = ended_ns
        self.run_times.observe(len(batch), bucket.shape(longest), ended_ns - started_ns)

    def decide(self, now_ns: int, may_wait: bool = True) -> Decision:
        """See Scheduler.decide."""
        if self._version != self.run_times.version:
            self._version = self.run_times.version
            for bucket in self.buckets:
                bucket.refresh()
        runnable: list[Bucket] = []
        hopeless: list[tuple[Bucket, list[Queued]]] = []
        for bucket in self.buckets:
            if late := bucket.pop_hopeless(now_ns):
                hopeless.append((bucket, late))
            bucket.plan(now_ns, self._waits, self._ageing_ns)
            if bucket.has_waited:
                bucket.leave_ns = min(bucket.leave_ns, now_ns)
            if bucket.size:
                runnable.append(bucket)
        run = self._probe(hopeless, now_ns) if hopeless and self.run_times.learns else None
        rejected = [request for bucket, late in hopeless for request in self._give_up(bucket, late)]
        if run is None and (chosen := most_urgent(runnable, now_ns, may_wait, self._fair_share)) is not None:
            run = self._run(chosen, now_ns, may_wait)
        if run is None and not runnable:
            run = self._late()
        if run is None:
            return Wait(min([bucket.leave_ns for bucket in runnable], default=None), rejected)
        return run._replace(rejected=[*rejected, *run.rejected]) if rejected else run

    def _run(self, bucket: Bucket, now_ns: int, may_wait: bool) -> Run:
        bucket.ran_ns, bucket.has_waited = now_ns, False
        reason = bucket.reason if bucket.leave_ns <= now_ns else Reason.BUDGET if may_wait else Reason.DRAIN
        batch, blocked = bucket.take(self._fair_share)
        bucket.trim(batch, now_ns, self.due_ns)
        rejected = self._give_up(bucket, blocked)
        planned_ns = bucket.planned_ns
        if bucket.firm and len(batch) < bucket.cap and bucket is not self.buckets[0]:  # room for shorter ones that would be missed otherwise
            limit_ns = min(map(self.due_ns, batch))
            for shorter in self.buckets[: self.buckets.index(bucket)]:
                limit_ns = shorter.take_endangered(batch, now_ns, bucket.run_ns, bucket.cap, limit_ns)
            planned_ns = bucket.run_ns[len(batch)]
        for other in self.buckets:
            if late := other.pop_late(now_ns + planned_ns):
                rejected += self._give_up(other, late)
        return self._as_run(bucket, batch, reason, rejected)

    def _as_run(self, bucket: Bucket, batch: Sequence[Queued], reason: Reason, rejected: Sequence[Queued] = ()) -> Run:
        longest = longest_of(batch) if self._uses_lengths else 0
        return Run(len(batch), reason, batch, rejected, bucket.padded(longest), bucket.table(longest)[len(batch)])

    def _probe(self, hopeless: list[tuple[Bucket, list[Queued]]], now_ns: int) -> Run | None:
        """Runs a request that still has some time though that seems too little, of a bucket that has not run for a while: else a prediction that is too high
        would never be corrected."""
        for bucket, late in hopeless:
            last = max(late, key=self.due_ns)
            if not bucket.size and now_ns - bucket.ran_ns >= PROBE_AFTER_NS and self.due_ns(last) > now_ns:
                late.remove(last)
                bucket.ran_ns = now_ns
                return self._as_run(bucket, [last], Reason.PROBE)
        return None

    def _give_up(self, bucket: Bucket, requests: list[Queued]) -> list[Queued]:
        """-> those to reject."""
        if not self._serves_late:
            return requests
        bucket.overdue.extend(requests)
        return []

    def _late(self) -> Run | None:
        """A batch of requests that are past their budget."""
        bucket = min((bucket for bucket in self.buckets if bucket.overdue), key=lambda one: one.overdue[0].enqueue_ns, default=None)
        return None if bucket is None else self._as_run(bucket, bucket.take_overdue(self.budget_ns or 0), Reason.LATE)
