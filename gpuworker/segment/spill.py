"""Payloads that do not fit a slot: a shared-memory file for each, named after the slot and its life.

Such a file is needed exactly as long as its slot's life lasts, so whoever finds one can tell from the slot's word alone whether it is garbage: no
list of files is kept, and none has to survive a crash. The requester removes the file of a request that never ran and of a response it has read;
the owner those of a request it has finished; `sweep` the rest. In a segment that a group shares neither side may remove the other user's files: it
cuts them to nothing, and their maker's side removes the names.

They are read and, by the owner, written with system calls: whoever may open such a file may also truncate it, and that would kill a process that has
it mapped (SIGBUS). Only a client maps one, its own request, so that it can be filled in place.
"""

from __future__ import annotations

import os

import numpy as np

from gpuworker._native import ffi, lib
from gpuworker.errors import SegmentError
from gpuworker.segment import files, names
from gpuworker.segment.segment import Segment
from gpuworker.segment.wire import LINE, SLOT_BITS, SLOT_MASK

REQUEST, RESPONSE = "q", "r"
_UINT8 = np.dtype(np.uint8)


def create(segment: Segment, ticket: int, kind: str, size: int) -> memoryview:
    """A new file of `size` bytes for this life of a slot, mapped for writing. Raises SegmentError when the memory is not there."""
    fd = _make(segment, ticket, kind, size)
    try:
        with files.explained(f"{size:,} bytes of a payload cannot be mapped"):
            return memoryview(files.map_(fd, size))
    except BaseException:
        remove(segment, ticket, kind)
        raise
    finally:
        os.close(fd)


def write(segment: Segment, ticket: int, kind: str, parts: list[memoryview]) -> None:
    """A new file that holds these parts one after the other. Raises SegmentError when the memory is not there."""
    size = sum(part.nbytes for part in parts)
    fd = _make(segment, ticket, kind, size)
    try:
        with files.explained(f"{size:,} bytes of a payload cannot be written"):
            at = 0
            for part in parts:
                done = 0
                while done < part.nbytes:
                    done += os.pwrite(fd, part[done:], at + done)
                at += done
    except BaseException:
        remove(segment, ticket, kind)
        raise
    finally:
        os.close(fd)


def _make(segment: Segment, ticket: int, kind: str, size: int) -> int:
    shared = kind == RESPONSE or not segment.is_own  # our own user's owner can read what we make anyway
    if kind == RESPONSE:  # there may be one: of an owner that was killed before it had answered this very request
        remove(segment, ticket, kind)
    with files.explained(f"no file can be made for a payload of {size:,} bytes"):
        return files.create(_name(segment, ticket, kind), size, segment.gid if shared else -1, "this one payload is too large for what is left")


def read(segment: Segment, ticket: int, kind: str, size: int) -> memoryview:
    """What the file of this life holds, in memory of our own, on a cache line. Raises SegmentError when it is missing or shorter than `size`."""
    what = f"a payload of {size:,} bytes cannot be read"
    with files.explained(what):
        try:
            fd = files.open_(_name(segment, ticket, kind), read_only=True)
        except FileNotFoundError:
            raise SegmentError("malformed payload: its spill file is missing") from None
        try:
            if os.fstat(fd).st_size < size:
                raise SegmentError("malformed payload: its spill file is too short")
            try:
                memory = np.empty(size + LINE, _UINT8)
            except MemoryError:
                raise SegmentError(f"{what}: no memory left for it") from None
            skip = -int(ffi.cast("uintptr_t", ffi.from_buffer(memory))) % LINE
            content = memory.data[skip : skip + size]
            done = 0
            while done < size:
                part = os.preadv(fd, [content[done:]], done)
                if not part:  # its sender has truncated it since
                    raise SegmentError("malformed payload: its spill file is too short")
                done += part
            return content
        finally:
            os.close(fd)


def remove(segment: Segment, ticket: int, kind: str) -> None:
    """Removes the file, if it is there."""
    _discard(segment, _name(segment, ticket, kind))


def sweep(segment: Segment, strangers: bool = False, is_over: bool = False) -> int:
    """Removes every file of this segment whose slot has moved on to another life, or to none. Returns how many.

    strangers: also those of other segments that bore this worker's name; for an owner that starts.
    is_over: also all that carry requests; for a segment that is served no more.
    """
    removed = 0
    for posix_name, nonce, slot, generation in names.spill_files(segment.name):
        if nonce != segment.nonce:
            is_garbage = strangers
        else:
            has_moved_on = slot > SLOT_MASK or lib.gw_phase(segment.port, generation << SLOT_BITS | slot) <= lib.GW_FREE
            is_garbage = has_moved_on or (is_over and posix_name.endswith(REQUEST))
        removed += is_garbage and _discard(segment, posix_name)
    return removed


def _discard(segment: Segment, posix_name: str) -> bool:
    return files.discard(posix_name) if segment.gid >= 0 else names.unlink(posix_name)


def _name(segment: Segment, ticket: int, kind: str) -> str:
    return names.spill_name(segment.name, segment.nonce, ticket & SLOT_MASK, ticket >> SLOT_BITS, kind)
