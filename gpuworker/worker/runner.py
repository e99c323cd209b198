"""What the owner's loop needs of whatever runs its batches, and the runner of handlers that take lists of requests."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

from gpuworker._native import ffi, lib
from gpuworker.scheduling import Run
from gpuworker.scheduling.sizes import MAX_BATCH_SIZE
from gpuworker.segment import Segment
from gpuworker.segment.wire import request_id
from gpuworker.worker import batch
from gpuworker.worker.exchange import Exchange
from gpuworker.worker.handler import Handler
from gpuworker.worker.json_logs import running
from gpuworker.worker.tracer import Tracer

log = logging.getLogger("gpuworker")


def log_failure(name: str, error: BaseException, tickets: Sequence[int]) -> None:
    """Of a batch that has failed as a whole."""
    ids = ", ".join(map(request_id, tickets))
    log.error("%s failed on a batch of %d (slot.generation: %s)", name, len(tickets), ids, exc_info=error, extra={"tickets": tickets})


class DeviceLost(RuntimeError):
    """The device does not work any more in this process. Nobody is answered: under a supervisor the next owner runs the requests again."""


class Flight(Protocol):
    """A batch on its way."""

    key: Any
    """What batches that take equally long have in common."""
    failed: bool
    """After `finish`: whether what it took says nothing about others."""

    def is_done(self) -> bool:
        """Whether `finish` would not wait for the device."""
        ...

    def finish(self) -> None:
        """Waits, answers all requests of the batch, and ends it (gw_finish). Raises SystemExit and the like from the handler, after it has answered, and
        DeviceLost, without answering."""
        ...


class Runner(Protocol):
    """Runs batches. All for the owner's thread."""

    depth: int
    """Batches that may be on their way at a time."""
    size_limit: int
    """Most requests in a batch; it may become less."""

    def begin(self, run: Run, taken: Any) -> Flight:
        """Starts the batch that Line.take has taken. `taken` stays as it is until the flight has finished. Raises nothing."""
        ...

    def idle(self) -> bool:
        """Nothing is queued: does a piece of work that is to be done some time. -> whether there is more."""
        ...

    def close(self) -> None:
        """Nothing more is begun. What may be on its way, after an error that ends the owner, is given up."""
        ...


class Turn(Protocol):
    """What a Loop sees of the owner that it runs for."""

    @property
    def stop_ns(self) -> int | None:
        """When draining has to be over; None while serving."""
        ...

    is_handing_over: bool
    """The next owner is waiting for what has not been answered."""
    tracer: Tracer | None
    """If spans are wanted."""

    @property
    def is_paused(self) -> bool:
        """Nothing is to begin until somebody resumes."""
        ...

    def collect(self, until_ns: int) -> int:
        """See Line.collect."""
        ...


class Loop(Protocol):
    """In place of line and runner, for requests that run for many batches."""

    def run(self, turn: Turn) -> None:
        """Serves until the turn is over. Raises DeviceLost."""
        ...


class ListRunner:
    """For `run_batch(requests: list) -> list`: a batch has ended when `begin` returns."""

    depth = 1
    size_limit = MAX_BATCH_SIZE

    def __init__(self, segment: Segment, handler: Handler, exchange: Exchange, isolate_errors: bool) -> None:
        self.port, self.exchange = segment.port, exchange
        self._handler, self._isolate_errors = handler, isolate_errors

    def begin(self, run: Run, taken: Any) -> Flight:
        """See Runner.begin."""
        n = run.size
        tickets, requests = self.exchange.read(ffi.unpack(taken, 2 * n))
        flight = _Landed(self, taken, n, tickets)
        flight.failed = len(requests) != n

        def log(error: BaseException, count: int) -> None:
            flight.failed = True
            log_failure(self._handler.name, error, tickets)

        try:
            running.begin(tickets)
            if requests:
                flight.outcomes = batch.run(self._handler.run_batch, requests, self._isolate_errors, log)
        except BaseException as error:  # SystemExit and the like: it ends the owner, but first its callers are told
            flight.outcomes, flight.fatal = [error] * len(requests), error
        finally:
            running.end()
            if lib.gw_is_forked(self.port):  # the handler forked, and returned in its child too
                os._exit(os.EX_SOFTWARE)
        return flight

    def idle(self) -> bool:
        """See Runner.idle."""
        return False

    def close(self) -> None:
        """See Runner.close."""


class _Landed:
    __slots__ = ("_n", "_runner", "_taken", "_tickets", "failed", "fatal", "outcomes")
    key = None

    def __init__(self, runner: ListRunner, taken: Any, n: int, tickets: list[int]) -> None:
        self._runner, self._taken, self._n, self._tickets = runner, taken, n, tickets
        self.outcomes: list[Any] = []
        self.failed = False
        self.fatal: BaseException | None = None

    def is_done(self) -> bool:
        return True

    def finish(self) -> None:
        runner = self._runner
        runner.exchange.respond(self._tickets, self.outcomes)
        lib.gw_finish(runner.port, self._taken, self._n)
        runner.exchange.clean_up()
        if self.fatal is not None:
            raise self.fatal
