"""Statistics read again and again: segments stay attached in between, so that a reading costs a tenth of a millisecond."""

from __future__ import annotations

import os
import threading

from gpuworker.segment import names
from gpuworker.segment.files import group_id
from gpuworker.segment.segment import Segment
from gpuworker.segment.stats import Stats


class StatsReader:
    """Reads workers' statistics from their segments, and never asks the owners. Thread-safe; a forked child starts with nothing attached."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._segments: dict[tuple[str, str | None], Segment] = {}

    def read(self, name: str, group: str | None = None) -> Stats:
        """One worker's statistics now; of a dead one, as it left them. group: as for gpuworker.connect. Raises WorkerNotFound or SegmentError, ValueError for
        what is no name, or no group."""
        if os.getpid() != self._pid:
            self._reset()  # the parent's lock may have been held by another of its threads
        with self._lock:
            key = name, group
            segment = self._segments.get(key)
            if segment is None or not segment.is_current():  # gone, or another has its name
                self._segments.pop(key, None)
                segment = self._segments[key] = Segment.attach(name, read_only=True, gid=-1 if group is None else group_id(group))
            return Stats.read(segment)

    def names(self) -> list[str]:
        """The workers of this user, alive or dead, sorted. What is attached of others is given up. Raises SegmentError."""
        if os.getpid() != self._pid:
            self._reset()
        found = [name for name in names.worker_names() if _is_own(name)]
        with self._lock:
            for key in [key for key in self._segments if key[0] not in found]:
                del self._segments[key]
        return found


def _is_own(name: str) -> bool:
    try:
        return os.stat(names.shm_path(names.shm_name(name)), follow_symlinks=False).st_uid == os.geteuid()
    except FileNotFoundError:
        return False
