"""One length bucket: its queue, its predicted run times, and what it would do if the device were its own."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from gpuworker.scheduling.decision import Queued, Reason, RunTimes
from gpuworker.scheduling.fairness import fair_front
from gpuworker.scheduling.feasible import NEVER_NS, Share, select
from gpuworker.scheduling.lane import Lane
from gpuworker.scheduling.waiting import Arrivals, departure, leaves_room


class Bucket:
    """Requests that are padded to `length`, at most `cap` in a batch; by priority, and then by when they are due. With length 0 lengths are not used, unless
    `max_tokens` is given: then a batch is padded to its longest request, and that times its size is bounded. Where due times are not `firm` nothing is too late.

    `plan` sets what it would run now: `size` requests, in `planned_ns`; when they `leave_ns` if nobody else asks, and the `reason`; when the first of them would
    be missed, `latest_start_ns`; and its priority, `level`. `served_ns`: when its last batch left.
    """

    def __init__(self, length: int, cap: int, run_times: RunTimes, firm: bool, max_tokens: int | None = None, slack_ns: int = 0) -> None:
        self.length, self.cap, self.firm, self._run_times = length, cap, firm, run_times
        self._max_tokens = max_tokens if not length else None
        self._slack_ns = slack_ns
        self.run_ns = run_times.table(length)
        """Predicted run time by batch size."""
        self.arrivals = Arrivals()
        self.overdue: deque[Queued] = deque()
        self._lanes: dict[int, Lane] = {0: Lane()}
        self._order = [0]  # priorities, highest first
        self._shares: Sequence[Share] = ()
        self.size = self.planned_ns = self.leave_ns = self.latest_start_ns = self.level = 0
        self.served_ns = -1
        self.reason = Reason.FULL

    def __len__(self) -> int:
        return sum([len(lane) for lane in self._lanes.values()])

    def __iter__(self) -> Iterator[Queued]:
        for lane in self._lanes.values():
            yield from lane
        yield from self.overdue

    def add(self, request: Queued, due_ns: int) -> None:
        """Queues it."""
        lane = self._lanes.get(request.priority)
        if lane is None:
            lane = self._lanes[request.priority] = Lane()
            self._order = sorted(self._lanes, reverse=True)
        lane.add(request, due_ns)

    def discard(self, ticket: int) -> bool:
        """Takes one out. False if it is not there."""
        if any(lane.discard(ticket) for lane in self._lanes.values()):
            return True
        before = len(self.overdue)
        self.overdue = deque(request for request in self.overdue if request.ticket != ticket)
        return len(self.overdue) != before

    def promote(self, now_ns: int, ageing_ns: int) -> None:
        """Lifts a request by one level for each `ageing_ns` that it has waited, as far as there is somebody up there."""
        for higher, level in zip(self._order[-2::-1], self._order[:0:-1], strict=True):
            self._lanes[level].lift(self._lanes[higher], higher, now_ns, ageing_ns)

    def plan(self, now_ns: int, max_wait_ns: int | None, worth_ns: int | None) -> None:
        """What to run if it were this bucket's turn: see above. `size` is 0 when nothing is queued, or nothing can be in time any more. worth_ns: the budget,
        where requests wait only while that is worth it."""
        if len(self._order) > 1:
            self._lanes = {level: lane for level, lane in self._lanes.items() if lane} or {0: Lane()}
            self._order = sorted(self._lanes, reverse=True)
        starts_ns = now_ns if self.firm else -NEVER_NS  # a batch that has ended long ago is too late for nobody
        if len(self._order) == 1 and self._plan_simply(self._lanes[self._order[0]], now_ns, starts_ns):
            return
        lanes = [self._lanes[level] for level in self._order]
        cap = self.cap if self._max_tokens is None else self._token_cap(lanes, self._max_tokens)
        self._shares = shares = select(lanes, starts_ns, self.run_ns, cap)
        self.size = size = sum([share.size for share in shares])
        if not size:
            return
        self.planned_ns, self.leave_ns, self.reason = self.run_ns[size], now_ns, Reason.FULL
        self.level = next(level for level, share in zip(self._order, shares, strict=True) if share.size)
        firsts = [lane.first_due_from(share.end_ns) for lane, share in zip(lanes, shares, strict=True) if share.size]
        first_ns = min([due_ns for due_ns in firsts if due_ns is not None])
        self.latest_start_ns = first_ns - self.planned_ns
        if any(lane.due_ns and lane.due_ns[0] < share.end_ns for lane, share in zip(lanes, shares, strict=True)):
            self.reason = Reason.OVERLOAD
        elif size < cap and size == len(self):
            oldest_ns = min([lane.requests[0].enqueue_ns for lane in lanes if lane])
            arrivals = self.arrivals if worth_ns is not None and leaves_room(self.run_ns, worth_ns) else None
            due_ns = first_ns - self._slack_ns if self.firm else None
            self.leave_ns, self.reason = departure(size, oldest_ns, due_ns, self.run_ns, max_wait_ns, arrivals, now_ns)

    def _plan_simply(self, lane: Lane, now_ns: int, starts_ns: int) -> bool:
        """What nearly always holds under load, and is asked of every bucket for every batch: a full batch can be in time. False: plan it properly."""
        due = lane.due_ns
        if not due:
            self.size = 0
            return True
        run_ns = self.run_ns[self.cap]
        end_ns = starts_ns + run_ns
        blocked = 0 if due[0] >= end_ns else bisect_left(due, end_ns)
        if len(due) - blocked < self.cap or self._max_tokens is not None:
            return False
        self.size, self.planned_ns, self.leave_ns, self.level = self.cap, run_ns, now_ns, self._order[0]
        self.reason = Reason.OVERLOAD if blocked else Reason.FULL
        self.latest_start_ns = due[blocked] - run_ns
        self._shares = (Share(self.cap, end_ns),)
        return True

    def _token_cap(self, lanes: Sequence[Lane], max_tokens: int) -> int:
        """How many of the first requests fit the token budget, at least one; sets what batches of their length take."""
        count = longest = 0
        for request in (request for lane in lanes for request in lane):
            longer = max(longest, request.length)
            if count == self.cap or (count and longer * (count + 1) > max_tokens):
                break
            count, longest = count + 1, longer
        self.run_ns = self._run_times.table(coarse(longest))
        return count

    def take(self, is_fair: bool, due_ns: Callable[[Queued], int]) -> tuple[list[Queued], list[Queued]]:
        """Takes what was planned out of the queue. -> the batch, and those that stood in its way."""
        batch: list[Queued] = []
        blocked: list[Queued] = []
        for level, share in zip(self._order, self._shares, strict=True):
            lane = self._lanes[level]
            blocked += lane.pop_before(share.end_ns)
            chosen = fair_front(lane.requests, share.size, lane.participants) if is_fair and lane.is_shared else lane.requests[: share.size]
            lane.remove(chosen)
            batch += chosen
        while self._max_tokens is not None and len(batch) > 1 and len(batch) * longest(batch) > self._max_tokens:
            postponed = batch.pop()  # the first ones were in others' way, so these are not those that were counted
            self.add(postponed, due_ns(postponed))
        return batch, blocked

    def take_overdue(self, budget_ns: int) -> list[Queued]:
        """A batch of those that are past their budget; small enough that a request which comes just after it has left can still be in time."""
        size, longest = 0, 0
        for request in self.overdue:
            longest = max(longest, request.length)
            run_ns = self.run_ns if self._max_tokens is None else self._run_times.table(coarse(longest))
            too_long = self._max_tokens is not None and longest * (size + 1) > self._max_tokens
            if size and (size == self.cap or too_long or run_ns[size + 1] + run_ns[1] > budget_ns):
                break
            size += 1
        return [self.overdue.popleft() for _ in range(size)]

    def take_endangered(self, batch: list[Queued], end_ns: int, limit_ns: int, ends_ns: Callable[[int], int]) -> int:
        """Moves into `batch`, of a longer bucket, those of ours that would be too late once it has ended at `end_ns` and can be in time in it, without making it
        end later than `limit_ns`. ends_ns(n): when n would end. -> the new limit. Padding up is always allowed."""
        for lane in self._lanes.values():
            while lane.requests and lane.due_ns[0] - self.run_ns[1] < end_ns:
                limit = min(limit_ns, lane.due_ns[0])
                if ends_ns(len(batch) + 1) > limit:
                    break
                limit_ns = limit
                batch.append(lane.pop_first())
        return limit_ns

    def pop_late(self, end_ns: int) -> list[Queued]:
        """Takes out those whose answer is due before `end_ns`, where that is firm."""
        if not self.firm:
            return []
        if len(self._order) == 1:
            return self._lanes[self._order[0]].pop_before(end_ns)
        return [request for lane in self._lanes.values() for request in lane.pop_before(end_ns)]


def longest(batch: Sequence[Queued]) -> int:
    """Of the requests' lengths."""
    return max([request.length for request in batch])


def coarse(length: int) -> int:
    """Rounded up to a power of two: where batches are padded to their longest request, run times are kept by this."""
    return 1 << (length - 1).bit_length() if length > 0 else 0
