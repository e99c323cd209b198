"""Taking back what dead frontends held; and the end of a segment."""

from __future__ import annotations

import contextlib
import logging

from gpuworker._native import ffi, lib
from gpuworker.errors import SegmentError
from gpuworker.segment import Identity, Segment, chime, spill
from gpuworker.segment.liveness import Watch

log = logging.getLogger("gpuworker")


class Reaper:
    """Watches the participants of a segment. One at a time per segment: the owner's keeper, or who retires the segment."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._watches: dict[int, tuple[int, Watch]] = {}
        self._view = ffi.new("gw_participant_view *")

    def close(self) -> None:
        """Gives the descriptors back."""
        for _, watch in self._watches.values():
            watch.close()
        self._watches.clear()

    def reap(self) -> int:
        """Takes back the slots of those that are gone. -> how many slots."""
        reaped = index = 0
        while index := lib.gw_next_participant(self._segment.port, index):
            try:
                reaped += self._reap_one(index)
            except Exception:  # a scribbled entry is no reason to forget those behind it
                log.exception("client %d cannot be looked at", index)
        lib.gw_count_alive(self._segment.port)
        return reaped

    def _reap_one(self, index: int) -> int:
        port, view = self._segment.port, self._view
        joined = lib.gw_read_participant(port, index, view)
        if joined == lib.GW_VACANT:
            return 0
        if not self._is_dead(index) and (joined == lib.GW_ALIVE or lib.gw_is_locked(self._segment.fd, index)):
            return 0  # it lives; or it has left, and threads of its may still be inside calls
        slots: int = lib.gw_reap(port, index)
        self._watches.pop(index, (0, None))
        chime.remove(self._segment, index, view.word >> 2)
        log.info("client %d (pid %d) %s; %d slots taken back", index, view.identity.pid, "left" if joined == lib.GW_LEFT else "died", slots)
        return slots

    def _is_dead(self, index: int) -> bool:
        word = self._view.word
        known = self._watches.get(index)
        if known is None or known[0] != word:
            who = self._view.identity
            known = self._watches[index] = (word, Watch(Identity(who.pid, who.start_ticks, who.pid_namespace), self._segment.fd, index))
        return known[1].is_dead()


def retire(segment: Segment) -> None:
    """The end of a segment, and of what lies beside it: all but answers that living frontends have still to read."""
    segment.retire()
    with contextlib.closing(Reaper(segment)) as reaper:
        reaper.reap()
    with contextlib.suppress(SegmentError):  # without a descriptor to list /dev/shm by they stay, for `gpuworker doctor --clean`
        spill.sweep(segment, is_over=True)
        chime.sweep(segment, is_over=True)
