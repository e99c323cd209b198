"""Between slots and the handler: requests as values, outcomes as responses."""

from __future__ import annotations

import errno
import logging
from typing import Any

from gpuworker._native import lib
from gpuworker.errors import GpuWorkerError, PayloadTooLarge, SegmentError
from gpuworker.payload import Data, Parts, contiguous, decode, encode, encode_error, view_array, write_data
from gpuworker.segment import Segment, spill
from gpuworker.segment.wire import KIND_SHIFT, META_MASK, META_SHIFT, SLOT_MASK, TOTAL_MASK, data_start, describe
from gpuworker.worker.options import WorkerOptions

log = logging.getLogger("gpuworker")

_BYTES, _ARRAY, _ERROR, _SPILLED = lib.GW_KIND_BYTES, lib.GW_KIND_ARRAY, lib.GW_KIND_ERROR, lib.GW_KIND_SPILLED
_BYTES_END, _ARRAY_START, _ARRAY_END = describe(_BYTES + 1, 0, 0), describe(_ARRAY, 0, 0), describe(_ARRAY + 1, 0, 0)
_MALFORMED = (1 << 64) - 1
_respond = lib.gw_respond


class Exchange:
    """Reads what gw_take took, and writes what `run_batch` made of it for gw_finish to publish."""

    def __init__(self, segment: Segment, options: WorkerOptions) -> None:
        self._segment, self._port, self._options = segment, segment.port, options
        self._views = [view.toreadonly() for view in segment.requests]  # run_batch may see a request twice: it must find it as it was
        self._buffers = segment.request_buffers
        self._arrays: list[tuple[bytes, int, Any]] = [(b"", 0, None)] * segment.capacity
        self._spilled: set[int] = set()
        self._unreadable: list[tuple[int, Exception]] = []

    def read(self, taken: list[int]) -> tuple[list[int], list[Any]]:
        """Tickets and requests of a batch, from (ticket, described request) pairs in a row. Arrays are read-only views of their slots.

        A request that cannot be read is its sender's error, answered with the batch, and no reason for the others to fail.
        """
        tickets, requests = taken[::2], []
        buffers, pairs = self._buffers, iter(taken)
        for ticket, request in zip(pairs, pairs):  # noqa: B905 (strict= costs 0.1 us a batch)
            try:
                if request < _BYTES_END:
                    requests.append(buffers[ticket & SLOT_MASK][: request & TOTAL_MASK])
                elif _ARRAY_START <= request < _ARRAY_END:
                    requests.append(self._array(ticket & SLOT_MASK, request))
                else:
                    requests.append(self.read_one(ticket, request))
            except Exception as error:
                tickets.remove(ticket)
                self._unreadable.append((ticket, bare(error)))
        return tickets, requests

    def read_one(self, ticket: int, request: int) -> Any:
        """A request that was taken, of any kind. Raises what decoding raises."""
        if request != _MALFORMED and request >> KIND_SHIFT & _SPILLED:
            self._spilled.add(ticket)
        return self._decode(ticket, request)

    def peek(self, ticket: int) -> Any:
        """A queued request, without taking it. Its frontend may withdraw it meanwhile and fill the slot anew: then this is None, or what the slot never held."""
        request = lib.gw_peek(self._port, ticket)
        if request == -errno.EILSEQ:
            request = _MALFORMED
        return self._decode(ticket, request) if request >= 0 else None

    def _array(self, slot: int, request: int) -> Any:
        """A view of the array in this slot. Slots see the same shapes again and again: a view of the last view is ten times cheaper than a new one."""
        meta = self._buffers[slot][: request >> META_SHIFT & META_MASK]
        known_meta, known_request, array = self._arrays[slot]
        if meta != known_meta or request != known_request:
            array = view_array(meta, request & TOTAL_MASK, self._views[slot])
            self._arrays[slot] = meta, request, array
        return array[...]

    def _decode(self, ticket: int, request: int) -> Any:
        if request == _MALFORMED:
            raise SegmentError("malformed payload: it claims to be larger than its slot")
        kind, total = request >> KIND_SHIFT, request & TOTAL_MASK
        area = self._views[ticket & SLOT_MASK]
        if kind & _SPILLED:
            kind &= ~_SPILLED
            area = spill.read(self._segment, ticket, spill.REQUEST, total).toreadonly()
        if kind >= _ERROR:
            raise SegmentError(f"malformed payload: kind {kind}")
        return decode(kind, request >> META_SHIFT & META_MASK, total, area, False, self._options.allow_pickle)

    def respond(self, tickets: list[int], outcomes: list[Any]) -> None:
        """Writes one response per ticket: a result, or an exception instance. Nothing is published before gw_finish, so that outcomes may be views of
        any request of the batch."""
        for ticket, outcome in zip(tickets, outcomes, strict=True):
            if type(outcome) is not bytes or _respond(self._port, ticket, _BYTES, b"", 0, outcome, len(outcome)) < 0:
                self.answer(ticket, outcome)
        unreadable, self._unreadable = self._unreadable, []
        for ticket, error in unreadable:
            self.answer(ticket, error)

    def answer(self, ticket: int, outcome: Any) -> None:
        """Writes one response, whatever it is. An outcome that cannot cross becomes the error that says so."""
        try:
            if not isinstance(outcome, BaseException):
                kind, meta, data, data_bytes = encode(outcome, self._options.allow_pickle)
                if isinstance(data, Parts) or _respond(self._port, ticket, kind, meta, len(meta), data, data_bytes) < 0:
                    self._respond_in_pieces(ticket, kind, meta, data, data_bytes)
                return
        except GpuWorkerError as error:
            outcome = bare(error)
        except BaseException as error:  # a value's own code may raise anything; it is its caller's error, not the owner's end
            log.exception("a result could not be encoded", extra={"tickets": [ticket]})
            outcome = error
        try:
            blob = encode_error(outcome, self._segment.response_bytes)
        except BaseException:
            blob = b""
        if _respond(self._port, ticket, _ERROR, b"", 0, blob, len(blob)) < 0:
            _respond(self._port, ticket, _ERROR, b"", 0, b"", 0)  # the client says that there was an error without words

    def _respond_in_pieces(self, ticket: int, kind: int, meta: bytes, data: Data, data_bytes: int) -> None:
        start = data_start(len(meta))
        total = start + data_bytes
        if total <= self._segment.response_bytes:
            area = self._segment.responses[ticket & SLOT_MASK]
            area[: len(meta)] = meta
            write_data(data, area[start:total])
        elif total <= self._options.max_payload_bytes:
            spill.write(self._segment, ticket, spill.RESPONSE, [memoryview(meta.ljust(start, b"\0")), contiguous(data, data_bytes)])
            self._spilled.add(ticket)
            kind |= _SPILLED
        else:
            raise PayloadTooLarge(total, self._options.max_payload_bytes, "response")
        lib.gw_responded(self._port, ticket, describe(kind, len(meta), total))

    def clean_up(self) -> None:
        """After gw_finish: removes the files that nobody will read any more."""
        for ticket in tuple(self._spilled):
            phase = lib.gw_phase(self._port, ticket)
            if phase == lib.GW_RUNNING:  # of another batch, which is on its way
                continue
            self._spilled.remove(ticket)
            spill.remove(self._segment, ticket, spill.REQUEST)
            if phase <= lib.GW_FREE:  # nobody is left to read the response
                spill.remove(self._segment, ticket, spill.RESPONSE)


def bare(error: Exception) -> Exception:
    """An error of our own says all in its message; a traceback would only tell the caller where the owner's files lie."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error
