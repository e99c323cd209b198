"""The words that the owner's loop and its policy speak."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Reason(enum.IntEnum):
    """Why a batch left; counted in the statistics (GW_REASONS of native/layout.h bounds how many there may be)."""

    FULL = 0
    """max_batch_size requests were there."""
    AGE = 1
    """The oldest request had waited max_wait_ms."""
    DRAIN = 2
    """The worker is shutting down: nothing waits any more."""


class Queued(NamedTuple):
    """A request in the owner's queue. Times are CLOCK_MONOTONIC nanoseconds, written by the frontend; deadline_ns 0 means none."""

    ticket: int
    enqueue_ns: int
    deadline_ns: int


class Run(NamedTuple):
    """Run the first `size` of the queue now."""

    size: int
    reason: Reason


class Wait(NamedTuple):
    """Run nothing before `until_ns` (None: not before something arrives). Arrivals are always a reason to ask again."""

    until_ns: int | None


Decision = Run | Wait


class Policy(Protocol):
    """Asked only when the device can take a batch, so that no batch is frozen while it could still grow."""

    def decide(self, queue: Sequence[Queued], now_ns: int) -> Decision:
        """What to do with `queue`, which is sorted by enqueue_ns, oldest first."""
        ...
