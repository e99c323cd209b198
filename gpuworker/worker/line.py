"""The owner's queue with the policy that decides about it. Two kinds: `PlainLine` for batches by size and age, `ScheduledLine` for everything else."""

from __future__ import annotations

from typing import Any, Protocol

from gpuworker._native import lib
from gpuworker.scheduling import Decision, Policy, Reason, Run, Wait
from gpuworker.segment import Segment
from gpuworker.worker.backlog import Backlog
from gpuworker.worker.handler import Handler

_collect, _take = lib.gw_collect, lib.gw_take


class Line(Protocol):
    """For the owner's thread, all but `tick`."""

    learns: bool
    """Whether `done` is to be called."""

    def prepare(self, handler: Handler) -> None:
        """The handler has loaded; nothing is served yet."""
        ...

    def announce(self) -> None:
        """This process owns the segment now: frontends are told what they may ask for."""
        ...

    def collect(self, until_ns: int) -> int:
        """Waits for something new until then (0: not at all). -> requests queued."""
        ...

    def decide(self, now_ns: int, may_wait: bool) -> Decision:
        """What to do now. The callers of rejected requests are told."""
        ...

    def take(self, run: Run, taken: Any) -> int:
        """Begins the batch; fills `taken` as gw_take does. -> its size, which is less than planned where requests were withdrawn meanwhile."""
        ...

    def done(self, run: Run, began_ns: int, ended_ns: int) -> None:
        """The batch has run without an error and its answers are published."""
        ...

    def tick(self) -> None:
        """Several times a second, from the keeper's thread."""
        ...

    def close(self) -> None:
        """Nothing more is served."""
        ...


class PlainLine:
    """Requests in the order of their enqueue times, in C memory; a Policy for the front of them. See Line."""

    learns = False

    def __init__(self, segment: Segment, policy: Policy, fair_share: bool) -> None:
        self._port, self._fair_share = segment.port, fair_share
        self._backlog = Backlog(segment.port)
        self._decide = policy.decide

    def prepare(self, handler: Handler) -> None:
        """See Line.prepare."""

    def announce(self) -> None:
        """See Line.announce."""
        lib.gw_set_scheduling(self._port, lib.GW_ADMIT_ALL, 0, 0, 0, int(self._fair_share), 0)

    def collect(self, until_ns: int) -> int:
        """See Line.collect."""
        count: int = _collect(self._port, until_ns)
        if count < 0:  # a signal came in
            count = 0
        self._backlog.length = count
        return count

    def decide(self, now_ns: int, may_wait: bool) -> Decision:
        """See Line.decide."""
        decision = self._decide(self._backlog, now_ns)
        if may_wait or decision.__class__ is Run:
            return decision
        return Run(self._backlog.length, Reason.DRAIN) if self._backlog.length else Wait(None)

    def take(self, run: Run, taken: Any) -> int:
        """See Line.take."""
        count: int = _take(self._port, run.size, run.reason, taken)
        return count

    def done(self, run: Run, began_ns: int, ended_ns: int) -> None:
        """See Line.done."""

    def tick(self) -> None:
        """See Line.tick."""

    def close(self) -> None:
        """See Line.close."""
