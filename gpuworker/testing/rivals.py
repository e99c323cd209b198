"""Other systems' rules, to compare with: each a Policy for the front of a Fifo. Fewest words that decide as their originals do on one device.

They plan with one table of run times, [n] for a batch of n in ns ([0] is 0; its last is for the largest batch), and know nothing of lengths: where those
matter, give them the table of the longest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import exp

from gpuworker.scheduling import Decision, Queued, Reason, Run, SizeOrTimeout, Wait


class _Rival:
    """What they share. budget_ns: latency budget of the requests that have none of their own."""

    def __init__(self, table_ns: Sequence[int], budget_ns: int) -> None:
        self.table_ns, self.budget_ns = table_ns, budget_ns
        self.max_batch_size = len(table_ns) - 1

    def deadline(self, request: Queued) -> int:
        return request.enqueue_ns + (request.budget_ns or self.budget_ns)

    def too_late(self, queue: Sequence[Queued], end_ns: int) -> int:
        """How many of the first in the queue would be late if they ended at end_ns."""
        for count, request in enumerate(queue):
            if self.deadline(request) >= end_ns:
                return count
        return len(queue)

    def largest_within(self, time_ns: int) -> int:
        """The largest batch that runs no longer than that; 0 when there is none."""
        return max(bisect_right(self.table_ns, time_ns) - 1, 0)

    def run(self, queue: Sequence[Queued], drop: int, size: int) -> Decision:
        """Rejects the first `drop`, and runs the next `size`."""
        if not size:
            return Wait(None, queue[:drop])
        reason = Reason.OVERLOAD if drop else Reason.FULL if size == self.max_batch_size else Reason.AGE
        return Run(size, reason, queue[drop : drop + size], queue[:drop])


class RejectExpired(_Rival):
    """Size or timeout, and what has expired by then is rejected: NVIDIA Triton's dynamic batcher with max_queue_delay, a queue policy with
    default_timeout and timeout_action REJECT."""

    def __init__(self, table_ns: Sequence[int], budget_ns: int, max_wait_ms: float) -> None:
        super().__init__(table_ns, budget_ns)
        self._policy = SizeOrTimeout(self.max_batch_size, max_wait_ms)

    def decide(self, queue: Sequence[Queued], now_ns: int) -> Decision:
        """See Policy.decide."""
        drop = self.too_late(queue, now_ns)
        decision = self._policy.decide(queue[drop:], now_ns)
        return self.run(queue, drop, decision.size) if isinstance(decision, Run) else decision._replace(rejected=queue[:drop])


class ClipperAimd(_Rival):
    """Additive increase, multiplicative decrease of the batch size: one more while a full batch meets the objective, else a tenth less. Never waits, never
    rejects. Crankshaw et al., "Clipper: A Low-Latency Online Prediction Serving System", NSDI 2017, section 4.3.

    end_to_end: the objective is held against the latency of the batch's oldest request, not against the run time alone.
    """

    def __init__(self, table_ns: Sequence[int], budget_ns: int, end_to_end: bool = False) -> None:
        super().__init__(table_ns, budget_ns)
        self._end_to_end, self._limit = end_to_end, 1.0

    def decide(self, queue: Sequence[Queued], now_ns: int) -> Decision:
        """See Policy.decide."""
        return self.run(queue, 0, min(len(queue), self.max_batch_size, int(self._limit)))

    def observe(self, batch: Sequence[Queued], started_ns: int, ended_ns: int) -> None:
        """See Scheduler.observe."""
        if ended_ns - (batch[0].enqueue_ns if self._end_to_end else started_ns) > self.budget_ns:
            self._limit = max(self._limit * 0.9, 1.0)
        elif len(batch) >= int(self._limit):
            self._limit = min(self._limit + 1, self.max_batch_size)


class Clockwork(_Rival):
    """The largest batch for which enough requests can be in time; those before them are rejected. Gujarati et al., "Serving DNNs like Clockwork: Performance
    Predictability from the Bottom Up", OSDI 2020: its queue per batch size, for one model."""

    def decide(self, queue: Sequence[Queued], now_ns: int) -> Decision:
        """See Policy.decide."""
        for size in range(min(len(queue), self.max_batch_size), 0, -1):
            drop = self.too_late(queue, now_ns + self.table_ns[size])
            if len(queue) - drop >= size:
                return self.run(queue, drop, size)
        return Wait(None, queue[:])


class EdfHead(_Rival):
    """As many as the oldest request's time allows; only those that are lost are rejected. Small batches make the queue older, which makes batches smaller: it
    collapses under load. So does "early drop" with the earliest deadline in Nexus (Shen et al., SOSP 2019), and Clipper's code (its batch by deadline)."""

    def decide(self, queue: Sequence[Queued], now_ns: int) -> Decision:
        """See Policy.decide."""
        drop = self.too_late(queue, now_ns + self.table_ns[1])
        left = queue[drop:]
        return self.run(queue, drop, min(len(left), self.largest_within(self.deadline(left[0]) - now_ns)) if left else 0)


class NexusWindow(_Rival):
    """Early drop by a sliding window of the planned batch size: requests are rejected until a window of that size can be in time. Shen et al., "Nexus: A GPU
    Cluster Engine for Accelerating DNN-Based Video Analysis", SOSP 2019, sections 4.3 and 6.3. The planned size follows the rate of arrivals, an exponential
    average over four budgets."""

    def __init__(self, table_ns: Sequence[int], budget_ns: int) -> None:
        super().__init__(table_ns, budget_ns)
        self._memory_ns = 4 * budget_ns
        self._weight = 0.0  # of the arrivals so far, as of the last one; in a steady flow rate * memory
        self._first_ns = self._last_ns = 0
        self._newest = -1

    def decide(self, queue: Sequence[Queued], now_ns: int) -> Decision:
        """See Policy.decide."""
        self._notice(queue)
        planned, drop = self._planned(now_ns), 0
        while drop < len(queue) and self.deadline(queue[drop]) < now_ns + self.table_ns[min(planned, len(queue) - drop)]:
            drop += 1
        return self.run(queue, drop, min(len(queue) - drop, planned))

    def _notice(self, queue: Sequence[Queued]) -> None:
        for request in queue:
            if request.ticket > self._newest:
                self._first_ns = self._first_ns if self._weight else request.enqueue_ns
                self._weight = self._weight * exp((self._last_ns - request.enqueue_ns) / self._memory_ns) + 1
                self._last_ns, self._newest = request.enqueue_ns, request.ticket

    def _planned(self, now_ns: int) -> int:
        """The largest batch whose run and whose gathering fit the budget; when requests come faster than that, the largest that fits it twice."""
        if not self._weight:
            return 1
        seen = max(1 - exp((self._first_ns - self._last_ns) / self._memory_ns), 0.05)  # the average began with nothing
        gap_ns = self._memory_ns * seen / self._weight / exp((self._last_ns - now_ns) / self._memory_ns)
        saturated = max(self.largest_within(self.budget_ns // 2), 1)
        if self.table_ns[saturated] > saturated * gap_ns:
            return saturated
        fitting = (size for size in range(2, self.max_batch_size + 1) if self.table_ns[size] + size * gap_ns > self.budget_ns)
        return next(fitting, self.max_batch_size + 1) - 1


class BentoMl(_Rival):
    """Waits while that costs the queue less than an average batch waited; rejects the oldest while the whole queue, as one batch, would be late for it. Run
    times by least squares over the last 50 batches, every 5 s. BentoML's dispatcher ("CorkDispatcher", bentoml/_internal/marshal/dispatcher.py)."""

    TICK_NS, REFIT_NS, SAMPLES, EAGER_SAMPLES = 1_000_000, 5_000_000_000, 50, 8

    def __init__(self, table_ns: Sequence[int], budget_ns: int) -> None:
        super().__init__(table_ns, budget_ns)
        self._each_ns, self._fixed_ns = min(2e9, budget_ns * 2 / 30), min(1e9, budget_ns / 30)
        self._mean_wait_ns = 0.0
        self._samples: deque[tuple[int, int, int]] = deque(maxlen=self.SAMPLES)
        self._fitted_ns = -self.REFIT_NS

    def decide(self, queue: Sequence[Queued], now_ns: int) -> Decision:
        """See Policy.decide."""
        drop, count = 0, len(queue)
        while count > 1 and now_ns - queue[drop].enqueue_ns + self._each_ns * count + self._fixed_ns >= self.budget_ns:
            drop, count = drop + 1, count - 1
        if count and count < self.max_batch_size:
            newest_waited_ns = now_ns - queue[-1].enqueue_ns
            if count * (newest_waited_ns + self.TICK_NS + self._each_ns) <= 0.95 * self._mean_wait_ns:
                return Wait(now_ns + self.TICK_NS, queue[:drop])
        return self.run(queue, drop, min(count, self.max_batch_size))

    def observe(self, batch: Sequence[Queued], started_ns: int, ended_ns: int) -> None:
        """See Scheduler.observe."""
        self._samples.append((len(batch), ended_ns - started_ns, started_ns - batch[0].enqueue_ns))
        if started_ns - self._fitted_ns < self.REFIT_NS and len(self._samples) >= self.EAGER_SAMPLES:
            return
        self._fitted_ns = started_ns
        sizes, runs_ns, waits_ns = zip(*self._samples, strict=True)
        count = len(sizes)
        self._mean_wait_ns = sum(waits_ns) / count
        spread = count * sum(size * size for size in sizes) - sum(sizes) ** 2
        if spread:
            slope = (count * sum(size * run for size, run in zip(sizes, runs_ns, strict=True)) - sum(sizes) * sum(runs_ns)) / spread
            self._each_ns, self._fixed_ns = max(slope, 1e3), max((sum(runs_ns) - slope * sum(sizes)) / count, 0.0)
        else:  # all of one size: share the time between the two
            self._each_ns = self._fixed_ns = sum(runs_ns) / (sum(sizes) + count)
