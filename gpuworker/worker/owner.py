"""The owner: collects requests from the ring, asks the policy, has batches run, publishes answers.

One thread does all of that; only `stop` may be called from elsewhere. What must not wait for a running batch (deadlines, the dead, heartbeat) is the
keeper's (worker/keeper.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gpuworker._native import ffi, lib
from gpuworker.scheduling import Run
from gpuworker.scheduling.pace import Pace
from gpuworker.segment import Segment, State
from gpuworker.worker.exchange import Exchange
from gpuworker.worker.handler import Handler
from gpuworker.worker.line import Line, PlainLine
from gpuworker.worker.options import WorkerOptions
from gpuworker.worker.runner import Flight, ListRunner, Loop, Runner
from gpuworker.worker.scheduled_line import ScheduledLine
from gpuworker.worker.tracer import Traced, Tracer

TICK_NS = 100_000_000  # longest sleep: bounds what a wake-up lost to a killed frontend can cost


class Owner:
    """Serves one segment that this process owns."""

    def __init__(self, segment: Segment, handler: Handler, options: WorkerOptions) -> None:
        self.segment, self.handler, self.options = segment, handler, options
        self._port = segment.port
        self._exchange = Exchange(segment, options)
        self.line: Line
        if options.is_plain or handler.is_generating:
            self.line = PlainLine(segment, options)
        else:
            self.line = ScheduledLine(segment, options, self._exchange)
        self._loop: Loop | None = None
        self._runner: Runner = ListRunner(segment, handler, self._exchange, options.isolate_errors)
        self._taken: list[Any] = []  # a buffer per batch that may be on its way
        self._dispatched = 0
        self._flights: deque[tuple[Flight, Run, Sequence[Traced]]] = deque()
        self.tracer: Tracer | None = None
        self._pace = Pace()
        self._stop_ns: int | None = None
        self.is_handing_over = False

    def prepare(self) -> None:
        """The handler has loaded, and with it whatever exports spans."""
        self.tracer = Tracer.of(self.segment, self.options)
        if self.handler.make_loop is not None:
            self._loop = self.handler.make_loop(self.segment, self._exchange)
        if self.handler.make_runner is not None:
            self._runner = self.handler.make_runner(self.segment, self._exchange, self.options.isolate_errors)
        self._taken = [ffi.new("uint64_t[]", 2 * self.segment.capacity) for _ in range(self._runner.depth)]
        self.line.prepare(self.handler)

    def stop(self, drain: bool = True) -> None:
        """Takes nothing new from now on. With `drain` what is there is finished within drain_timeout_s, else refused at once. From any thread."""
        until_ns = time.monotonic_ns() + (int(self.options.drain_timeout_s * 1e9) if drain else 0)
        self._stop_ns = until_ns if self._stop_ns is None else min(self._stop_ns, until_ns)
        lib.gw_set_state(self._port, State.DRAINING)
        lib.gw_nudge(self._port)

    def hand_over(self) -> None:
        """Finishes what runs, and leaves what is queued to the next owner. From any thread."""
        self.is_handing_over, self._stop_ns = True, time.monotonic_ns()
        lib.gw_nudge(self._port)

    @property
    def stop_ns(self) -> int | None:
        """When draining has to be over; None while serving."""
        return None if self.is_handing_over else self._stop_ns

    @property
    def is_paused(self) -> bool:
        """Nothing is to begin until somebody resumes; draining is not held up."""
        return self._stop_ns is None and bool(lib.gw_is_paused(self._port))

    def collect(self, until_ns: int) -> int:
        """See Turn.collect."""
        return self.line.collect(until_ns)

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serves until `stop`, then drains."""
        if self._stop_ns is None:
            lib.gw_set_state(self._port, State.SERVING)
        on_ready()
        if self._loop is not None:
            self._loop.run(self)
            return
        collect, decide, clock_ns, is_paused = self.line.collect, self.line.decide, time.monotonic_ns, lib.gw_is_paused
        runner, flights, depth = self._runner, self._flights, self._runner.depth
        wait_until_ns = 0
        while True:
            count = collect(wait_until_ns)
            wait_until_ns = 0
            if flights and (len(flights) == depth or flights[0][0].is_done()):
                self._land()
                continue
            now_ns = clock_ns()
            if self._stop_ns is not None:
                is_late = now_ns >= self._stop_ns
                if self.is_handing_over or is_late or not count:
                    while flights:
                        self._land()
                    if is_late and not self.is_handing_over:
                        lib.gw_refuse_all(self._port, lib.GW_KIND_DRAINING)
                    return
            elif is_paused(self._port):
                if flights:  # what has begun is answered
                    self._land()
                else:
                    wait_until_ns = now_ns + TICK_NS
                continue
            decide_ns = now_ns
            if flights and count:  # the policy is asked about the time when the device is free, not before it has to be, unless the batch is full
                opens_ns = self._pace.opens_ns()
                if now_ns < opens_ns and count < min(self.options.max_batch_size, runner.size_limit):
                    wait_until_ns = min(opens_ns, now_ns + TICK_NS)
                    continue
                decide_ns = max(now_ns, self._pace.free_ns())
            decision = decide(decide_ns, self._stop_ns is None)
            if isinstance(decision, Run):
                self._dispatch(decision, now_ns)
            elif flights or count or not runner.idle():
                wait_until_ns = now_ns + TICK_NS
                if decision.until_ns is not None and decision.until_ns < wait_until_ns:
                    wait_until_ns = decision.until_ns

    def _dispatch(self, run: Run, now_ns: int) -> None:
        """Takes a batch from the line, and has it run. Where the device is asynchronous that goes on by itself."""
        taken = self._taken[self._dispatched % self._runner.depth]
        run = self.line.take(self.line.fitted(run, self._runner.size_limit), taken)
        if not run.size:
            if self._flights:  # nothing may run beside what is on its way
                self._land()
            return
        self._dispatched += 1
        traced: Sequence[Traced] = () if self.tracer is None else self.tracer.look(taken, run.size)
        flight = self._runner.begin(run, taken)
        if self._runner.depth == 1:
            flight.finish()
            if traced:
                self._trace(traced, run)
            self._learn(flight, run, now_ns, time.monotonic_ns())
        else:
            self._flights.append((flight, run, traced))
            self._pace.began(flight.key, now_ns, time.monotonic_ns())

    def _land(self) -> None:
        """Answers the oldest batch on its way."""
        flight, run, traced = self._flights[0]
        flight.finish()
        self._flights.popleft()
        if traced:
            self._trace(traced, run)
        ended_ns, since_ns = time.monotonic_ns(), self._pace.since_ns
        self._pace.ended(ended_ns, not flight.failed)
        self._learn(flight, run, since_ns, ended_ns)

    def _trace(self, traced: Sequence[Traced], run: Run) -> None:
        assert self.tracer is not None
        self.tracer.done(traced, run.size, run.reason.name.lower())

    def _learn(self, flight: Flight, run: Run, since_ns: int, ended_ns: int) -> None:
        if self.line.learns and not flight.failed:  # what a batch takes that is run again in halves says nothing about others
            self.line.done(run, since_ns, ended_ns)

    def close(self) -> None:
        """After `run`, however that ended."""
        self._runner.close()
        self.line.close()
        if self.tracer is not None:
            self.tracer.close()
