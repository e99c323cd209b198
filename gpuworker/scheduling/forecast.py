"""Will this request be in time? Asked before it is sent. Twin of native/forecast.c (tests/test_forecast.py compares them)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PROBE_AFTER_NS = 1_000_000_000
"""When a bucket has not run for so long, requests are let through whatever the forecast says: it may be what is wrong."""


ROOM_BATCHES = 4
"""With a budget below so many full batches, whether a request is in time depends on who else comes: there a forecast turns away too many."""


class LaneView(NamedTuple):
    """A length bucket as its owner publishes it. `length`: longest request; `cap`: most in a batch; `run_one_ns`, `run_full_ns`: predicted run of a batch of
    1 and of `cap`; `gap_ns`: mean time between arrivals, 0 = unknown; `queued`: requests; `ran_ns`: when its last batch began or ended."""

    length: int
    cap: int
    run_one_ns: int
    run_full_ns: int
    gap_ns: int
    queued: int
    ran_ns: int

    def run_ns(self, size: int) -> int:
        """Between the times of a batch of one and of a full one, as if it grew by the same for each request."""
        if self.cap < 2 or self.run_full_ns < self.run_one_ns:
            return self.run_full_ns
        return self.run_one_ns + (self.run_full_ns - self.run_one_ns) // (self.cap - 1) * (size - 1)


class Forecast(NamedTuple):
    """When its answer would be there, from now; how many are queued; whether it is to be turned away."""

    estimated_ns: int
    depth: int
    is_late: bool


def forecast(lanes: Sequence[LaneView], length: int, budget_ns: int, now_ns: int, busy_until_ns: int, always: bool = False) -> Forecast:
    """For a request of `length` with `budget_ns`, while the device is busy until then (or a time that has passed). Not for one with a priority: who is queued
    may be behind it.

    Before its batch go the running one, all full batches and what is left of other buckets. Those that will have come until then are in its batch. With a
    budget below ROOM_BATCHES full batches it is turned away only if `always`.
    """
    mine = next((i for i, lane in enumerate(lanes) if lane.length >= length), len(lanes) - 1)
    wait_ns = max(busy_until_ns - now_ns, 0)
    is_idle = busy_until_ns <= now_ns and now_ns - lanes[mine].ran_ns >= PROBE_AFTER_NS
    for i, lane in enumerate(lanes):
        full, rest = divmod(lane.queued, lane.cap)
        wait_ns += full * lane.run_full_ns
        if i != mine and rest:
            wait_ns += lane.run_ns(rest)
    lane = lanes[mine]
    size = lane.queued % lane.cap + 1 + (wait_ns // lane.gap_ns if lane.gap_ns else 0)
    estimated_ns = wait_ns + lane.run_ns(min(size, lane.cap))
    may_turn_away = not is_idle and lane.run_full_ns > 0 and (always or budget_ns >= ROOM_BATCHES * lane.run_full_ns)
    return Forecast(estimated_ns, sum(lane.queued for lane in lanes), may_turn_away and estimated_ns > budget_ns)
