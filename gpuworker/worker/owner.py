"""The owner: collects requests from the ring, asks the policy, runs batches, publishes answers.

One thread does all of that; only `stop` may be called from elsewhere. What must not wait for a running batch (deadlines, the dead, heartbeat) is the
keeper's (worker/keeper.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from gpuworker._native import ffi, lib
from gpuworker.errors import GpuWorkerError, PayloadTooLarge, SegmentError
from gpuworker.payload import decode, encode, encode_error
from gpuworker.payload.codec import Parts
from gpuworker.scheduling import Policy, Reason, Run, Wait
from gpuworker.segment import Segment, State, spill
from gpuworker.segment.wire import KIND_SHIFT, META_MASK, META_SHIFT, SLOT_BITS, SLOT_MASK, TOTAL_MASK, data_start, describe
from gpuworker.worker import batch
from gpuworker.worker.backlog import Backlog
from gpuworker.worker.handler import Handler
from gpuworker.worker.options import WorkerOptions

log = logging.getLogger("gpuworker")

TICK_NS = 100_000_000  # longest sleep: bounds what a wake-up lost to a killed frontend can cost
_BYTES, _SPILLED, _ERROR = lib.GW_KIND_BYTES, lib.GW_KIND_SPILLED, lib.GW_KIND_ERROR
_BYTES_END = (_BYTES + 1) << KIND_SHIFT
_MALFORMED = (1 << 64) - 1


class Owner:
    """Serves one segment that this process owns."""

    def __init__(
        self, segment: Segment, handler: Handler, options: WorkerOptions, policy: Policy, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.segment, self.handler, self.options, self.policy = segment, handler, options, policy
        self._clock_ns = clock_ns
        self._port = segment.port
        self._backlog = Backlog(segment.port)
        self._requests = [view.toreadonly() for view in segment.requests]  # run_batch may see a request twice: it must find it as it was
        self._request_bytes = segment.request_buffers
        self._taken = ffi.new("uint64_t[]", 2 * segment.capacity)
        self._stop_ns: int | None = None

    def stop(self, drain: bool = True) -> None:
        """Takes nothing new from now on. With `drain` what is there is finished within drain_timeout_s, else refused at once. From any thread."""
        until_ns = self._clock_ns() + (int(self.options.drain_timeout_s * 1e9) if drain else 0)
        self._stop_ns = until_ns if self._stop_ns is None else min(self._stop_ns, until_ns)
        lib.gw_set_state(self._port, State.DRAINING)
        lib.gw_bell(self._port)

    @property
    def stop_ns(self) -> int | None:
        """When draining has to be over; None while serving."""
        return self._stop_ns

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serves until `stop`, then drains."""
        if self._stop_ns is None:
            lib.gw_set_state(self._port, State.SERVING)
        if on_ready is not None:
            on_ready()
        port, backlog, decide, collect, clock_ns = self._port, self._backlog, self.policy.decide, lib.gw_collect, self._clock_ns
        wait_until_ns = 0
        while True:
            backlog.length = count = max(collect(port, wait_until_ns), 0)
            now_ns = clock_ns()
            if self._stop_ns is not None:
                if not count:
                    return
                if now_ns >= self._stop_ns:
                    for queued in backlog:
                        lib.gw_refuse(port, queued.ticket, lib.GW_KIND_DRAINING)
                    return
            decision = decide(backlog, now_ns)
            if self._stop_ns is not None and isinstance(decision, Wait):
                decision = Run(count, Reason.DRAIN)
            if decision.__class__ is Run:
                self._dispatch(*decision)
                wait_until_ns = 0
            else:
                wait_until_ns = now_ns + TICK_NS
                if decision.until_ns is not None and decision.until_ns < wait_until_ns:
                    wait_until_ns = decision.until_ns

    def _dispatch(self, count: int, reason: Reason) -> None:
        """Takes up to `count` from the front of the backlog, runs them and answers."""
        port, taken, respond = self._port, self._taken, lib.gw_respond
        n = lib.gw_take(port, count, taken)
        if not n:
            return
        pairs = ffi.unpack(taken, 2 * n)
        tickets = pairs[::2]
        requests: list[Any] = []
        spilled: list[int] = []
        unreadable: list[tuple[int, Exception]] = []  # its sender's error, and no reason for the others to fail
        for ticket, request in zip(tickets, pairs[1::2]):  # noqa: B905 (strict= costs 0.1 us a batch)
            if request < _BYTES_END:  # kind 0, the commonest: short-cut
                requests.append(self._request_bytes[ticket & SLOT_MASK][: request & TOTAL_MASK])
                continue
            try:
                requests.append(self._decode(ticket, request, spilled))
            except Exception as error:
                unreadable.append((ticket, error))
        if unreadable:
            bad = {ticket for ticket, _ in unreadable}
            tickets = [ticket for ticket in tickets if ticket not in bad] + [ticket for ticket, _ in unreadable]
        outcomes: list[Any] = []
        try:
            if requests:
                outcomes = batch.run(self.handler.run_batch, requests, self.options.isolate_errors, self._log_failure)
        except BaseException as error:  # SystemExit and the like: it ends the owner, but first its callers are told
            outcomes = [error] * len(requests)
            raise
        finally:
            outcomes += [error for _, error in unreadable]
            for ticket, outcome in zip(tickets, outcomes, strict=True):
                if outcome.__class__ is not bytes or respond(port, ticket, _BYTES, b"", 0, outcome, len(outcome)):
                    self._respond(ticket, outcome)
            lib.gw_finish(port, taken, n, reason)
            for ticket in spilled:
                self._clean_up(ticket)

    def _clean_up(self, ticket: int) -> None:
        spill.remove(self.segment, ticket, spill.REQUEST)
        if lib.gw_phase(self._port, ticket) <= lib.GW_FREE:  # nobody is left to read the response
            spill.remove(self.segment, ticket, spill.RESPONSE)

    def _decode(self, ticket: int, request: int, spilled: list[int]) -> Any:
        if request == _MALFORMED:
            raise SegmentError("malformed payload: it claims to be larger than its slot")
        kind, total = request >> KIND_SHIFT, request & TOTAL_MASK
        area = self._requests[ticket & SLOT_MASK]
        if kind & _SPILLED:
            kind &= ~_SPILLED
            spilled.append(ticket)
            area = spill.open_(self.segment, ticket, spill.REQUEST, total)
        if kind >= _ERROR:
            raise SegmentError(f"malformed payload: kind {kind}")
        return decode(kind, request >> META_SHIFT & META_MASK, total, area, False, self.options.allow_pickle)

    def _respond(self, ticket: int, outcome: Any) -> None:
        """Writes an outcome to the response area, or to a spill file; one that cannot cross becomes the error that says so."""
        try:
            if not isinstance(outcome, BaseException):
                kind, meta, data, data_bytes = encode(outcome, self.options.allow_pickle)
                if data.__class__ is not Parts and not lib.gw_respond(self._port, ticket, kind, meta, len(meta), data, data_bytes):
                    return
                self._respond_in_pieces(ticket, kind, meta, data, data_bytes)
                return
        except GpuWorkerError as error:
            outcome = error
        except Exception as error:
            log.exception("a result of %s could not be encoded", self.handler.name)
            outcome = error
        blob = encode_error(outcome)
        if lib.gw_respond(self._port, ticket, _ERROR, b"", 0, blob, len(blob)):
            blob = encode_error(type(outcome)("") if type(outcome).__module__ == "builtins" else SegmentError("an error that does not fit the response area"))
            if lib.gw_respond(self._port, ticket, _ERROR, b"", 0, blob, len(blob)):
                lib.gw_respond(self._port, ticket, _ERROR, b"", 0, b"", 0)

    def _respond_in_pieces(self, ticket: int, kind: int, meta: bytes, data: Any, data_bytes: int) -> None:
        start = data_start(len(meta))
        total = start + data_bytes
        if total > self.segment.response_bytes:
            if total > self.options.max_payload_bytes:
                raise PayloadTooLarge(total, self.options.max_payload_bytes, "response")
            area, kind = spill.create(self.segment, ticket, spill.RESPONSE, total), kind | _SPILLED
        else:
            area = self.segment.responses[ticket & SLOT_MASK]
        area[: len(meta)] = meta
        if isinstance(data, Parts):
            data.write(area[start:total])
        else:
            area[start:total] = data if isinstance(data, bytes) else ffi.buffer(data)
        lib.gw_responded(self._port, ticket, describe(kind, len(meta), total))

    def _log_failure(self, error: Exception, count: int) -> None:
        ids = ", ".join(f"{ticket & SLOT_MASK}.{ticket >> SLOT_BITS}" for ticket in ffi.unpack(self._taken, 2 * count)[::2])
        log.error("%s failed on a batch of %d (slot.generation: %s)", self.handler.name, count, ids, exc_info=error)
