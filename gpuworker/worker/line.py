"""The owner's queue with the policy that decides about it. Two kinds: `PlainLine` for batches by size and age, `ScheduledLine` for everything else."""

from __future__ import annotations

from typing import Any, Protocol

from gpuworker._native import lib
from gpuworker.scheduling import Decision, Reason, Run, SizeOrTimeout, Wait
from gpuworker.scheduling.cost_model import CostModel
from gpuworker.scheduling.rounding import size_to_run
from gpuworker.segment import Segment
from gpuworker.worker.backlog import Backlog
from gpuworker.worker.handler import Handler
from gpuworker.worker.options import WorkerOptions

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

    def fitted(self, run: Run, most: int) -> Run:
        """As much of a batch that `decide` has returned as is to run at once: `most` requests, and fewer where padding them to an allowed size is not worth
        it. The rest stays queued."""
        ...

    def take(self, run: Run, taken: Any) -> Run:
        """Begins the batch; fills `taken` as gw_take does. -> what has begun, which is less than planned where requests were withdrawn meanwhile, and nothing
        where a batch is on its way that nothing may run beside."""
        ...

    def done(self, run: Run, began_ns: int, ended_ns: int) -> None:
        """A batch that `take` returned has run without an error and its answers are published; it has had the device since began_ns."""
        ...

    def tick(self) -> None:
        """Several times a second, from the keeper's thread."""
        ...

    def close(self) -> None:
        """Nothing more is served."""
        ...


class PlainLine:
    """Requests in the order of their enqueue times, in C memory; batches of them by size and age. See Line."""

    def __init__(self, segment: Segment, options: WorkerOptions) -> None:
        self._port, self._fair_share = segment.port, options.fair_share
        self._max_batch_size, self._max_wait_ms = options.max_batch_size, options.max_wait_ms or 0.0
        self._most = self._limit = options.max_batch_size
        self._sizes = options.sizes
        self._split: Reason | None = None
        self._costs = CostModel(options.max_batch_size, allowed_batch_sizes=self._sizes)
        self.learns = bool(self._sizes)
        self._backlog = Backlog(segment.port)
        self._decide = SizeOrTimeout(self._most, self._max_wait_ms).decide

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
        if self._split is not None:  # the rest of a batch has waited long enough; whoever came since goes with it
            reason, self._split = self._split, None
            if self._backlog.length:
                return Run(min(self._backlog.length, self._most), reason)
        decision = self._decide(self._backlog, now_ns)
        if may_wait or decision.__class__ is Run:
            return decision
        return Run(self._backlog.length, Reason.DRAIN) if self._backlog.length else Wait(None)

    def fitted(self, run: Run, most: int) -> Run:
        """See Line.fitted."""
        if most != self._limit:
            self._limit, self._most = most, min(most, self._max_batch_size)
            self._decide = SizeOrTimeout(self._most, self._max_wait_ms).decide
        size = min(run.size, most)
        if self._sizes:
            size = size_to_run(size, self._sizes, self._costs.table(0))
        if size == run.size:
            return run
        self._split = run.reason
        return run._replace(size=size)

    def take(self, run: Run, taken: Any) -> Run:
        """See Line.take."""
        count: int = _take(self._port, run.size, run.reason, taken)
        return run if count == run.size else run._replace(size=count)

    def done(self, run: Run, began_ns: int, ended_ns: int) -> None:
        """See Line.done."""
        self._costs.observe(run.size, 0, ended_ns - began_ns)

    def tick(self) -> None:
        """See Line.tick."""

    def close(self) -> None:
        """See Line.close."""
