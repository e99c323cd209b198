"""From what the ring says to what the caller should know."""

from __future__ import annotations

import errno
import os
from typing import Any

from gpuworker._native import ffi, lib
from gpuworker.errors import BudgetExceeded, DeadlineExceeded, QueueFull, RemoteError, SegmentError, WorkerDied, WorkerDraining
from gpuworker.payload import decode_error
from gpuworker.segment import Segment
from gpuworker.segment.generation import read_generation
from gpuworker.segment.wire import LATE


def explain(problem: int, if_child: str) -> str:
    """A negative errno of the ring in words."""
    return if_child if problem == -errno.ECHILD else f"the ring refused the request: {os.strerror(-problem)}"


def queue_full(segment: Segment, problem: int) -> QueueFull:
    """The error for a claim that found no slot."""
    slots, why = segment.capacity, f"all {segment.capacity} slots are in use"
    if problem == -errno.EDQUOT:
        o = segment.overview()
        slots, why = o.quota_shared if o.alive > 1 else o.quota_alone, "this process holds as many slots as client_quota allows"
    generation = read_generation(segment.port)
    retry_after_ms = lib.gw_retry_after_ns(segment.port) / 1e6  # slots of a whole batch get free at once
    if generation is not None and generation.answer_ms:
        retry_after_ms = generation.answer_ms / max(slots, 1)  # so many slots, each held for so long, get free one after the other: Little's law
    retry_after_ms = max(retry_after_ms, 1.0)
    return QueueFull(f"{why}; try again in about {retry_after_ms:,.0f} ms, or use on_full='block' or a larger capacity", retry_after_ms)


def budget_exceeded(port: Any, terms: int) -> tuple[BudgetExceeded, bool] | None:
    """The error for a request that is forecast to be late, and whether it would be even if it were alone; None if it is not, or not any more."""
    forecast = ffi.new("gw_forecast *")
    if not lib.gw_is_late(port, terms, forecast):
        return None
    error = BudgetExceeded(forecast.estimated_ns / 1e6, forecast.budget_ns / 1e6, forecast.depth, "enqueue")
    return error, forecast.least_ns > forecast.budget_ns


def failed(segment: Segment) -> WorkerDied:
    """The error for a worker that its supervisor has given up."""
    return WorkerDied(f"worker {segment.name!r} has failed and is not started again: {segment.note()}")


def failure(kind: int, blob: bytes, segment: Segment, sent: int | None = None) -> Exception:
    """The error that a response of this kind stands for. sent: how many tokens had come, of an answer that comes piece by piece and was begun; else None."""
    how_far = "" if sent is None else f"after {sent:,} tokens" if sent else "before its first token"
    if kind == lib.GW_KIND_ERROR:
        return decode_error(blob) if blob else RemoteError("Exception", "an error that did not fit max_response_bytes")
    if kind == lib.GW_KIND_EXPIRED and how_far:
        return DeadlineExceeded(f"the answer was not complete when its deadline passed; it was ended {how_far}", "running")
    if kind == lib.GW_KIND_EXPIRED:  # counted by the owner
        return DeadlineExceeded("the request could not be answered before its deadline; it did not run", "queued")
    if kind == lib.GW_KIND_LATE and len(blob) == LATE.size:
        estimated_ns, budget_ns, depth = LATE.unpack(blob)
        return BudgetExceeded(estimated_ns / 1e6, budget_ns / 1e6, depth, "queued")
    if kind == lib.GW_KIND_DRAINING and how_far:
        return WorkerDraining(f"the worker stopped before the answer was complete; it was ended {how_far}")
    if kind == lib.GW_KIND_DRAINING:
        return WorkerDraining("the worker stopped before it came to this request; it did not run")
    if kind == lib.GW_KIND_DIED:
        return WorkerDied("the owner died while it ran this request; it will not be tried again")
    if kind == lib.GW_KIND_STUCK:
        return WorkerDied("this request's batch ran for longer than run_timeout_s, so its owner was ended; it will not be tried again")
    if kind == lib.GW_KIND_FAILED:
        return failed(segment)
    return SegmentError(f"malformed response of kind {kind}")
