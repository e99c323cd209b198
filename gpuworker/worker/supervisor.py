"""Keeps an owner running: the process that `gpuworker serve` is, and that a Worker starts.

A process of its own, because whoever wants a worker (a gunicorn master, a program that forks) must not block while a model is loaded again, and should
have no threads. It never imports the handler. The chain is starter -> supervisor -> owner; each ends when the one before it does, however that one
ends. While there is no owner the supervisor keeps the segment: what is queued stays queued, and what the dead owner was running is dealt with at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gpuworker._native import lib
from gpuworker.errors import WorkerAlreadyRunning
from gpuworker.segment import Segment
from gpuworker.worker import aftermath
from gpuworker.worker.descendants import adopting_orphans, kill_orphans, send_sigkill
from gpuworker.worker.job import Job
from gpuworker.worker.listener import RELOAD, Listener
from gpuworker.worker.notify import Notifier
from gpuworker.worker.options import WorkerOptions
from gpuworker.worker.owner_process import OwnerProcess
from gpuworker.worker.reaper import retire
from gpuworker.worker.restarts import Restarts

log = logging.getLogger("gpuworker.supervisor")

TICK_S = 1.0
STOP_MARGIN_S = 3.0
"""How long an owner may take to end beyond its drain_timeout_s."""
NAME_POLL_S = 0.2

Report = Callable[..., None]


class Supervisor:
    """`report` is called once: with the first owner's pid, or with the error (and traceback) that prevented one. `notifier`: for a service manager that has
    started this very process."""

    def __init__(self, job: Job, report: Report, parent_pid: int | None = None, notifier: Notifier | None = None) -> None:
        self._notifier = notifier
        self._job, self._report = job, report
        self.options = WorkerOptions.of(job.options)
        self._listener = Listener(parent_pid)
        self._restarts, self._next_restarts = Restarts(self.options.max_restarts), Restarts(None)
        self._owner: OwnerProcess | None = None
        self._next: OwnerProcess | None = None  # loading, or loaded and waiting for its turn
        self._retiring: list[OwnerProcess] = []  # have given the segment up
        self._start_at_s = self._start_next_at_s = 0.0
        self._reload_is_wanted = self._is_reloading = False
        self._batches = 0  # run before the present owner began
        self._ready_once = False
        self._stops = 0
        self._stop_by_s = 0.0
        self._status_when_stopped = 0
        self._exit_status: int | None = None

    def run(self, wait_for_name: bool = False) -> int:
        """Supervises until stopped, or until the worker has failed. -> the exit status. Call it once, from the main thread."""
        with self._listener:
            segment = self._take_name(wait_for_name)
            return 0 if segment is None else self._supervise(segment)

    def _take_name(self, patiently: bool) -> Segment | None:
        while True:
            try:
                return Segment.hold(self._job.name, self.options.geometry)
            except WorkerAlreadyRunning as error:
                if not patiently:
                    raise
                self._report(pid=error.pid)
            self._listener.wait((), NAME_POLL_S)
            if set(self._listener.take_signals()) - {RELOAD} or self._listener.parent_is_gone():
                return None

    def _supervise(self, segment: Segment) -> int:
        self.segment = segment
        with adopting_orphans() as self._strangers:
            try:
                while self._exit_status is None:
                    self._step()
                    if self._exit_status is None:
                        self._wait()
                return self._exit_status
            finally:
                processes = self._processes()
                for process in processes:
                    process.kill()
                kill_orphans(self._strangers)
                for process in processes:
                    process.close()
                if self._exit_status is None:  # an error of ours
                    retire(segment)
                segment.close()

    # One step: look at everything, do what follows from it. Nothing here waits, but for processes that were killed.

    def _step(self) -> None:
        now_s = time.monotonic()
        for process in self._processes():
            process.pump()
        self._listen(now_s)
        self._look_at_retiring()
        self._look_at_owner(now_s)
        self._look_at_next(now_s)
        if self._notifier is not None:
            self._notify(self._notifier)

    def _listen(self, now_s: float) -> None:
        came = self._listener.take_signals()
        self._reload_is_wanted |= RELOAD in came
        if any(number != RELOAD for number in came) or (not self._stops and self._listener.parent_is_gone()):
            self._stops += 1
            if self._notifier is not None and self._stops == 1:
                self._notifier.stopping()
            self._stop_by_s = now_s + self.options.drain_timeout_s + STOP_MARGIN_S
            if self._next is not None:
                self._next.kill()
            if self._owner is not None:
                self._owner.stop()
        elif self._reload_is_wanted and self._ready_once and not self._is_reloading and not self._stops:
            self._reload_is_wanted, self._is_reloading = False, True
            log.info("worker %s: loading a new owner", self._job.name)
            if self._next is not None:  # a standby, with what was there to load when it was started
                self._next.kill()
                self._retiring.append(self._next)
            self._next = OwnerProcess(self._job)

    def _look_at_retiring(self) -> None:
        for process in [process for process in self._retiring if process.has_ended()]:
            self._retiring.remove(process)
            self._close(process)

    def _look_at_owner(self, now_s: float) -> None:
        owner = self._owner
        if owner is None:
            if self._stops:
                if not self._processes():
                    self._finish(self._status_when_stopped)
            elif self._next is None and now_s >= self._start_at_s:
                self._promote(OwnerProcess(self._job))
        elif owner.released:
            self._retiring.append(owner)
            self._owner = None
            self._promote_next()
        elif owner.has_ended():
            self._owner = None
            self._bury(owner)
        elif owner.ready:
            self._look_at_serving(owner, now_s)
        elif now_s > owner.started_s + self.options.startup_timeout_s:
            owner.kill(f"was not ready within startup_timeout_s={self.options.startup_timeout_s:g}")
        if self._stops and now_s > self._stop_by_s:
            for process in self._processes():
                process.kill("did not stop")

    def _look_at_serving(self, owner: OwnerProcess, now_s: float) -> None:
        if not self._ready_once:
            self._ready_once = True
            self._report(pid=owner.pid)
            if self._notifier is not None:
                self._notifier.ready()
        if self._is_reloading and self._next is None:  # it is the one that was loaded
            self._is_reloading = False
            lib.gw_count_event(self.segment.port, lib.GW_RELOADED)
            log.info("worker %s: the new owner (pid %d) serves", self._job.name, owner.pid)
        limit_s = self.options.run_timeout_s
        if limit_s is None:
            return
        began_ns = self.segment.overview().batch_started_ns
        if began_ns and time.monotonic_ns() > began_ns + limit_s * 1e9:
            owner.kill(f"ran a batch for longer than run_timeout_s={limit_s:g} and was ended")

    def _look_at_next(self, now_s: float) -> None:
        following, serves = self._next, self._owner is not None and self._owner.ready
        if following is None:
            if self.options.standby and serves and not self._stops and now_s >= self._start_next_at_s:
                self._next = OwnerProcess(self._job)
        elif following.has_ended():
            self._next = None
            self._close(following)
            self._start_next_at_s = now_s + (self._next_restarts.pause_s(following.loaded) or 0)
            if not self._stops:
                self._say_why_not(following)
        elif following.loaded and self._owner is None:
            self._promote_next()
        elif following.loaded and self._is_reloading and serves and self._owner is not None and not self._owner.is_told_to_release:
            self._owner.release()
        elif not following.loaded and now_s > following.started_s + self.options.startup_timeout_s:
            following.kill(f"was not loaded within startup_timeout_s={self.options.startup_timeout_s:g}")

    def _notify(self, notifier: Notifier) -> None:
        """How it is, and that it is well: while an owner serves, that is for its heartbeat to say; at all other times this process looks after itself."""
        owner, age_s = self._owner, 0.0
        if self._stops:
            words = "draining"
        elif owner is not None and owner.ready:
            words = f"worker {self._job.name} is served by process {owner.pid}"
            age_s = (time.monotonic_ns() - self.segment.overview().heartbeat_ns) / 1e9
        else:
            words = f"worker {self._job.name} is {'waiting for another owner' if self._ready_once else 'loading'}"
        notifier.status(words + (", a new owner loads" if self._is_reloading else ""))
        notifier.feed(age_s)

    def _promote_next(self) -> None:
        if self._next is not None and self._next.loaded and not self._stops:
            following, self._next = self._next, None
            self._promote(following)

    def _promote(self, process: OwnerProcess) -> None:
        self._owner = process
        self._batches = self._batches_run()
        process.started_s = time.monotonic()
        process.go()

    # Deaths.

    def _bury(self, owner: OwnerProcess) -> None:
        """The owner has ended. What it ran is dealt with before anything else, then who comes next."""
        again = 0
        send_sigkill(self._spared())  # not waited for yet
        if self._stops:
            aftermath.tell_died(self.segment)
            self._status_when_stopped = int(owner.ready and owner.status != 0)
        elif owner.ready and owner.killed_because:
            aftermath.tell_stuck(self.segment)
        elif self._ready_once:
            again = aftermath.requeue(self.segment, self.options.attempts)
        self._close(owner)
        how = f"could not start: {owner.error}" if owner.error else owner.end
        if not self._ready_once:
            self._report(
                error=owner.error or f"its owner {how}, before it was ready", traceback=owner.traceback, words="" if owner.error else owner.last_words
            )
            self._finish(1)
            return
        if self._stops:
            return
        log.warning("the owner of worker %s (pid %d) %s; of what it was running %d will be run again", self._job.name, owner.pid, how, again)
        pause_s = self._restarts.pause_s(self._batches_run() > self._batches)
        if pause_s is None:
            n = self._restarts.fruitless
            self._note(f"{n} owners in a row died before they had answered anything, the last one {how}" if n > 1 else f"its owner {how}", owner)
            aftermath.fail(self.segment)
            log.error("worker %s has failed: %s", self._job.name, self.segment.note())
            self._exit_status = 1
            return
        self._note(f"the owner {how}", owner)
        lib.gw_count_event(self.segment.port, lib.GW_RESTARTED)
        self._start_at_s = time.monotonic() + pause_s
        if self._next is None and pause_s:
            log.warning("starting another owner of worker %s in %g s", self._job.name, pause_s)

    def _say_why_not(self, process: OwnerProcess) -> None:
        """A standby, or the owner that a reload asked for, could not be loaded."""
        how = process.error or process.end
        if self._is_reloading:
            self._is_reloading = False
            self._note(f"the new owner could not be loaded, the old one goes on: {how}", process)
            lib.gw_count_event(self.segment.port, lib.GW_RELOAD_FAILED)
        log.error("worker %s: no other owner could be loaded: %s", self._job.name, how)

    def _note(self, what: str, process: OwnerProcess) -> None:
        words = process.last_words
        note = (f"{what}. Its last words:\n{words}" if words else what).encode()
        lib.gw_set_note(self.segment.port, note, len(note))

    def _finish(self, status: int) -> None:
        lib.gw_refuse_all(self.segment.port, lib.GW_KIND_DRAINING)
        retire(self.segment)
        self._exit_status = status

    def _close(self, process: OwnerProcess) -> None:
        """For one that has ended: what it left behind ends too."""
        kill_orphans(self._spared())
        process.close()

    def _spared(self) -> list[int]:
        return [*self._strangers, *(process.pid for process in self._processes())]

    def _processes(self) -> list[OwnerProcess]:
        return [process for process in (self._owner, self._next, *self._retiring) if process is not None]

    def _batches_run(self) -> int:
        return int(self.segment.overview().batches)

    def _wait(self) -> None:
        """Until something happens, or it is time for something."""
        longest_s = TICK_S if self._notifier is None else min(TICK_S, self._notifier.longest_wait_s)
        if self.options.run_timeout_s is not None:
            longest_s = min(longest_s, max(self.options.run_timeout_s / 4, 0.01))
        if self._owner is None and self._next is None and not self._retiring:
            longest_s = min(longest_s, max(self._start_at_s - time.monotonic(), 0))
        self._listener.wait([fd for process in self._processes() for fd in process.fds], longest_s, for_parent=not self._stops)
