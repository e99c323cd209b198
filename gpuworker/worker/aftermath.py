"""What becomes of requests when there is no owner: what a supervisor does to the segment in the dead owner's place."""

from __future__ import annotations

from gpuworker._native import lib
from gpuworker.segment import Segment, State


def requeue(segment: Segment, attempts: int) -> int:
    """After an owner's death: what it was running is queued for the next one, or answered with WorkerDied where it has been tried `attempts` times. -> how many
    are queued again."""
    return _recover(segment, State.RESTARTING, attempts, lib.GW_KIND_DIED)


def tell_stuck(segment: Segment) -> None:
    """After an owner was ended for running a batch too long: that batch's callers are told."""
    _recover(segment, State.RESTARTING, 1, lib.GW_KIND_STUCK)


def tell_died(segment: Segment) -> None:
    """After the death of an owner that was draining: there will be no other."""
    _recover(segment, State.DRAINING, 1, lib.GW_KIND_DIED)


def fail(segment: Segment) -> None:
    """There will be no owner any more: everybody is told, now and whenever they ask."""
    _recover(segment, State.FAILED, 1, lib.GW_KIND_FAILED)
    with segment.in_place_of_owner():
        lib.gw_refuse_all(segment.port, lib.GW_KIND_FAILED)
        lib.gw_wake_all(segment.port)


def _recover(segment: Segment, state: State, attempts: int, kind: int) -> int:
    with segment.in_place_of_owner():
        lib.gw_set_state(segment.port, state)
        return int(lib.gw_recover(segment.port, attempts, kind))
