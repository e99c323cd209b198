"""What must go on while a batch runs: heartbeat, deadlines of queued requests, taking back what dead frontends held, and an end to draining."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time

from gpuworker._native import ffi, lib
from gpuworker.errors import SegmentError
from gpuworker.segment import Identity, Segment, spill
from gpuworker.segment.liveness import Watch
from gpuworker.worker.owner import Owner

log = logging.getLogger("gpuworker")

TICK_S = 0.1
SWEEP_TICKS = 100
EXIT_GRACE_NS = 1_000_000_000


class Keeper(threading.Thread):
    """The owner's second thread. The only one that reaps; every change it makes to a slot is a compare-and-swap that the main thread may win."""

    def __init__(self, owner: Owner, may_exit: bool, is_supervised: bool = False) -> None:
        super().__init__(name="gpuworker-keeper", daemon=True)
        self._owner, self._segment, self._may_exit, self._is_supervised = owner, owner.segment, may_exit, is_supervised
        self._over = threading.Event()
        self._watches: dict[int, tuple[int, Watch]] = {}
        self._view = ffi.new("gw_participant_view *")
        self._warned = False

    def run(self) -> None:
        """Ticks until `finish`."""
        ticks = 0
        while True:
            try:
                self.tick()
                if ticks % SWEEP_TICKS == 0:
                    spill.sweep(self._segment, strangers=ticks == 0)
            except Exception:
                log.exception("the keeper goes on after")
            ticks += 1
            if self._over.wait(TICK_S):
                return

    def finish(self) -> None:
        """Ends the thread and waits for it."""
        self._over.set()
        if self.is_alive():
            self.join()
        for _, watch in self._watches.values():
            watch.close()

    def tick(self) -> None:
        """One round."""
        now_ns = time.monotonic_ns()
        port = self._segment.port
        lib.gw_heartbeat(port, now_ns)
        lib.gw_expire(port, now_ns)
        self._reap()
        if not self._warned and os.fstat(self._segment.fd).st_nlink == 0 and self._owner.stop_ns is None:
            self._warned = True
            log.error(
                "the segment's file was removed by somebody else (systemd's RemoveIPC?): joined clients go on, new ones cannot find this worker"
            )
        if self._may_exit and self._owner.stop_ns is not None and now_ns > self._owner.stop_ns + EXIT_GRACE_NS:
            self._give_up("draining took longer than drain_timeout_s: the running batch is given up")
        limit_s, began_ns = self._owner.options.run_timeout_s, self._segment.overview().batch_started_ns
        if self._may_exit and not self._is_supervised and limit_s is not None and began_ns and now_ns > began_ns + limit_s * 1e9:
            lib.gw_recover(port, 1, lib.GW_KIND_STUCK)
            self._give_up("a batch ran for longer than run_timeout_s")

    def _reap(self) -> None:
        reaped = index = 0
        while index := lib.gw_next_participant(self._segment.port, index):
            try:
                reaped += self._reap_one(index)
            except Exception:  # a scribbled entry is no reason to forget those behind it
                log.exception("client %d cannot be looked at", index)
        lib.gw_count_alive(self._segment.port)
        lib.gw_free_strays(self._segment.port)
        if reaped:
            spill.sweep(self._segment)

    def _reap_one(self, index: int) -> int:
        port, view = self._segment.port, self._view
        joined = lib.gw_read_participant(port, index, view)
        if joined == lib.GW_VACANT:
            return 0
        if not self._is_dead(index) and (joined == lib.GW_ALIVE or lib.gw_is_locked(self._segment.fd, index)):
            return 0  # it lives; or it has left, and threads of its may still be inside calls
        slots: int = lib.gw_reap(port, index)
        self._watches.pop(index, (0, None))
        log.info("client %d (pid %d) %s; %d slots taken back", index, view.identity.pid, "left" if joined == lib.GW_LEFT else "died", slots)
        return slots

    def _is_dead(self, index: int) -> bool:
        word = self._view.word
        known = self._watches.get(index)
        if known is None or known[0] != word:
            who = self._view.identity
            known = self._watches[index] = (word, Watch(Identity(who.pid, who.start_ticks, who.pid_namespace), self._segment.fd, index))
        return known[1].is_dead()

    def _give_up(self, why: str) -> None:
        log.error("%s", why)
        if not self._is_supervised:
            retire(self._segment)
        os._exit(1)


def retire(segment: Segment) -> None:
    """The end of a segment, and of what lies beside it."""
    segment.retire()
    with contextlib.suppress(SegmentError):  # without a descriptor to list /dev/shm by they stay, for `gpuworker doctor --clean`
        spill.sweep(segment)
