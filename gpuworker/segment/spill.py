"""Payloads that do not fit a slot: a shared-memory file for each, named after the slot and its life.

Such a file is needed exactly as long as its slot's life lasts, so whoever finds one can tell from the slot's word alone whether it is garbage: no
list of files is kept, and none has to survive a crash. The requester removes the file of a request that never ran and of a response it has read;
the owner those of a request it has finished; `sweep` the rest.
"""

from __future__ import annotations

import mmap
import os

import posix_ipc

from gpuworker._native import lib
from gpuworker.errors import SegmentError
from gpuworker.segment import names
from gpuworker.segment.segment import Segment, reserve
from gpuworker.segment.wire import SLOT_BITS, SLOT_MASK

REQUEST, RESPONSE = "q", "r"


def create(segment: Segment, ticket: int, kind: str, size: int) -> memoryview:
    """A new file of `size` bytes for this life of a slot, mapped for writing. Raises SegmentError when the memory is not there."""
    name = _name(segment, ticket, kind)
    try:
        fd = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd
    except (posix_ipc.Error, OSError) as error:
        raise SegmentError(f"no file can be made beside the segment for a payload of {size:,} bytes: {error}") from None
    try:
        os.fchmod(fd, 0o600)  # whatever the umask
        reserve(fd, size, "this one payload is too large for what is left")
        return memoryview(mmap.mmap(fd, size))
    except BaseException:
        remove(segment, ticket, kind)
        raise
    finally:
        os.close(fd)


def open_(segment: Segment, ticket: int, kind: str, size: int) -> memoryview:
    """The file of this life, mapped read-only. Raises SegmentError when it is missing or shorter than `size`."""
    try:
        fd = posix_ipc.SharedMemory(_name(segment, ticket, kind), read_only=True).fd
    except (posix_ipc.Error, OSError):
        raise SegmentError("malformed payload: its spill file is missing") from None
    try:
        if os.fstat(fd).st_size < max(size, 1):
            raise SegmentError("malformed payload: its spill file is too short")
        return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


def remove(segment: Segment, ticket: int, kind: str) -> None:
    """Removes the file, if it is there. Mappings of it live on."""
    names.unlink(_name(segment, ticket, kind))


def sweep(segment: Segment, strangers: bool = False) -> int:
    """Removes every file of this segment whose slot has moved on to another life, or to none. Returns how many.

    strangers: also those of other segments that bore this worker's name; for an owner that starts.
    """
    removed = 0
    for posix_name, nonce, slot, generation in names.spill_files(segment.name):
        is_over = nonce == segment.nonce and lib.gw_phase(segment.port, generation << SLOT_BITS | slot) <= lib.GW_FREE
        is_garbage = is_over or (strangers and nonce != segment.nonce)
        removed += is_garbage and names.unlink(posix_name)
    return removed


def _name(segment: Segment, ticket: int, kind: str) -> str:
    return names.spill_name(segment.name, segment.nonce, ticket & SLOT_MASK, ticket >> SLOT_BITS, kind)
