"""The line of a worker that has a latency budget, length buckets or priorities."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Sequence
from typing import Any

from gpuworker._native import ffi, lib
from gpuworker.errors import RequestTooLong
from gpuworker.payload import encode_error
from gpuworker.scheduling import Decision, JointBudget, Queued, Run, Wait
from gpuworker.scheduling.cost_model import CostModel
from gpuworker.scheduling.learning import BoundaryLearner
from gpuworker.scheduling.outlook import batch_cost, lane_views
from gpuworker.scheduling.rounding import size_to_run
from gpuworker.segment import Segment
from gpuworker.segment.wire import ADMISSION, LATE
from gpuworker.worker.backlog import queued
from gpuworker.worker.exchange import Exchange
from gpuworker.worker.handler import Handler
from gpuworker.worker.options import WorkerOptions
from gpuworker.worker.warm_start import WarmStart

log = logging.getLogger("gpuworker")

LEARN_TICKS = 50
"""Between two looks at the length histogram: 5 s."""
LEAST_SLACK_NS, MOST_SLACK_NS = 200_000, 2_000_000
"""Where requests wait until the last instant, it is moved forward by 1 % of the budget, within these: the owner never wakes up just in time."""
_MAX_REFUSAL: int = lib.GW_MAX_REFUSAL


class ScheduledLine:
    """Keeps a JointBudget scheduler and the ring in step, and tells frontends what they need for their forecasts. See Line."""

    learns = True

    def __init__(self, segment: Segment, options: WorkerOptions, exchange: Exchange) -> None:
        self._port, self._options, self._exchange = segment.port, options, exchange
        if lib.gw_open_backlog(segment.port):
            raise MemoryError("no memory for the owner's queue")
        self._arrived, self._gone, self._departures = ffi.new("gw_item **"), ffi.new("uint64_t **"), ffi.new("int *")
        self._costs = CostModel(options.max_batch_size, allowed_batch_sizes=options.sizes, miss_rate=options.target_miss_rate)
        learns = options.length_buckets == "learn"
        self._learner = BoundaryLearner(options.max_length_buckets, max_length=options.longest or None) if learns else None
        self._scheduler = JointBudget(
            self._costs,
            max_batch_size=options.max_batch_size,
            budget_ns=_ns(options.latency_budget_ms),
            max_wait_ns=_ns(options.max_wait_ms),
            late=options.late,
            wait=options.wait,
            length_buckets=options.boundaries,
            uses_lengths=options.uses_lengths,
            max_batch_tokens=options.max_batch_tokens,
            fair_share=options.fair_share,
            priority_ageing_ns=_ns(options.priority_ageing_ms) or 0,
            slack_ns=min(max((_ns(options.latency_budget_ms) or 0) // 100, LEAST_SLACK_NS), MOST_SLACK_NS),
        )
        self._uses_lengths, self._longest, self._sizes = (
            options.uses_lengths,
            options.longest,
            options.sizes,
        )  # properties, and asked for every request
        self._proposed: tuple[int, ...] | None = None
        self._published: object = None
        self._forecasts = False
        self._ticks = 0
        self._made_s = time.monotonic()
        self._handler: Handler | None = None
        self._warm_start: WarmStart | None = None

    def prepare(self, handler: Handler) -> None:
        """Seeds the cost model: from the last time, else by a profile of the handler's warm-up examples."""
        self._handler = handler
        self._warm_start = WarmStart(handler, self._options, self._costs, time.monotonic() - self._made_s)
        boundaries = self._warm_start.seed(self._scheduler.boundaries)
        if self._learner is not None and boundaries:
            self._scheduler.set_boundaries(boundaries)

    def announce(self) -> None:
        """See Line.announce."""
        options = self._options
        admission = ADMISSION[options.admission if options.latency_budget_ms is not None and options.late == "reject" else "off"]
        lib.gw_set_scheduling(self._port, admission, _ns(options.latency_budget_ms) or 0, options.longest, int(options.priorities), 0, 1)
        self._forecasts = admission != lib.GW_ADMIT_ALL
        self._published = None

    def collect(self, until_ns: int) -> int:
        """See Line.collect."""
        lib.gw_collect(self._port, until_ns)
        arrivals = lib.gw_news(self._port, self._arrived, self._gone, self._departures)
        if arrivals:
            for item in ffi.unpack(self._arrived[0], arrivals):
                request = self._checked(queued(item))
                if request is not None:
                    self._scheduler.add(request)
        if self._departures[0]:
            for ticket in ffi.unpack(self._gone[0], self._departures[0]):
                self._scheduler.discard(ticket)
        return len(self._scheduler)

    def _checked(self, request: Queued) -> Queued | None:
        """With its length, and no priority where there are none. None if it cannot be run: then its caller is told why."""
        if request.priority and not self._options.priorities:
            request = request._replace(priority=0)
        if not self._uses_lengths:
            return request._replace(length=0) if request.length else request
        try:
            if not request.length:
                request = request._replace(length=self._length(request.ticket))
            if self._longest and request.length > self._longest:
                raise RequestTooLong(request.length, self._longest)
        except BaseException as error:  # of the user's own code; while it looked, the request may have been withdrawn and its slot filled anew
            blob = encode_error(error, _MAX_REFUSAL)
            lib.gw_refuse_with(self._port, request.ticket, lib.GW_KIND_ERROR, blob, len(blob) if len(blob) <= _MAX_REFUSAL else 0)
            return None
        if self._learner is not None:
            self._learner.observe(request.length)
        return request

    def _length(self, ticket: int) -> int:
        if self._handler is None or self._handler.length is None:
            raise ValueError(
                "this worker batches by length: give its handler a length(request), or the client one: gpuworker.connect(name, length=callable)"
            )
        before = lib.gw_begin_look(self._port, ticket)
        if before < 0:
            return 1  # it was withdrawn
        try:
            found = self._handler.length(self._exchange.peek(ticket))
            length = max(operator.index(found), 1)
        except TypeError as error:
            raise TypeError(f"length(request) of this worker's handler failed, or gave no integer: {error}") from error
        finally:
            lib.gw_end_look(self._port, ticket, before)
        if length > lib.GW_MAX_LENGTH:
            raise RequestTooLong(length, lib.GW_MAX_LENGTH)
        return length

    def decide(self, now_ns: int, may_wait: bool) -> Decision:
        """See Line.decide."""
        if self._proposed is not None:
            log.info("length buckets are now %s", ", ".join(map(str, self._proposed)))
            self._scheduler.set_boundaries(self._proposed)
            self._proposed = None
        if self._warm_start is not None:
            self._warm_start.on_decide(self._scheduler.boundaries)
        decision = self._scheduler.decide(now_ns, may_wait)
        for request in decision.rejected:
            self._reject(request, now_ns)
        if self._forecasts and isinstance(decision, Wait):
            self._publish(now_ns)
        return decision

    def _reject(self, request: Queued, now_ns: int) -> None:
        due_ns = self._scheduler.due_ns(request)
        if request.deadline_ns and due_ns == request.deadline_ns:
            lib.gw_refuse(self._port, request.ticket, lib.GW_KIND_EXPIRED)
            return
        estimated_ns = max(now_ns - request.enqueue_ns, 0) + self._scheduler.bucket_of(request.length).run_ns[1]
        budget_ns = due_ns - request.enqueue_ns
        numbers = LATE.pack(max(estimated_ns, budget_ns), budget_ns, len(self._scheduler))
        lib.gw_refuse_with(self._port, request.ticket, lib.GW_KIND_LATE, numbers, len(numbers))

    def fitted(self, run: Run, most: int) -> Run:
        """See Line.fitted."""
        batch, size = run.batch or (), min(run.size, most)
        if not self._sizes and size == run.size:
            return run
        table = self._scheduler.bucket_of(run.length).table(run.length)
        if self._sizes:
            size = size_to_run(size, self._sizes, table)
        if size == run.size:
            return run
        self._scheduler.put_back(batch[size:])
        return run._replace(size=size, batch=batch[:size], predicted_ns=table[size] if run.predicted_ns else 0)

    def take(self, run: Run, taken: Any) -> Run:
        """See Line.take."""
        batch: Sequence[Queued] = run.batch or ()
        tickets = ffi.new("uint64_t[]", [request.ticket for request in batch])
        n: int = lib.gw_take_these(self._port, tickets, len(batch), run.reason, taken)
        if n != len(batch):
            chosen = set(ffi.unpack(taken, 2 * n)[::2])
            for request in batch:
                lib.gw_put_back(self._port, request.ticket)
            batch = [request for request in batch if request.ticket in chosen]
        if n:
            lengths = [request.length for request in batch]
            lib.gw_note_batch(self._port, run.predicted_ns, sum(lengths), n * (run.length or max(lengths)))
        if self._forecasts:
            self._publish(time.monotonic_ns())
        return run._replace(size=n, batch=batch)

    def done(self, run: Run, began_ns: int, ended_ns: int) -> None:
        """See Line.done."""
        self._scheduler.observe(run.batch or (), began_ns, ended_ns)

    def _publish(self, now_ns: int) -> None:
        port, lanes = self._port, lane_views(self._scheduler.buckets, now_ns)
        state = (self._costs.version, self._scheduler.boundaries)
        if state != self._published:
            self._published = state
            for i, lane in enumerate(lanes):
                lib.gw_publish_lane(port, i, lane.length, lane.cap, lane.run_one_ns, lane.run_full_ns)
            lib.gw_publish_lanes(port, len(lanes))
        for i, lane in enumerate(lanes):
            lib.gw_publish_queue(port, i, lane.queued, lane.gap_ns, lib.gw_arrived(port, i), max(lane.ran_ns, 0))

    def tick(self) -> None:
        """Learns boundaries, and keeps what was learned for the next start."""
        self._ticks += 1
        if self._learner is not None and self._ticks % LEARN_TICKS == 0 and self._proposed is None:
            cost = batch_cost(self._scheduler.buckets, self._scheduler.budget_ns, self._options.max_batch_size, time.monotonic_ns())
            self._proposed = self._learner.propose(self._scheduler.boundaries, cost)
        if self._warm_start is not None:
            self._warm_start.on_tick()

    def close(self) -> None:
        """See Line.close."""
        if self._warm_start is not None:
            self._warm_start.close(self._scheduler.boundaries)


def _ns(ms: float | None) -> int | None:
    return None if ms is None else round(ms * 1e6)
