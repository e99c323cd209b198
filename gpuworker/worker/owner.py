"""The owner: collects requests from the ring, asks the policy, runs batches, publishes answers.

One thread does all of that; only `stop` may be called from elsewhere. What must not wait for a running batch (deadlines, the dead, heartbeat) is the
keeper's (worker/keeper.py).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from gpuworker._native import ffi, lib
from gpuworker.scheduling import Run, SizeOrTimeout
from gpuworker.segment import Segment, State
from gpuworker.segment.wire import SLOT_BITS, SLOT_MASK
from gpuworker.worker import batch
from gpuworker.worker.exchange import Exchange
from gpuworker.worker.handler import Handler
from gpuworker.worker.line import Line, PlainLine
from gpuworker.worker.options import WorkerOptions
from gpuworker.worker.scheduled_line import ScheduledLine

log = logging.getLogger("gpuworker")

TICK_NS = 100_000_000  # longest sleep: bounds what a wake-up lost to a killed frontend can cost


class Owner:
    """Serves one segment that this process owns."""

    def __init__(self, segment: Segment, handler: Handler, options: WorkerOptions) -> None:
        self.segment, self.handler, self.options = segment, handler, options
        self._port = segment.port
        self._exchange = Exchange(segment, options)
        self.line: Line
        if options.is_plain:
            self.line = PlainLine(segment, SizeOrTimeout(options.max_batch_size, options.max_wait_ms or 0.0), options.fair_share)
        else:
            self.line = ScheduledLine(segment, options, self._exchange)
        self._taken = ffi.new("uint64_t[]", 2 * segment.capacity)
        self._stop_ns: int | None = None
        self.is_handing_over = False

    def stop(self, drain: bool = True) -> None:
        """Takes nothing new from now on. With `drain` what is there is finished within drain_timeout_s, else refused at once. From any thread."""
        until_ns = time.monotonic_ns() + (int(self.options.drain_timeout_s * 1e9) if drain else 0)
        self._stop_ns = until_ns if self._stop_ns is None else min(self._stop_ns, until_ns)
        lib.gw_set_state(self._port, State.DRAINING)
        lib.gw_bell(self._port)

    def hand_over(self) -> None:
        """Finishes the running batch, and leaves what is queued to the next owner. From any thread."""
        self.is_handing_over, self._stop_ns = True, time.monotonic_ns()
        lib.gw_bell(self._port)

    @property
    def stop_ns(self) -> int | None:
        """When draining has to be over; None while serving."""
        return None if self.is_handing_over else self._stop_ns

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serves until `stop`, then drains."""
        if self._stop_ns is None:
            lib.gw_set_state(self._port, State.SERVING)
        on_ready()
        collect, decide, clock_ns = self.line.collect, self.line.decide, time.monotonic_ns
        wait_until_ns = 0
        while True:
            count = collect(wait_until_ns)
            now_ns = clock_ns()
            if self._stop_ns is not None:
                if not count or self.is_handing_over:
                    return
                if now_ns >= self._stop_ns:
                    lib.gw_refuse_all(self._port, lib.GW_KIND_DRAINING)
                    return
            decision = decide(now_ns, self._stop_ns is None)
            if isinstance(decision, Run):
                self._dispatch(decision, now_ns)
                wait_until_ns = 0
            else:
                wait_until_ns = now_ns + TICK_NS
                if decision.until_ns is not None and decision.until_ns < wait_until_ns:
                    wait_until_ns = decision.until_ns

    def _dispatch(self, run: Run, now_ns: int) -> None:
        """Takes a batch from the line, runs it and answers."""
        n = self.line.take(run, self._taken)
        if not n:
            return
        tickets, requests = self._exchange.read(ffi.unpack(self._taken, 2 * n))
        self._failed = len(requests) != n
        outcomes: list[Any] = []
        try:
            if requests:
                outcomes = batch.run(self.handler.run_batch, requests, self.options.isolate_errors, self._log_failure)
        except BaseException as error:  # SystemExit and the like: it ends the owner, but first its callers are told
            outcomes = [error] * len(requests)
            raise
        finally:
            if lib.gw_is_forked(self._port):  # the handler forked, and returned in its child too
                os._exit(os.EX_SOFTWARE)
            self._exchange.respond(tickets, outcomes)
            lib.gw_finish(self._port, self._taken, n)
            self._exchange.clean_up()
        if self.line.learns and not self._failed:  # what a batch takes that is run again in halves says nothing about others
            self.line.done(run, now_ns, time.monotonic_ns())

    def _log_failure(self, error: BaseException, count: int) -> None:
        self._failed = True
        ids = ", ".join(f"{ticket & SLOT_MASK}.{ticket >> SLOT_BITS}" for ticket in ffi.unpack(self._taken, 2 * count)[::2])
        log.error("%s failed on a batch of %d (slot.generation: %s)", self.handler.name, count, ids, exc_info=error)
