"""One length bucket: its queue, its predicted run times, and what it would do if the device were its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gpuworker.scheduling.decision import Queued, Reason
from gpuworker.scheduling.fairness import fair_front
from gpuworker.scheduling.feasible import Share, select
from gpuworker.scheduling.lane import Lane
from gpuworker.scheduling.waiting import Arrivals, departure


class Plan(NamedTuple):
    """A bucket's best batch now. `latest_start_ns`: when its first request would be missed; `leaves_ns`: when it should go, nobody else asking."""

    bucket: Bucket
    level: int
    size: int
    shares: Sequence[Share]
    run_ns: int
    latest_start_ns: int
    leaves_ns: int
    reason: Reason


class Bucket:
    """Requests that are padded to `length` (0: lengths are not used), at most `cap` in a batch."""

    def __init__(self, length: int, cap: int) -> None:
        self.length, self.cap = length, cap
        self.run_ns: Sequence[int] = [0] * (cap + 1)
        self.arrivals = Arrivals()
        self.overdue: deque[Queued] = deque()
        self._lanes: dict[int, Lane] = {}
        self._order: list[int] = []  # priorities, highest first

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values())) if len(self._order) != 1 else len(self._lanes[self._order[0]])

    def __iter__(self) -> Iterator[Queued]:
        for lane in self._lanes.values():
            yield from lane
        yield from self.overdue

    def add(self, request: Queued, level: int, due_ns: int, is_firm: bool) -> None:
        """Queues it."""
        if level not in self._lanes:
            self._lanes[level] = Lane()
            self._order = sorted(self._lanes, reverse=True)
        self._lanes[level].add(request, due_ns, is_firm)

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

    def plan(self, now_ns: int, max_wait_ns: int | None, uses_worth: bool) -> Plan | None:
        """What to run if it were this bucket's turn. None when nothing is queued; size 0 when nothing can be in time any more."""
        order = [level for level in self._order if self._lanes[level]] if len(self._order) > 1 else self._order
        lanes = [self._lanes[level] for level in order]
        if not lanes or not lanes[0]:
            return None
        shares = select(lanes, now_ns, self.run_ns, self.cap)
        size = sum([share.size for share in shares])
        if not size:
            return Plan(self, 0, 0, shares, 0, now_ns, now_ns, Reason.OVERLOAD)
        run_ns = self.run_ns[size]
        blocked = [len(lane) - lane.feasible(share.end_ns) for lane, share in zip(lanes, shares, strict=True)]
        firsts = [
            due for lane, skip, share in zip(lanes, blocked, shares, strict=True) if share.size and (due := lane.first_due_ns(skip)) is not None
        ]
        level = next(level for level, share in zip(order, shares, strict=True) if share.size)
        leaves_ns, reason = now_ns, Reason.FULL
        if any(blocked):
            reason = Reason.OVERLOAD
        elif size < self.cap and size == sum(map(len, lanes)):
            oldest_ns = min([one.enqueue_ns for lane in lanes for one in (*lane.firm[:1], *lane.patient[:1])])
            due_ns = min((lane.firm_due_ns[0] for lane in lanes if lane.firm_due_ns), default=None)
            leaves_ns, reason = departure(size, oldest_ns, due_ns, self.run_ns, max_wait_ns, self.arrivals if uses_worth else None, now_ns)
        return Plan(self, level, size, shares, run_ns, min(firsts) - run_ns, leaves_ns, reason)

    def take(self, plan: Plan, is_fair: bool) -> tuple[list[Queued], list[Queued]]:
        """Takes the planned batch out of the queue. -> it, and those that stood in its way."""
        batch: list[Queued] = []
        blocked: list[Queued] = []
        shares = iter(plan.shares)
        for level in self._order:
            lane = self._lanes[level]
            if not lane:
                continue
            share = next(shares)
            blocked += lane.pop_blocked(share.end_ns)
            queue = lane.in_order()
            chosen = fair_front(queue, share.size) if is_fair else list(queue[: share.size])
            lane.remove(chosen)
            batch += chosen
        return batch, blocked

    def take_endangered(self, batch: list[Queued], end_ns: int, limit_ns: int, ends_ns: Callable[[int], int]) -> int:
        """Moves into `batch`, of a longer bucket, those of ours that would be too late once it has ended at `end_ns` and can be in time in it, without making it
        end later than `limit_ns`. ends_ns(n): when n would end. -> the new limit. Padding up is always allowed."""
        for level in self._order:
            lane = self._lanes[level]
            for request, due_ns in list(zip(lane.firm, lane.firm_due_ns, strict=True)):
                limit = min(limit_ns, due_ns)
                if due_ns - self.run_ns[1] >= end_ns or ends_ns(len(batch) + 1) > limit:
                    break
                lane.remove([request])
                batch.append(request)
                limit_ns = limit
        return limit_ns

    def pop_late(self, end_ns: int) -> list[Queued]:
        """Takes out those whose answer is due before `end_ns`."""
        return [request for level in self._order for request in self._lanes[level].pop_blocked(end_ns)]
