"""How long requests that are all in time may wait for company while the device is idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gpuworker.scheduling.decision import Reason

WINDOW = 32
"""Arrivals that the rate is judged by."""


class Arrivals:
    """The last WINDOW enqueue times of one bucket. The rate they imply falls by itself in silence, so nothing has to be averaged or aged."""

    __slots__ = ("_times_ns",)

    def __init__(self) -> None:
        self._times_ns: deque[int] = deque(maxlen=WINDOW)

    def add(self, enqueue_ns: int) -> None:
        """Nearly in order is good enough."""
        self._times_ns.append(enqueue_ns)

    def worth_until_ns(self, count: int, run_ns: Sequence[int]) -> int | None:
        """Until when waiting for one more request beside `count` saves more latency than it costs; None: it does not.

        One-step lookahead: waiting a gap g for the next one costs everybody present g and the growth of the run, and saves the run that it would have
        had to itself: worth it while (count + 1) * g < gain. With w arrivals in the time since the w-th last one, g = (t - t_w) / w, which
        makes that a condition on t alone: one timer instead of polling.
        """
        known = len(self._times_ns)
        gain_ns = run_ns[count] + run_ns[1] - run_ns[count + 1] - count * (run_ns[count + 1] - run_ns[count])
        if known < 2 or gain_ns <= 0:
            return None
        return self._times_ns[0] + known * gain_ns // (count + 1)

    def gap_ns(self, now_ns: int) -> int:
        """Mean time between arrivals, as of now; 0 when fewer than two are known."""
        known = len(self._times_ns)
        return max((now_ns - self._times_ns[0]) // known, 1) if known >= 2 else 0


class Waits(NamedTuple):
    """How long requests may wait. `cap_ns`: from the oldest's enqueue time on; None: no cap. `worth_ns`: the worker's budget, where they wait only while that is
    worth it; None: until the last instant. `slack_ns`: spared before that."""

    cap_ns: int | None = None
    worth_ns: int | None = None
    slack_ns: int = 0


def leaves_room(run_ns: Sequence[int], budget_ns: int) -> bool:
    """Whether a request that comes while another one runs alone can still be in time. Where it cannot, whoever comes during a run is lost, so each run should take
    as many along as it can: it is worth waiting until the last instant. (Measured in docs/lab.md: with bursts 5 to 16 points more goodput, else at worst 3 less.)"""
    return 2 * run_ns[1] <= budget_ns


def departure(
    count: int, oldest_ns: int, due_ns: int | None, run_ns: Sequence[int], waits: Waits, arrivals: Arrivals, now_ns: int
) -> tuple[int, Reason]:
    """When a batch leaves that nobody joins, and why then. The earliest of: the operator's cap; the last instant at which one more still fits; the end of the
    wait's worth.

    count: requests present, fewer than a batch may hold. oldest_ns: enqueue time of the oldest. due_ns: of the first with a budget. One request more never moves
    the first two later: the last instant comes earlier as the run gets longer.
    """
    leaves_ns, reason = None, Reason.VALUE
    if waits.worth_ns is not None and due_ns is not None:
        if leaves_room(run_ns, waits.worth_ns):
            leaves_ns = arrivals.worth_until_ns(count, run_ns)
            if leaves_ns is None:
                return now_ns, reason
        due_ns = min(due_ns, oldest_ns + waits.worth_ns)  # who may take longer need not wait longer
    if waits.cap_ns is not None and (leaves_ns is None or oldest_ns + waits.cap_ns < leaves_ns):
        leaves_ns, reason = oldest_ns + waits.cap_ns, Reason.AGE
    if due_ns is not None:
        last_ns = due_ns - run_ns[count + 1] - waits.slack_ns if run_ns[count + 1] else now_ns  # nothing is known yet: it would be too late
        if leaves_ns is None or last_ns < leaves_ns:
            leaves_ns, reason = last_ns, Reason.BUDGET
    return now_ns if leaves_ns is None else leaves_ns, reason
