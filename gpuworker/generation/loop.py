"""The owner's loop for generation: requests join and leave between the steps of the model, and their tokens go out as they come."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import deque
from typing import Any

from gpuworker._native import ffi, lib
from gpuworker.errors import InvalidRequest
from gpuworker.generating import FINISH, GenerationRequest, entry_bytes
from gpuworker.generation.engine import Emitted, Engine
from gpuworker.generation.sequence import Sequence
from gpuworker.generation.tally import Graphs, Tally
from gpuworker.payload import encode_error
from gpuworker.scheduling import Reason
from gpuworker.segment import Segment
from gpuworker.segment.wire import describe
from gpuworker.worker.exchange import Exchange, bare
from gpuworker.worker.runner import DeviceLost, Turn
from gpuworker.worker.tracer import Traced, Tracer

log = logging.getLogger("gpuworker")

TICK_NS = 100_000_000
_FINISH = {reason: code for code, reason in enumerate(FINISH)}


class GenerationLoop:
    """See worker/runner.py: Loop.

    A request is taken from the ring as soon as it is seen, and waits for blocks in the scheduler; so it is RUNNING all the time. When its owner dies it is
    queued again, and the next owner finds in its slot which tokens were sent (native/stream.c), and goes on behind them.
    """

    def __init__(
        self, engine: Engine, segment: Segment, exchange: Exchange, name: str, vocabulary: int, priorities: bool, graphs: Graphs | None = None
    ) -> None:
        """graphs: those of the engine's model, where it has any."""
        self._engine, self._port, self._exchange, self._name, self._vocabulary = engine, segment.port, exchange, name, vocabulary
        self._priorities, self._graphs = priorities, graphs
        self._response_bytes, self._capacity = segment.response_bytes, segment.capacity
        self._live: dict[int, _Live] = {}
        self._suspects: deque[_Live] = deque()
        """Those that took part in a step in which an owner died, and have not shown yet that it was not their fault."""
        self._held: list[_Live] = []
        """Those that wait until there are no suspects any more."""
        self._probed: _Live | None = None
        self._taken = ffi.new("uint64_t[]", 2 * segment.capacity)
        self._tickets, self._at = ffi.new("uint64_t[]", segment.capacity), ffi.new("uint32_t[]", segment.capacity)
        self._gone = ffi.new("int[]", segment.capacity)
        self._tracer: Tracer | None = None
        self._traced: dict[int, Traced] = {}
        self.tally = Tally(segment.port, engine.scheduler.pool.block_tokens, graphs)

    def run(self, turn: Turn) -> None:
        """See Loop.run."""
        self._tracer = turn.tracer
        until_ns = 0
        while True:
            count = turn.collect(until_ns)
            now_ns = time.monotonic_ns()
            if turn.is_handing_over:
                self._hand_back()
                return
            if count:
                self._admit(count)
            self._drop_gone(now_ns)
            stop_ns = turn.stop_ns
            if stop_ns is not None and (now_ns >= stop_ns or not self._live):
                self._end_all()
                lib.gw_refuse_all(self._port, lib.GW_KIND_DRAINING)
                return
            if turn.is_paused:
                self.tally.publish(self._engine)
                until_ns = now_ns + TICK_NS
            elif self._suspects or self._probed is not None:
                self._probe()
                until_ns = 0
            elif self._engine.is_busy:
                self._step()
                until_ns = 0
            else:
                has_more = self._use_idle_time()
                self.tally.publish(self._engine)
                until_ns = 0 if has_more else now_ns + TICK_NS

    def _use_idle_time(self) -> bool:
        """Captures a CUDA graph that there is not yet. One at a time: a request that comes meanwhile waits for one capture. -> whether there is more."""
        if self._graphs is None:
            return False
        try:
            return self._graphs.capture_next()
        except Exception as error:
            raise self._lost(error) from error

    # Joining.

    def _admit(self, count: int) -> None:
        n = lib.gw_admit(self._port, min(count, self._capacity), self._taken)
        pairs = ffi.unpack(self._taken, 2 * n)
        if self._tracer is not None:
            self._traced.update((one.ticket, one) for one in self._tracer.look(self._taken, n))
        for ticket, request in zip(pairs[::2], pairs[1::2], strict=True):
            try:
                self._add(ticket, request)
            except Exception as error:  # its sender's; what is wrong with it concerns nobody else
                self._exchange.answer(ticket, bare(error))
                self._finish(ticket)

    def _add(self, ticket: int, described: int) -> None:
        request = GenerationRequest.from_payload(
            self._exchange.read_one(ticket, described), self._engine.scheduler.max_model_tokens, self._vocabulary
        )
        if request.ids and not 0 <= min(request.ids) <= max(request.ids) < self._vocabulary:
            raise InvalidRequest(f"ids: this model's tokens go from 0 to {self._vocabulary - 1:,}")
        entry = request.entry
        written = lib.gw_stream_open(self._port, ticket, max(request.max_tokens, 0), entry.itemsize)
        if written == -errno.EMSGSIZE:
            needed = lib.gw_stream_bytes(request.max_tokens, entry.itemsize)
            raise InvalidRequest(
                f"max_tokens={request.max_tokens:,}: an answer of so many tokens takes {needed:,} bytes, and this worker has room for {self._response_bytes:,}; "
                "ask for fewer, or start it with a larger max_response_bytes"
            )
        if written < 0:
            return  # somebody has scribbled over its word
        sequence = Sequence(
            ticket,
            request.ids,
            max_tokens=request.max_tokens,
            generated=self._sent(ticket, written, entry),
            stop_ids=request.stop_ids,
            ignore_eos=request.ignore_eos,
            priority=request.priority if self._priorities else 0,
            arrival_ns=time.monotonic_ns(),
            sampling=request.sampling,
        )
        live = self._live[ticket] = _Live(sequence, entry, written, lib.gw_deadline(self._port, ticket))
        if lib.gw_attempts(self._port, ticket):
            self._suspects.append(live)
        elif self._suspects or self._probed is not None:
            self._held.append(live)
        else:
            self._join(live)

    def _join(self, live: _Live) -> None:
        """Into the scheduler; unless it has left meanwhile, has all its tokens already, or can never be finished, which its sender is told."""
        sequence = live.sequence
        if sequence.ticket not in self._live:
            return
        try:
            self._engine.scheduler.add(sequence)
        except InvalidRequest as error:
            del self._live[sequence.ticket]
            self._exchange.answer(sequence.ticket, bare(error))
            self._finish(sequence.ticket)
            return
        if sequence.is_finished:
            self._end(sequence)

    def _probe(self) -> None:
        """A step with a suspect alone. If it kills this owner too, it takes nobody else's attempts with it; when it has got a token, it may join the others."""
        scheduler = self._engine.scheduler
        while self._probed is None and self._suspects:
            suspect = self._suspects.popleft()
            self._join(suspect)
            if suspect.sequence.ticket in self._live:
                self._probed, self._before = suspect, suspect.written
        if self._probed is not None:
            self._step()
            sequence = self._probed.sequence
            if sequence.ticket not in self._live:
                self._probed = None
            elif self._probed.written > self._before:
                scheduler.cancel(sequence)
                self._probed.sequence = sequence.again()
                self._held.append(self._probed)
                self._probed = None
        if self._probed is None and not self._suspects:
            for held in self._held:
                self._join(held)
            self._held.clear()

    def _sent(self, ticket: int, count: int, entry: Any) -> list[int]:
        """The tokens that an owner before us has sent."""
        if not count:
            return []
        import numpy as np

        found = np.empty(count, entry)
        lib.gw_stream_copy(self._port, ticket, ffi.from_buffer(found), count, entry.itemsize)
        tokens: list[int] = found["token"].tolist()
        if not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            raise InvalidRequest("what was sent of this answer is not what it was: somebody has written over it")
        return tokens

    # Going on.

    def _step(self) -> None:
        engine = self._engine
        planned = [chunk.sequence.ticket for chunk in engine.plan()]
        self._tickets[0 : len(planned)] = planned
        lib.gw_begin_step(self._port, self._tickets, len(planned))
        try:
            emitted, finished = engine.run()
        except Exception as error:
            raise self._lost(error) from error
        finally:
            if lib.gw_is_forked(self._port):
                os._exit(os.EX_SOFTWARE)
            is_full = len(engine.scheduler.running) >= engine.scheduler.max_running
            self._tickets[0 : len(planned)] = planned
            lib.gw_end_step(self._port, self._tickets, len(planned), len(planned), Reason.FULL if is_full else Reason.AGE)
        self._send([one for one in emitted if one.error is None])
        for one in emitted:
            if one.error is not None:
                self._end(one.sequence)
        for sequence in finished:
            self._end(sequence)
        self.tally.publish_when_due(engine, min([live.sequence.arrival_ns for live in self._live.values()], default=None))

    def _lost(self, error: Exception) -> DeviceLost:
        log.critical("%s: the device is lost, and the owner ends: %s", self._name, error)
        return DeviceLost(str(error))

    def _send(self, emitted: list[Emitted]) -> None:
        """Appends a token to each answer; in one native call for those whose entries look alike, which mostly is all."""
        by_size: dict[int, list[Emitted]] = {}
        for one in emitted:
            live = self._live.get(one.sequence.ticket)
            if live is not None:
                by_size.setdefault(live.entry.itemsize, []).append(one)
        for size, those in by_size.items():
            tickets = [one.sequence.ticket for one in those]
            lives = [self._live[ticket] for ticket in tickets]
            self._tickets[0 : len(those)] = tickets
            self._at[0 : len(those)] = [live.written for live in lives]
            if size == 4:
                entries = b"".join([one.token.to_bytes(4, "little") for one in those])
            else:
                entries = b"".join([entry_bytes(live.entry, one.token, one.logprob, one.top) for one, live in zip(those, lives, strict=True)])
            lib.gw_stream_append(self._port, self._tickets, self._at, entries, len(those), size, self._gone)
            for live in lives:
                live.written += 1
            self.tally.tokens += len(those)

    # Leaving.

    def _drop_gone(self, now_ns: int) -> None:
        """Cancels what nobody waits for any more, or has waited for long enough: its blocks are free before the next step."""
        if not self._live:
            return
        tickets = list(self._live)
        self._tickets[0 : len(tickets)] = tickets
        n = lib.gw_stream_gone(self._port, self._tickets, len(tickets), self._gone)
        for k in ffi.unpack(self._gone, n) if n else ():
            self._leave(tickets[k])
        for ticket in [ticket for ticket, live in self._live.items() if live.deadline_ns and live.deadline_ns <= now_ns]:
            lib.gw_responded(self._port, ticket, describe(lib.GW_KIND_EXPIRED, 0, 0))
            self._leave(ticket)

    def _leave(self, ticket: int) -> None:
        if self._probed is not None and self._probed.sequence.ticket == ticket:
            self._probed = None
        live = self._live.pop(ticket)
        self._engine.scheduler.cancel(live.sequence)
        self.tally.answers.ended(time.monotonic_ns() - live.sequence.arrival_ns)
        self._finish(ticket)

    def _end(self, sequence: Sequence) -> None:
        """Says how it has ended."""
        live = self._live.pop(sequence.ticket, None)
        if live is None:
            return
        error = sequence.error
        blob = b""
        if error is not None:
            blob = encode_error(error if isinstance(error, BaseException) else RuntimeError(str(error)), lib.GW_STREAM_ERROR)
        counts = (sequence.prompt_tokens, len(sequence.tokens) - sequence.prompt_tokens, 0)
        self.tally.answers.ended(time.monotonic_ns() - sequence.arrival_ns)
        lib.gw_stream_end(self._port, sequence.ticket, _FINISH[sequence.finish_reason or "error"], counts, blob, len(blob))
        self._finish(sequence.ticket)

    def _finish(self, ticket: int) -> None:
        lib.gw_finish(self._port, ffi.new("uint64_t[2]", [ticket, 0]), 1)
        self._exchange.clean_up()
        if self._tracer is not None and (traced := self._traced.pop(ticket, None)) is not None:
            self._tracer.done([traced], 0, "")

    def _end_all(self) -> None:
        """The worker ends, and these have not finished in time."""
        for ticket, live in list(self._live.items()):
            self._engine.scheduler.cancel(live.sequence)
            lib.gw_responded(self._port, ticket, describe(lib.GW_KIND_DRAINING, 0, 0))
            self._finish(ticket)
        self._live.clear()

    def _hand_back(self) -> None:
        """The next owner goes on with them."""
        for ticket, live in self._live.items():
            self._engine.scheduler.cancel(live.sequence)
            lib.gw_untake(self._port, ticket)
        self._live.clear()
        self._traced.clear()


class _Live:
    __slots__ = ("deadline_ns", "entry", "sequence", "written")

    def __init__(self, sequence: Sequence, entry: Any, written: int, deadline_ns: int) -> None:
        self.sequence, self.entry, self.written, self.deadline_ns = sequence, entry, written, deadline_ns
