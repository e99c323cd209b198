"""A process's link to one segment: putting payloads into slots and taking answers out."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from gpuworker._native import ffi, lib
from gpuworker.client import remedies
from gpuworker.client.contract import Contract, GenerationContract
from gpuworker.client.landing import KEPT_BYTES, Landing, Landings
from gpuworker.errors import DeadlineExceeded, InvalidRequest, PayloadTooLarge, RequestCancelled, SegmentError, WorkerDied, WorkerDraining
from gpuworker.payload import Data, Parts, decode, encode, parse_layout, write_data
from gpuworker.segment import Segment, State, spill
from gpuworker.segment.wire import KIND_SHIFT, LINE, META_MASK, META_SHIFT, SLOT_BITS, SLOT_MASK, TOTAL_MASK, WAKE, data_start, describe

SLICE_NS = 50_000_000  # how long a wait trusts the owner before it asks the kernel whether the owner lives
_BYTES, _ARRAY, _ERROR, _SPILLED = lib.GW_KIND_BYTES, lib.GW_KIND_ARRAY, lib.GW_KIND_ERROR, lib.GW_KIND_SPILLED
_STREAM = lib.GW_KIND_STREAM
_DELIVERED = lib.GW_DELIVERED
_wait, _wait_for, _release = lib.gw_wait, lib.gw_wait_for, lib.gw_release
_BEFORE_FORK = "this request belongs to another process (it was made before a fork)"


class Scheduling(NamedTuple):
    """Of a worker: its latency budget in ns (0: none), the longest request that it takes (0: any), whether it has priorities, and whether it is over."""

    budget_ns: int
    max_length: int
    has_priorities: bool
    has_ended: bool


class Ending(NamedTuple):
    """How an answer that came piece by piece has ended, as the owner says: why (an index into generating.FINISH), and how many tokens it has counted."""

    finish: int
    prompt_tokens: int
    completion_tokens: int


class Link:
    """One segment that this process has joined. Thread-safe; of no use in a forked child (calls fail with ECHILD there, and nothing is touched)."""

    def __init__(
        self, segment: Segment, wake: str | None = None, allow_pickle: bool = False, stamp: Callable[[Any, int], None] | None = None
    ) -> None:
        overview = segment.overview()
        self.segment, self.port, self.pid = segment, segment.port, os.getpid()
        self.allow_pickle = allow_pickle and bool(overview.allow_pickle)  # both: any frontend can write what the segment says
        self.max_payload_bytes: int = overview.max_payload_bytes
        self.window = max(1, min(4 * overview.max_batch_size, overview.quota_shared))  # how far Client.map runs ahead
        self.parks = (overview.wake if wake is None else WAKE[wake]) == WAKE["park"]  # nothing here spins
        self.on_full = "block" if overview.on_full == lib.GW_BLOCK else "reject"
        self.submit = lib.gw_submit  # or what a client puts in its place
        self.lost = False  # the owner was found dead: the client looks again by name before it sends more
        self.fits = True  # requests go through `fit`: until the first of them finds that the worker has declared nothing
        self._declared: tuple[bytes, Contract | GenerationContract | None] | None = None  # the worker's info as it was read last, and what it says
        self._landings = Landings()
        self.stamp = stamp  # see tracing.py: for what is claimed, before it is published
        self._responses, self._response_bytes = segment.responses, segment.response_buffers
        if wake is not None:
            lib.gw_set_wake(self.port, WAKE[wake])

    def scheduling(self) -> Scheduling:
        """What the worker does with budgets, lengths and priorities. Asked each time: the next owner may have other options."""
        out = ffi.new("uint64_t[4]")
        lib.gw_read_scheduling(self.port, out)
        return Scheduling(out[0], out[1], bool(out[2]), out[3] > State.DRAINING)

    def fit(self, request: Any) -> tuple[Any, int]:
        """-> (what to send for a request, its length if the worker batches by length, else 0). Raises InvalidRequest.

        An owner that was loaded anew may have declared something else, so nothing is refused, and no text tokenized, by an old declaration.
        """
        contract = self._contract()
        if contract is not None and contract.takes_text and isinstance(request, str):
            contract = self._contract(anew=True)
        if contract is None:
            return request, 0
        try:
            payload, length = contract.prepare(request)
        except InvalidRequest:
            newer = self._contract(anew=True)
            if newer is contract:
                raise
            if newer is None:
                return request, 0
            contract = newer
            payload, length = contract.prepare(request)
        if length and not contract.uses_lengths and (contract.uses_lengths is False or not self.scheduling().max_length):
            length = 0
        return payload, length

    def _contract(self, anew: bool = False) -> Contract | GenerationContract | None:
        """What the worker has declared; read when first asked for, and `anew`."""
        declared = self._declared
        if declared is None or anew:
            info = self.segment.info()
            if declared is None or info != declared[0]:
                declared = self._declared = info, Contract.parse(info)
                self.fits = declared[1] is not None
        return declared[1]

    def generation(self) -> GenerationContract:
        """What the worker has declared of what it generates, as it is now. Raises InvalidRequest where it does not generate."""
        contract = self._contract(anew=True)
        if not isinstance(contract, GenerationContract):
            raise InvalidRequest(
                f"worker {self.segment.name!r} does not generate: call client.submit(request), enqueue or map in place of generate and stream"
            )
        return contract

    def send(self, request: Any, deadline_ns: int, terms: int) -> int:
        """Enqueues a request. -> its ticket, or a negative errno when no slot was to be had; raises for payloads that cannot go."""
        if self.stamp is not None:
            kind, meta, data, data_bytes = encode(request, self.allow_pickle)
            if lib.gw_is_late(self.port, terms, ffi.NULL):
                return -errno.ETIME
            return self._send_in_pieces(kind, meta, data, data_bytes, deadline_ns, terms)
        if request.__class__ is bytes:  # the commonest kinds are short-cut, here and in _take
            ticket: int = self.submit(self.port, _BYTES, b"", 0, request, len(request), deadline_ns, terms)
            if ticket != -errno.EMSGSIZE:
                return ticket
        kind, meta, data, data_bytes = encode(request, self.allow_pickle)
        if not isinstance(data, Parts):
            ticket = self.submit(self.port, kind, meta, len(meta), data, data_bytes, deadline_ns, terms)
            if ticket != -errno.EMSGSIZE:
                return ticket
        if lib.gw_is_late(self.port, terms, ffi.NULL):
            return -errno.ETIME
        return self._send_in_pieces(kind, meta, data, data_bytes, deadline_ns, terms)

    def send_claimed(self, ticket: int, request: Any, deadline_ns: int, terms: int) -> int:
        """As `send`, into a slot that was claimed before; it is given back if the payload cannot go."""
        try:
            kind, meta, data, data_bytes = encode(request, self.allow_pickle)
        except BaseException:
            self.withdraw(ticket)
            raise
        return self._send_in_pieces(kind, meta, data, data_bytes, deadline_ns, terms, ticket)

    def _send_in_pieces(self, kind: int, meta: bytes, data: Data, data_bytes: int, deadline_ns: int, terms: int, ticket: int | None = None) -> int:
        start = data_start(len(meta))
        draft = self.draft(start + data_bytes, ticket)
        if isinstance(draft, int):
            return draft
        with draft:
            draft.area[: len(meta)] = meta
            write_data(data, draft.area[start : start + data_bytes])
            return draft.publish(kind, len(meta), deadline_ns, terms)

    def draft(self, total_bytes: int, ticket: int | None = None) -> Draft | int:
        """A claimed slot with room for `total_bytes`, in the slot or in a spill file; or a negative errno. Raises PayloadTooLarge, SegmentError."""
        if total_bytes > max(self.max_payload_bytes, self.segment.request_bytes):
            if ticket is not None:
                self.withdraw(ticket)
            raise PayloadTooLarge(total_bytes, self.max_payload_bytes)
        if ticket is None:
            ticket = lib.gw_claim(self.port)
        return ticket if ticket < 0 else Draft(self, ticket, total_bytes)

    def answer(self, ticket: int, deadline_ns: int) -> Any:
        """Waits for the response and takes it out. Raises what became of the request instead."""
        landing = self._landings.expected()
        try:
            while True:
                if landing is None:
                    response = _wait(self.port, ticket, deadline_ns, SLICE_NS)
                else:
                    response = _wait_for(self.port, ticket, deadline_ns, SLICE_NS, landing.response, landing.meta, landing.pointer)
                    if response == _DELIVERED:
                        array = landing.array[...]
                        self._landings.keep(landing)
                        return array
                if response >= 0:
                    return self._take(ticket, response)
                if response == -errno.ETIMEDOUT:
                    self.check(ticket, deadline_ns)
                elif response == -errno.ESTALE:
                    raise RequestCancelled("the request was cancelled")
                elif response != -errno.EINTR:
                    raise SegmentError(remedies.explain(response, _BEFORE_FORK))
        except BaseException:
            self.abandon(ticket)
            raise

    def follow(
        self, ticket: int, seen: int, until: int, entry_bytes: int, deadline_ns: int, wait: bool = True, ask: bool = True
    ) -> bytes | Ending | None:
        """Waits for more than `until` entries of an answer that comes piece by piece (native/stream.c), or for its end. -> the bytes of those after the first
        `seen`; when there are none left, how it has ended, and the slot is given back. None: not yet, and not to `wait`. Raises what became
        of the request instead; ask: also whether its owner lives."""
        try:
            while True:
                if deadline_ns and time.monotonic_ns() >= deadline_ns:
                    self.check(ticket, deadline_ns, is_stream=True)  # also while entries go on coming
                if not wait and not lib.gw_has_news(self.port, ticket, until):
                    if ask:
                        self.check(ticket, deadline_ns, is_stream=True)
                    if not ask or not lib.gw_has_news(self.port, ticket, until):
                        return None
                written = lib.gw_stream_wait(self.port, ticket, until, deadline_ns, SLICE_NS)
                if written == _DELIVERED:
                    written = self._written(ticket)
                    if written <= seen:
                        return self._ending(ticket, seen)
                if written >= 0:
                    return self._entries(ticket, seen, written, entry_bytes)
                if written == -errno.ETIMEDOUT:
                    self.check(ticket, deadline_ns, is_stream=True)
                elif written == -errno.ESTALE:
                    raise RequestCancelled("the request was cancelled")
                elif written != -errno.EINTR:
                    raise SegmentError(remedies.explain(written, _BEFORE_FORK))
        except BaseException:
            self.abandon(ticket)
            raise

    def _log(self, ticket: int) -> Any:
        return ffi.cast("gw_stream *", ffi.from_buffer(self._responses[ticket & SLOT_MASK]))

    def _written(self, ticket: int) -> int:
        """How many entries an answer has by now."""
        log = self._log(ticket)
        return log.written if log.life == ticket >> SLOT_BITS else 0

    def _entries(self, ticket: int, seen: int, written: int, entry_bytes: int) -> bytes:
        start, stop = LINE + seen * entry_bytes, LINE + written * entry_bytes
        if stop > self.segment.response_bytes:
            raise SegmentError("malformed answer: it claims to be larger than its slot")
        found: bytes = self._response_bytes[ticket & SLOT_MASK][start:stop]
        if lib.gw_poll(self.port, ticket) == -errno.ESTALE:  # asked after the copy: it may have been another request's
            raise RequestCancelled("the request was cancelled")
        return found

    def _ending(self, ticket: int, seen: int) -> Ending:
        response = lib.gw_poll(self.port, ticket)
        if response < 0:
            raise RequestCancelled("the request was cancelled")
        if response >> KIND_SHIFT != _STREAM:
            was_begun = self._log(ticket).life == ticket >> SLOT_BITS
            self._take(ticket, response, seen if was_begun else None)  # raises what it stands for
            raise SegmentError(f"malformed answer of kind {response >> KIND_SHIFT} to a request that generates")
        log = self._log(ticket)
        ending, error_bytes = Ending(log.finish, log.counts[0], log.counts[1]), log.error_bytes
        room = lib.GW_STREAM_ERROR
        error = bytes(self._responses[ticket & SLOT_MASK][-room:][: min(error_bytes, room)])
        if _release(self.port, ticket) < 0:
            raise RequestCancelled("the request was cancelled")
        if error:
            raise remedies.failure(_ERROR, error, self.segment)
        return ending

    def _take(self, ticket: int, response: int, sent: int | None = None) -> Any:
        kind, total = response >> KIND_SHIFT, response & TOTAL_MASK
        if kind == _BYTES:
            value: Any = self._response_bytes[ticket & SLOT_MASK][:total]
            _release(self.port, ticket)
            return value
        if kind == _ARRAY:
            return self._take_array(ticket, response)
        if kind & _SPILLED:
            area, copy = spill.read(self.segment, ticket, spill.RESPONSE, total), False
            spill.remove(self.segment, ticket, spill.RESPONSE)
            kind &= ~_SPILLED
        else:
            area, copy = self._responses[ticket & SLOT_MASK], True
        if kind >= _ERROR:
            blob = bytes(area[:total])
            _release(self.port, ticket)
            failure = remedies.failure(kind, blob, self.segment, sent)
            if isinstance(failure, InvalidRequest):
                self._declared, self.fits = None, True  # we let it pass, so what we know is old
            raise failure
        value = decode(kind, response >> META_SHIFT & META_MASK, total, area, copy, self.allow_pickle)
        _release(self.port, ticket)
        return value

    def _take_array(self, ticket: int, response: int) -> Any:
        """Copied once, to a cache line of memory of its own, and its slot given back in the same call."""
        meta = self._response_bytes[ticket & SLOT_MASK][: response >> META_SHIFT & META_MASK]
        layout = parse_layout(meta, response & TOTAL_MASK)
        landing = Landing(meta, response, layout)
        problem = lib.gw_receive(self.port, ticket, layout.data_offset, landing.pointer, layout.data_bytes)
        if problem < 0:
            raise SegmentError(remedies.explain(problem, _BEFORE_FORK))
        array = landing.array[...]
        if layout.total_bytes == response & TOTAL_MASK and layout.data_bytes <= KEPT_BYTES:
            self._landings.keep(landing)
        return array

    def check(self, ticket: int, deadline_ns: int, is_stream: bool = False) -> None:
        """After a slice without an answer: is it too late, is the owner gone? is_stream: it comes piece by piece."""
        if deadline_ns and time.monotonic_ns() >= deadline_ns:
            running = lib.gw_phase(self.port, ticket) == lib.GW_RUNNING
            sent = self._written(ticket) if is_stream else 0
            if self.withdraw(ticket):
                lib.gw_count_client(self.port, lib.GW_EXPIRED)
                stage = "running" if running else "queued"
                if sent:
                    raise DeadlineExceeded(f"the answer was not complete within the timeout; it was ended after {sent:,} tokens", stage)
                raise DeadlineExceeded(f"no answer within the timeout; the request was {stage}" + ("" if running else " and will not run"), stage)
            return  # answered in this very moment
        state = self.segment.overview().state
        if state < State.STOPPED and not self.segment.is_dead():
            return  # an owner runs, or its supervisor is about to start one
        if not self.is_answered(ticket):
            raise remedies.failed(self.segment) if state == State.FAILED else self.died() if state < State.STOPPED else self.stopped()

    def stopped(self) -> WorkerDraining:
        """The error for an owner that has stopped."""
        return WorkerDraining(f"worker {self.segment.name!r} has stopped")

    def died(self) -> WorkerDied:
        """The error for an owner that was found dead, its supervisor too; the client looks for others before it sends more."""
        self.lost = True
        return WorkerDied(f"worker {self.segment.name!r} (pid {self.segment.owner().pid}) died before it answered")

    def is_answered(self, ticket: int) -> bool:
        """Whether `answer` would not wait."""
        return bool(lib.gw_poll(self.port, ticket) != -errno.EINPROGRESS)

    def withdraw(self, ticket: int) -> bool:
        """Cancels a request. False if it was answered already, or its life is over."""
        outcome: int = lib.gw_cancel(self.port, ticket)
        if outcome == 0:  # it never ran, so nobody else will
            spill.remove(self.segment, ticket, spill.REQUEST)
        return outcome in (0, 1)

    def abandon(self, ticket: int) -> int:
        """Gives a slot back whatever its state; nothing happens if that was done. -> as gw_cancel: 1 if it was running."""
        outcome: int = lib.gw_abandon(self.port, ticket)  # the slot first, in one call: Ctrl-C may come in between any two lines here
        if outcome == 0:
            spill.remove(self.segment, ticket, spill.REQUEST)
        elif outcome == 2:
            spill.remove(self.segment, ticket, spill.RESPONSE)
        return outcome

    def satisfied(self, ticket: int) -> None:
        """The same for an answer that has said all that its reader wants: to the owner it is abandoned, in the statistics completed."""
        if self.abandon(ticket) == 1:
            lib.gw_count_client(self.port, lib.GW_SATISFIED)

    def settle(self) -> None:
        """The ticket of this thread's last claim is in good hands."""
        lib.gw_unsettled(self.port)

    def undo(self) -> None:
        """After an exception: gives back what this thread claimed last and nobody took charge of, e.g. as KeyboardInterrupt came in between."""
        ticket = lib.gw_unsettled(self.port)
        if ticket:
            self.abandon(ticket)

    def is_usable(self) -> bool:
        """Whether new requests can go this way: the segment is its worker's current one, its owner lives, and we are who joined it."""
        return os.getpid() == self.pid and self.segment.overview().state < State.STOPPED and not self.segment.is_dead()


class Draft:
    """A slot that is ours and still empty: fill `area`, then `publish`. It is given back by a `with` block that ends without that, and when the draft
    is dropped before somebody said `keep`."""

    def __init__(self, link: Link, ticket: int, total_bytes: int) -> None:
        self._kept = False
        self.link, self.ticket, self.total_bytes = link, ticket, total_bytes
        self.spilled = total_bytes > link.segment.request_bytes
        self._published = False
        try:
            if self.spilled and not link.segment.is_own:
                spill.sweep(link.segment)  # what of ours the owner is done with: it may not remove another user's files
            slot = link.segment.requests[ticket & SLOT_MASK]
            self.area = spill.create(link.segment, ticket, spill.REQUEST, total_bytes) if self.spilled else slot[:total_bytes]
        except BaseException:
            lib.gw_cancel(link.port, ticket)
            raise

    def publish(self, kind: int, meta_bytes: int, deadline_ns: int, terms: int) -> int:
        """READY. -> the ticket, or a negative errno."""
        flag = _SPILLED if self.spilled else 0
        if self.link.stamp is not None:
            self.link.stamp(self.link.port, self.ticket)
        problem: int = lib.gw_publish(self.link.port, self.ticket, describe(kind | flag, meta_bytes, self.total_bytes), deadline_ns, terms)
        self._published = not problem
        return problem or self.ticket

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._published:
            self.link.withdraw(self.ticket)
        self._kept = True

    def keep(self) -> None:
        """Its ticket is in good hands."""
        self._kept = True

    def __del__(self) -> None:
        if not self._kept:
            self.link.abandon(self.ticket)
