"""The FIFO by which an owner wakes an event loop of a frontend (native/chime.c): made, and removed when its participant is gone.

It is named after the segment, the participant's place and its incarnation there, so whoever finds one can tell from the place's word alone whether it is
garbage: no list is kept, and none has to survive a crash.
"""

from __future__ import annotations

import contextlib
import os

from gpuworker._native import ffi, lib
from gpuworker.segment import files, names
from gpuworker.segment.segment import Segment


class Chime:
    """The FIFO of this process's place in a segment. `fd` is for this process's loop to watch; a byte in it says that there may be something to read."""

    def __init__(self, segment: Segment) -> None:
        """Raises SegmentError."""
        self.fd = -1
        place = segment.port.me
        self._pid, self._name = os.getpid(), _name(segment, place, _word(segment, place) >> 2)
        path = names.shm_path(self._name)
        if not segment.is_own:
            sweep(segment)  # the owner may not remove another user's files
        with files.explained(f"no FIFO can be made beside the segment of worker {segment.name!r}"):
            os.mkfifo(path, files.PRIVATE)
            try:
                self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
                if not segment.is_own:
                    files.give_to_group(self.fd, segment.gid)
                os.fchmod(self.fd, files.PRIVATE if segment.is_own else files.SHARED)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Removes it; in a forked child only the child's descriptor goes."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._name and self._pid == os.getpid():
            names.unlink(self._name)
        self._name = ""

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end even os may be gone
            self.close()


def sweep(segment: Segment, strangers: bool = False, is_over: bool = False) -> int:
    """Removes the FIFOs of this segment whose participants are gone. Returns how many.

    strangers: also those of other segments that bore this worker's name. is_over: also all others, as nobody will ring them any more.
    """
    removed = 0
    for posix_name, nonce, place, incarnation in names.chime_files(segment.name):
        if nonce != segment.nonce:
            is_garbage = strangers
        else:
            word = _word(segment, place)
            is_garbage = is_over or word & 3 == lib.GW_VACANT or word >> 2 != incarnation
        removed += is_garbage and names.unlink(posix_name)
    return removed


def remove(segment: Segment, place: int, incarnation: int) -> None:
    """Removes the FIFO of a participant that is gone, if it has left one."""
    names.unlink(_name(segment, place, incarnation))


def _word(segment: Segment, place: int) -> int:
    view = ffi.new("gw_participant_view *")
    known = lib.gw_read_participant(segment.port, place, view) >= 0
    return int(view.word) if known else lib.GW_VACANT


def _name(segment: Segment, place: int, incarnation: int) -> str:
    return f"{names.chime_prefix(segment.name, segment.nonce)}{place}-{incarnation}"
