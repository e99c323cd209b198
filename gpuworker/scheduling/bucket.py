"""One length bucket: its queue, its predicted run times, and what it would do if the device were its own."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from gpuworker.scheduling.decision import Queued, Reason, RunTimes
from gpuworker.scheduling.fairness import fair_front
from gpuworker.scheduling.feasible import NEVER_NS, Share, select, spare_heads
from gpuworker.scheduling.lane import Lane
from gpuworker.scheduling.waiting import Arrivals, Waits, departure


class Bucket:
    """Requests that are padded to `length` (0: lengths are not used), at most `cap` in a batch; by priority, and then by when they are due. Where due times are
    not `firm`, nothing is too late.

    `plan` sets what it would run now: `size` requests, in `planned_ns`; when they `leave_ns` if nobody else asks, and the `reason`; when the first of them would
    be missed, `latest_start_ns`; and its priority, `level`. `has_waited`: it leaves as soon as it can. `ran_ns`: when its last batch began or ended.
    """

    def __init__(self, length: int, cap: int, run_times: RunTimes, firm: bool) -> None:
        self.length, self.cap, self.firm, self._run_times = length, cap, firm, run_times
        self.run_ns = run_times.table(length)
        """Predicted run time by batch size."""
        self.arrivals = Arrivals()
        self.overdue: deque[Queued] = deque()
        self._only: Lane | None = Lane()  # where there is one priority only, which nearly always is so
        self._lanes: dict[int, Lane] = {0: self._only}
        self._order = [0]  # priorities, highest first
        self._shares: Sequence[Share] = ()
        self.size = self.planned_ns = self.leave_ns = self.latest_start_ns = self.level = 0
        self.ran_ns = -NEVER_NS
        self.reason = Reason.FULL
        self.has_waited = False  # there is the rest of a batch that had waited long enough

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
            self._set_lanes(self._lanes)
        lane.add(request, due_ns)

    def _set_lanes(self, lanes: dict[int, Lane]) -> None:
        self._lanes, self._order = lanes, sorted(lanes, reverse=True)
        self._only = lanes[self._order[0]] if len(lanes) == 1 else None

    def discard(self, ticket: int) -> bool:
        """Takes one out. False if it is not there."""
        if any(lane.discard(ticket) for lane in self._lanes.values()):
            return True
        before = len(self.overdue)
        self.overdue = deque(request for request in self.overdue if request.ticket != ticket)
        return len(self.overdue) != before

    def refresh(self) -> None:
        """Run times have changed."""
        self.run_ns = self._run_times.table(self.length)

    def padded(self, longest: int) -> int:
        """What a batch is padded to whose longest request is that."""
        return self.length

    def shape(self, longest: int) -> int:
        """The length by which run times of such a batch are known."""
        return self.length

    def table(self, longest: int) -> Sequence[int]:
        """Predicted run times of such batches."""
        return self.run_ns

    def pop_hopeless(self, now_ns: int) -> list[Queued]:
        """Takes out those that are too late even alone."""
        return self.pop_late(now_ns + self.run_ns[1])

    def pop_late(self, end_ns: int) -> list[Queued]:
        """Takes out those whose answer is due before `end_ns`, where that is firm."""
        if not self.firm:
            return []
        only = self._only
        if only is not None:  # asked of every bucket, twice for every batch
            return only.pop_before(end_ns) if only.due_ns and only.due_ns[0] < end_ns else []
        return [request for lane in self._lanes.values() for request in lane.pop_before(end_ns)]

    def plan(self, now_ns: int, waits: Waits, ageing_ns: int = 0) -> None:
        """What to run if it were this bucket's turn: see above. `size` is 0 when nothing is queued; those that are too late even alone have been taken out."""
        only = self._only
        if only is None:
            self._tidy(now_ns, ageing_ns)
        elif not only.due_ns:
            self.size = 0
            return
        starts_ns = now_ns if self.firm else -NEVER_NS  # a batch that has ended long ago is too late for nobody
        if only is not None and self._plan_full(only, now_ns, starts_ns):
            lanes = [only]
        else:
            lanes = [self._lanes[level] for level in self._order]
            self._plan(lanes, now_ns, starts_ns, self._cap(lanes), waits)
        if ageing_ns and self.size:
            oldest = min([lane.requests[0] for lane in lanes if lane], key=lambda one: one.enqueue_ns)
            self.level = max(self.level, oldest.priority + (now_ns - oldest.enqueue_ns) // ageing_ns)

    def _cap(self, lanes: Sequence[Lane]) -> int:
        return self.cap

    def _tidy(self, now_ns: int, ageing_ns: int) -> None:
        """Forgets empty priorities; lifts a request by one level for each `ageing_ns` that it has waited, as far as there is somebody up there."""
        self._set_lanes({level: lane for level, lane in self._lanes.items() if lane} or {0: Lane()})
        for higher, level in zip(self._order[-2::-1], self._order[:0:-1], strict=True):
            if ageing_ns:
                self._lanes[level].lift(self._lanes[higher], higher, now_ns, ageing_ns)

    def _plan_full(self, lane: Lane, now_ns: int, starts_ns: int) -> bool:
        """What nearly always holds under load, and is asked of every bucket for every batch: a full batch can be in time. False: plan it properly."""
        due, cap = lane.due_ns, self.cap
        run_ns = self.run_ns[cap]
        end_ns = starts_ns + run_ns
        blocked = 0 if due[0] >= end_ns else bisect_left(due, end_ns)
        if len(due) - blocked < cap or (blocked and lane.is_mixed):
            return False
        self.size, self.planned_ns, self.leave_ns, self.level = cap, run_ns, now_ns, self._order[0]
        self.reason = Reason.OVERLOAD if blocked else Reason.FULL
        self.latest_start_ns = due[blocked] - run_ns
        self._shares = (Share(cap, end_ns),)
        return True

    def _plan(self, lanes: Sequence[Lane], now_ns: int, starts_ns: int, cap: int, waits: Waits) -> None:
        shares = select(lanes, starts_ns, self.run_ns, cap)
        if len(lanes) == 1 and lanes[0].is_mixed:
            shares = [spare_heads(lanes[0], starts_ns, self.run_ns, cap, shares[0])]
        self._shares = shares
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
            self.leave_ns, self.reason = departure(size, oldest_ns, first_ns if self.firm else None, self.run_ns, waits, self.arrivals, now_ns)

    def take(self, is_fair: bool) -> tuple[list[Queued], list[Queued]]:
        """Takes what was planned out of the queue. -> the batch, and those that stood in its way."""
        batch: list[Queued] = []
        blocked: list[Queued] = []
        for level, share in zip(self._order, self._shares, strict=True):
            lane = self._lanes[level]
            blocked += lane.pop_before(share.end_ns)
            chosen = fair_front(lane.requests, share.size, lane.participants) if is_fair and lane.is_shared else lane.requests[: share.size]
            lane.remove(chosen)
            batch += chosen
        return batch, blocked

    def trim(self, batch: list[Queued], now_ns: int, due_ns: Callable[[Queued], int]) -> None:
        """After `take`, puts back what makes the batch too large."""

    def take_endangered(self, batch: list[Queued], now_ns: int, run_ns: Sequence[int], cap: int, limit_ns: int) -> int:
        """Moves into `batch`, of a longer bucket with these run times, those of ours that would be too late after it and can be in time in it, as far as that
        does not make it end later than `limit_ns`. -> the new limit. Padding up is always allowed."""
        end_ns = now_ns + run_ns[len(batch)]
        for lane in self._lanes.values():
            joined = []
            for request, due_ns in zip(lane.requests, lane.due_ns, strict=True):
                if len(batch) == cap or due_ns - self.run_ns[1] >= end_ns or now_ns + run_ns[len(batch) + 1] > limit_ns:
                    break
                if now_ns + run_ns[len(batch) + 1] <= due_ns:
                    limit_ns = min(limit_ns, due_ns)
                    batch.append(request)
                    joined.append(request)
            lane.remove(joined)
        return limit_ns

    def take_overdue(self, budget_ns: int) -> list[Queued]:
        """A batch of those that are past their budget; small enough that a request which comes just after it has left can still be in time."""
        size = longest = 0
        for request in self.overdue:
            longest = max(longest, request.length)
            run_ns = self.table(longest)
            if size and not (self.fits(size + 1, longest) and run_ns[size + 1] + run_ns[1] <= budget_ns):
                break
            size += 1
        return [self.overdue.popleft() for _ in range(size)]

    def fits(self, count: int, longest: int) -> bool:
        """Whether a batch may hold so many, the longest of that length."""
        return count <= self.cap
