"""The runner of TensorHandlers: from slots to padded batches and back, in one native call each way."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from gpuworker._native import ffi, lib
from gpuworker.execution.engine import Engine
from gpuworker.execution.executor import Array
from gpuworker.execution.failures import Failure, kind_of
from gpuworker.execution.grid import Shape
from gpuworker.execution.program import WrongOutput
from gpuworker.execution.tally import Tally
from gpuworker.scheduling import Run
from gpuworker.segment import Segment
from gpuworker.worker import batch
from gpuworker.worker.exchange import Exchange, bare
from gpuworker.worker.runner import DeviceLost, Flight, log_failure

log = logging.getLogger("gpuworker")

BATCHES_UNTIL_RAISED = 256
"""Batches that have to run well after memory was too small for one, before larger ones are tried again."""


class TensorRunner:
    """See Runner. Lanes are used in turn, so that batches end in the order in which they began."""

    def __init__(self, engine: Engine, segment: Segment, exchange: Exchange, name: str, isolate_errors: bool) -> None:
        self.engine, self.port, self.exchange, self.name, self.isolate_errors = engine, segment.port, exchange, name, isolate_errors
        self.depth = engine.depth
        self.tally = Tally(segment.port)
        self.size_limit = engine.grid.largest
        """Most requests in a batch; lowered when the device's memory turns out to be too small, and raised again, step by step, when it has been enough for long."""
        self._until_raised = 0
        self._patience = BATCHES_UNTIL_RAISED
        self._reader, self.odd = engine.reader(), ffi.new("int[]", engine.grid.largest)
        self._rows = [ffi.new("gw_row[]", engine.grid.largest) for _ in range(self.depth)]
        self._next = 0
        engine.executor.notify(self._nudge)

    def _nudge(self) -> None:
        lib.gw_nudge(self.port)

    def begin(self, run: Run, taken: Any) -> Flight:
        """See Runner.begin."""
        lane = self._next
        self._next = (lane + 1) % self.depth
        flight = TensorFlight(self, lane, taken, run.size, self._rows[lane])
        try:
            with self.engine.marked("gpuworker gather"):
                flight.gather(self._read(flight))
            if flight.n:
                self.engine.executor.launch(lane, flight.key)
                flight.is_launched = True
        except BaseException as error:
            flight.error = error
        return flight

    def _read(self, flight: TensorFlight) -> list[int]:
        """Reads the batch's requests into its rows. -> the largest extents."""
        reader, dims = self._reader, len(self.engine.signature.dims)
        odd = lib.gw_read_rows(self.port, reader, flight.taken, flight.n, flight.rows, self.odd)
        largest = list(reader.largest[0:dims])
        self.tally.cells += reader.cells
        if odd:
            self._read_odd(flight, ffi.unpack(self.odd, odd), largest)
        return largest

    def _read_odd(self, flight: TensorFlight, odd: list[int], largest: list[int]) -> None:
        """Requests in another form than most (in a file of their own, in Fortran order), and those that are none."""
        check, taken = self.engine.signature.check, flight.taken
        left_out = set()
        for i in odd:
            ticket, request = taken[2 * i], taken[2 * i + 1]
            try:
                canonical, extents = check(self.exchange.read_one(ticket, request))
            except Exception as error:
                flight.refused.append((ticket, bare(error)))
                left_out.add(i)
                continue
            flight.kept.append(self.engine.place(flight.rows[i], canonical, extents))
            largest[:] = map(max, largest, extents)
            cells = 1
            for extent in extents:
                cells *= extent
            self.tally.cells += cells
            self.tally.odd_requests += 1
        if left_out:
            flight.leave_out(left_out)

    def lower(self, most: int) -> None:
        """No batch is larger from now on, for twice as long as the last time."""
        self.size_limit = min(self.size_limit, most)
        self._until_raised = self._patience
        self._patience *= 2

    def count_down(self) -> None:
        """A batch has run well."""
        if self.size_limit < self.engine.grid.largest:
            self._until_raised -= 1
            if self._until_raised <= 0:
                self.size_limit, self._until_raised = min(2 * self.size_limit, self.engine.grid.largest), self._patience
                log.info("%s: batches of up to %d are tried again", self.name, self.size_limit)

    def idle(self) -> bool:
        """See Runner.idle."""
        self.tally.publish_when_due(self.engine.executor.usage)
        return self.engine.executor.idle()

    def close(self) -> None:
        """See Runner.close."""
        self.engine.close()


class TensorFlight:
    """One batch on its way. See Flight."""

    def __init__(self, runner: TensorRunner, lane: int, taken: Any, size: int, rows: Any) -> None:
        self._runner, self._lane, self._size = runner, lane, size
        self.taken, self.rows = taken, rows
        self.n = size
        """Requests that run: those that could be read."""
        self.answered = taken
        """Their tickets, as gw_take has them."""
        self.key = Shape(0)
        self.kept: list[Any] = []
        self.refused: list[tuple[int, Exception]] = []
        self.error: BaseException | None = None
        self.failed = self.is_launched = False
        self._began_ns = time.perf_counter_ns()

    def leave_out(self, those: set[int]) -> None:
        """They do not run; the others move up."""
        left = [i for i in range(self._size) if i not in those]
        self.answered = ffi.new("uint64_t[]", 2 * len(left) or 1)
        for k, i in enumerate(left):
            self.answered[2 * k], self.answered[2 * k + 1] = self.taken[2 * i], self.taken[2 * i + 1]
            if k != i:
                self.rows[k] = self.rows[i]
        self.n = len(left)
        self.failed = True  # what so few take says nothing of what so many do

    def gather(self, largest: list[int]) -> None:
        """Fills the lane's inputs."""
        if self.n:
            runner, began_ns = self._runner, time.perf_counter_ns()
            self.key = runner.engine.grid.shape(self.n, largest)
            gathered = runner.engine.gather(self._lane, self.key, self.rows, self.n)
            runner.tally.gathered(self.n, self.key, gathered, time.perf_counter_ns() - began_ns)

    def is_done(self) -> bool:
        """See Flight.is_done."""
        return not self.is_launched or self._runner.engine.executor.is_done(self._lane)

    def finish(self) -> None:
        """See Flight.finish."""
        runner, n = self._runner, self.n
        if self.error is None and n:
            try:
                self._scatter()
            except BaseException as caught:
                self.error = caught
        error, self.error = self.error, None
        if error is not None:
            self.failed = True
            try:
                outcomes = self._after(error)
            except (SystemExit, KeyboardInterrupt) as fatal:
                error, outcomes = fatal, [fatal] * n
            for k in range(n):
                runner.exchange.answer(self.answered[2 * k], outcomes[k])
        for ticket, refusal in self.refused:
            runner.exchange.answer(ticket, refusal)
        runner.tally.publish_when_due(runner.engine.executor.usage)
        lib.gw_finish(runner.port, self.taken, self._size)
        runner.exchange.clean_up()
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            raise error

    def _scatter(self) -> None:
        runner, n = self._runner, self.n
        results, outputs = runner.engine.results(self._lane, self.key)
        waited_ns = time.perf_counter_ns()
        with runner.engine.marked("gpuworker scatter"):
            odd = lib.gw_scatter(runner.port, results.rows, self.rows, self.answered, n, runner.odd)
            for i in ffi.unpack(runner.odd, odd) if odd else ():  # too large for their slots
                runner.exchange.answer(self.answered[2 * i], self._row(outputs, i, i))
        runner.count_down()
        runner.tally.scattered(results.size_bytes, time.perf_counter_ns() - waited_ns, waited_ns - self._began_ns)

    def _row(self, outputs: Mapping[str, Array], k: int, i: int) -> Any:
        """The answer to request i of this flight, which was row k."""
        dims = len(self._runner.engine.signature.dims)
        return self._runner.engine.row(outputs, k, list(self.rows[i].extents[0:dims]))

    def _after(self, error: BaseException) -> list[Any]:
        """Outcomes of a batch that has failed. Raises DeviceLost."""
        everybody = list(range(self.n))
        if isinstance(error, (SystemExit, KeyboardInterrupt)) or not self.key.rows:  # nor was it gathered
            return [error] * self.n
        if self._kind_of(error) is Failure.OUT_OF_MEMORY and self.n > 1:
            error.__traceback__ = None  # its frames hold tensors
            return self._in_halves(everybody, error)
        return self._isolated(everybody, error)

    def _in_halves(self, everybody: list[int], error: BaseException) -> list[Any]:
        """After memory was too small: halves, and their halves, until they fit. If none is too large even alone, it is batches of this size that are too large."""
        runner, most = self._runner, (self.n + 1) // 2
        outcomes = batch.isolate(self._again, everybody, error)
        kinds = [self._kind_of(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
        runner.tally.out_of_memory += 1
        if Failure.OUT_OF_MEMORY in kinds:
            log.warning("%s: out of memory with a batch of %d: %d requests have failed with it", runner.name, self.n, len(kinds))
        else:
            runner.lower(most)
            log.warning(
                "%s: out of memory with a batch of %d: it was run in parts, and none is larger than %d for a while", runner.name, self.n, most
            )
        return outcomes

    def _isolated(self, some: list[int], error: BaseException) -> list[Any]:
        """Outcomes of requests that have failed together."""
        runner, kind = self._runner, self._kind_of(error)
        log_failure(runner.name, error, [self.answered[2 * i] for i in some])
        if not runner.isolate_errors or isinstance(error, WrongOutput) or kind is Failure.OUT_OF_MEMORY:
            return [error] * len(some)
        outcomes = batch.isolate(self._again, some, error)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and outcome is not error:
                self._kind_of(outcome)
        return outcomes

    def _kind_of(self, error: BaseException) -> Failure:
        """Raises DeviceLost where it means that."""
        kind = kind_of(error, self._synchronize)
        if kind is Failure.DEVICE_LOST:
            log.critical("%s: the device is lost, and the owner ends: %s", self._runner.name, error)
            raise DeviceLost(str(error)) from error
        return kind

    def _again(self, some: list[int]) -> list[Any]:
        """Runs some of the requests anew, as a batch of their own. -> their answers."""
        engine = self._runner.engine
        rows = ffi.new("gw_row[]", len(some))
        for k, i in enumerate(some):
            rows[k] = self.rows[i]
        shape = Shape(engine.grid.shape(len(some), self.key.extents).rows, self.key.extents)
        engine.gather(self._lane, shape, rows, len(some))
        engine.executor.launch(self._lane, shape)
        outputs = engine.executor.wait(self._lane)
        return [self._row(outputs, k, i) for k, i in enumerate(some)]

    def _synchronize(self) -> None:
        if self._runner.engine.device.type == "cuda":
            torch.cuda.synchronize(self._runner.engine.device)
