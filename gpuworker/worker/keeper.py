"""What must go on while a batch runs: heartbeat, deadlines of queued requests, taking back what dead frontends held, and an end to draining."""

from __future__ import annotations

import logging
import os
import threading
import time

from gpuworker._native import lib
from gpuworker.errors import SegmentError
from gpuworker.segment import chime, spill
from gpuworker.worker.owner import Owner
from gpuworker.worker.reaper import Reaper, retire

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
        self._reaper = Reaper(self._segment)
        self._warned = False

    def run(self) -> None:
        """Ticks until `finish`."""
        ticks = 0
        while True:
            try:
                self.tick()
                if ticks % SWEEP_TICKS == 0:
                    self._sweep(strangers=ticks == 0)
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
        self._reaper.close()

    def tick(self) -> None:
        """One round."""
        now_ns = time.monotonic_ns()
        port = self._segment.port
        lib.gw_heartbeat(port, now_ns)
        lib.gw_expire(port, now_ns)
        self._owner.line.tick()
        self._reap()
        if not self._warned and os.fstat(self._segment.fd).st_nlink == 0 and self._owner.stop_ns is None:
            self._warned = True
            log.error(
                "the segment's file was removed by somebody else (systemd's RemoveIPC?): joined clients go on, new ones cannot find this worker"
            )
        if self._may_exit and self._owner.stop_ns is not None and now_ns > self._owner.stop_ns + EXIT_GRACE_NS:
            self._give_up("draining took longer than drain_timeout_s: the running batch is given up")
        limit_s = self._owner.options.run_timeout_s
        if limit_s is not None and self._may_exit and not self._is_supervised:
            began_ns = self._segment.overview().batch_started_ns
            if began_ns and now_ns > began_ns + limit_s * 1e9:
                lib.gw_recover(port, 1, lib.GW_KIND_STUCK)
                self._give_up("a batch ran for longer than run_timeout_s")

    def _reap(self) -> None:
        reaped = self._reaper.reap()
        lib.gw_free_strays(self._segment.port)
        if reaped:
            self._sweep()

    def _sweep(self, strangers: bool = False) -> None:
        try:
            spill.sweep(self._segment, strangers)
            chime.sweep(self._segment, strangers)
        except SegmentError as error:  # no descriptor to list the files by: there will be one
            log.info("payload files and FIFOs are looked after later: %s", error)

    def _give_up(self, why: str) -> None:
        log.error("%s", why)
        if not self._is_supervised:
            retire(self._segment)
        os._exit(1)
