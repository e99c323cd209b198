"""Spans of requests that came with a trace context: how long each waited and ran, and which batch it was part of.

    gpuworker.queue   from being sent until its batch left           both children of the span that the request was sent in
    gpuworker.run     from then until its answer                     linked to its batch
    gpuworker.batch   the same time, a trace of its own              linked to its requests

The owner's thread only notes numbers; spans are made by another one, so that a slow SDK holds up no batch. What that one cannot keep up with is dropped.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpuworker import tracing
from gpuworker._native import ffi, lib
from gpuworker.segment import Segment
from gpuworker.segment.wire import request_id
from gpuworker.worker.options import WorkerOptions

log = logging.getLogger("gpuworker")

MOST_WAITING = 4096
"""Batches whose spans are still to be made."""
CLOSE_LIMIT_S = 5.0
"""How long the end of a worker waits for them."""
_DAY_NS = 86_400 * 10**9


class Traced(NamedTuple):
    """One request, as its slot has it. Times: CLOCK_MONOTONIC; dispatch_ns also where it is taken once and runs in many batches: when it was taken."""

    ticket: int
    trace_id: int
    span_id: int
    flags: int
    enqueue_ns: int
    dispatch_ns: int


class _Batch(NamedTuple):
    requests: Sequence[Traced]
    size: int
    """0: not a batch, but a request that took part in many."""
    reason: str
    ended_ns: int


class Tracer:
    """For the owner's thread. Raises ModuleNotFoundError where OpenTelemetry is not installed."""

    def __init__(self, segment: Segment) -> None:
        self._port, self._worker = segment.port, segment.name
        self._trace = tracing.api()
        self._tracer = self._trace.get_tracer("gpuworker")
        self._found = ffi.new("gw_traced[]", segment.capacity)
        self._todo: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._make_spans, name=f"gpuworker-tracer-{segment.name}", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, segment: Segment, options: WorkerOptions) -> Tracer | None:
        """One, if it is wanted."""
        return cls(segment) if tracing.is_wanted(options.tracing) else None

    def look(self, taken: Any, n: int) -> Sequence[Traced]:
        """Those of a batch, as gw_take has left it, that have a trace context. Before they are answered."""
        count = lib.gw_read_traces(self._port, taken, n, self._found)
        now_ns = time.monotonic_ns()
        found = []
        for one in self._found[0:count]:
            trace_id, began_ns = one.id_high << 64 | one.id_low, one.dispatch_ns if one.dispatch_ns <= now_ns else now_ns
            if trace_id and one.span:
                waited_ns = began_ns - one.enqueue_ns
                sent_ns = one.enqueue_ns if 0 <= waited_ns < _DAY_NS else began_ns  # a frontend writes there what it likes
                found.append(Traced(one.ticket, trace_id, one.span, one.flags, sent_ns, began_ns))
        return found

    def done(self, requests: Sequence[Traced], size: int, reason: str) -> None:
        """They are answered, just now; `size` requests were in their batch. 0: it was one that took part in many batches."""
        if self._todo.qsize() >= MOST_WAITING:
            self._dropped += 1
        else:
            self._todo.put(_Batch(requests, size, reason, time.monotonic_ns()))

    def close(self) -> None:
        """Waits, not for ever, until all spans are made. Exporting them is the SDK's."""
        self._todo.put(None)
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            log.warning("worker %s: spans of about %d batches are not made, as the SDK does not return", self._worker, self._todo.qsize())
        if self._dropped:
            log.warning("worker %s: spans of %d batches were dropped, as making them took too long", self._worker, self._dropped)

    def _make_spans(self) -> None:
        while (batch := self._todo.get()) is not None:
            try:
                self._make(batch)
            except Exception:
                log.exception("spans of a batch could not be made")

    def _make(self, batch: _Batch) -> None:
        trace = self._trace
        offset_ns = _epoch_ns()
        parents = [trace.SpanContext(one.trace_id, one.span_id, is_remote=True, trace_flags=trace.TraceFlags(one.flags)) for one in batch.requests]
        began_ns, ended_ns = min(one.dispatch_ns for one in batch.requests) + offset_ns, batch.ended_ns + offset_ns
        links, whole = [], None
        if batch.size and any(parent.trace_flags.sampled for parent in parents):
            attributes = {"gpuworker.worker": self._worker, "gpuworker.batch.size": batch.size, "gpuworker.batch.reason": batch.reason}
            no_parent = trace.set_span_in_context(trace.INVALID_SPAN)
            whole = self._tracer.start_span(
                "gpuworker.batch", no_parent, attributes=attributes, links=[trace.Link(p) for p in parents], start_time=began_ns
            )
            links = [trace.Link(whole.get_span_context())]
        for one, parent in zip(batch.requests, parents, strict=True):
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
            attributes = {"gpuworker.worker": self._worker, "gpuworker.request": request_id(one.ticket)}
            left_ns = one.dispatch_ns + offset_ns
            waiting = self._tracer.start_span("gpuworker.queue", context, attributes=attributes, start_time=one.enqueue_ns + offset_ns)
            waiting.end(left_ns)
            self._tracer.start_span("gpuworker.run", context, attributes=attributes, links=links, start_time=left_ns).end(ended_ns)
        if whole is not None:
            whole.end(ended_ns)


def _epoch_ns() -> int:
    """What CLOCK_MONOTONIC is behind the time of day. The closest of three looks at both: this thread may lose the processor in between."""
    looks = []
    for _ in range(3):
        before_ns, now_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        looks.append((after_ns - before_ns, now_ns - (before_ns + after_ns) // 2))
    return min(looks)[1]
