"""The words that the owner's loop, its policy and the simulator speak. All times are integers: CLOCK_MONOTONIC nanoseconds."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Reason(enum.IntEnum):
    """Why a batch left; counted in the statistics (GW_REASONS of native/layout.h bounds how many there may be)."""

    FULL = 0
    """As many requests were there as a batch may hold."""
    AGE = 1
    """The oldest request had waited max_wait_ms."""
    DRAIN = 2
    """The worker is shutting down: nothing waits any more."""
    BUDGET = 3
    """With one request more it could have become too late for the first."""
    VALUE = 4
    """Requests come too slowly for waiting to be worth it."""
    OVERLOAD = 5
    """It is what can still be in time; requests that stood in its way were rejected."""
    LATE = 6
    """Nothing else was there: requests past their budget are served (late="serve")."""
    PROBE = 7
    """By the prediction nothing can be in time, and nothing has run for a while: one runs anyway, as the prediction may be what is wrong."""


class Queued(NamedTuple):
    """A request in the owner's queue, as its frontend described it. 0 means: not given."""

    ticket: int
    enqueue_ns: int
    deadline_ns: int = 0
    """When its caller stops waiting."""
    budget_ns: int = 0
    """Its own latency budget, from enqueue_ns to the answer; else the worker's."""
    length: int = 0
    """What handler.length says of it, e.g. tokens."""
    priority: int = 0
    participant: int = 0
    """The client that sent it."""


class Run(NamedTuple):
    """Run `batch` now (None: the first `size` of the queue), and tell the callers of `rejected` that theirs will not run."""

    size: int
    reason: Reason
    batch: Sequence[Queued] | None = None
    rejected: Sequence[Queued] = ()
    length: int = 0
    """What the requests of the batch are padded to."""
    predicted_ns: int = 0
    """How long it should take; 0: nothing is known."""


class Wait(NamedTuple):
    """Run nothing before `until_ns` (None: not before something arrives). Arrivals are always a reason to ask again."""

    until_ns: int | None
    rejected: Sequence[Queued] = ()


Decision = Run | Wait


class Policy(Protocol):
    """Decides about a queue that somebody else keeps. Asked only when the device can take a batch, so that no batch is frozen while it could still grow."""

    def decide(self, queue: Sequence[Queued], now_ns: int) -> Decision:
        """What to do with `queue`, which is sorted by enqueue_ns, oldest first."""
        ...


class Scheduler(Protocol):
    """A queue and its policy in one, for policies that keep their queue in an order of their own."""

    def __len__(self) -> int:
        """Requests that are queued."""
        ...

    def add(self, request: Queued) -> None:
        """A request has arrived."""
        ...

    def discard(self, ticket: int) -> None:
        """A request was withdrawn. Nothing happens if it is not there."""
        ...

    def decide(self, now_ns: int, may_wait: bool = True) -> Decision:
        """As Policy.decide; what it returns to be run or rejected has left the queue. Run.batch is never None here."""
        ...

    def observe(self, batch: Sequence[Queued], started_ns: int, ended_ns: int) -> None:
        """A batch that `decide` returned has run."""
        ...


class RunTimes(Protocol):
    """Predicted run times."""

    version: int
    """Changes whenever a table does."""
    learns: bool
    """Whether tables may be wrong, and get better by what is observed."""

    def table(self, length: int) -> Sequence[int]:
        """Predicted ns for batches of 0, 1, ... max_batch_size requests padded to `length` (0 where lengths are not used). Non-decreasing, [0] is 0; and,
        from length 1 on, nowhere smaller for a longer one."""
        ...

    def observe(self, size: int, length: int, run_ns: int) -> None:
        """A batch of `size` requests padded to `length` took `run_ns`: from its dispatch, or the end of the batch before it, until its answers were published."""
        ...
