"""Starts everything, breaks it at random, and counts."""

import collections
import os
import random
import signal
import sys
import time
import traceback

import gpuworker
from tests.soak import leaks, work
from tests.soak.frontend import PATIENCE_S, Frontend
from tests.soak.records import COUNTS, ERRORS, EXPECTED, Records

FRONTEND_FAULT_EVERY_S, OWNER_FAULT_EVERY_S = 0.05, 5.0
LONGEST_STOP_S = 0.2
LOST_AFTER_S = 20.0
"""A call that takes longer than this, its frontend running all the while, is lost. Well below the frontends' own patience."""
OPTIONS = {
    "max_batch_size": 16, "capacity": 64, "max_clients": 64, "max_request_bytes": 8192, "max_response_bytes": 8192, "standby": True,
    "max_attempts": 1 << 30, "max_restarts": 1 << 30,
}  # fmt: skip


class Driver:
    def __init__(self, places, seed):
        assert LOST_AFTER_S < PATIENCE_S
        self.chance, self.places = random.Random(seed), places
        self.records, self.counts = Records(places), collections.Counter()
        self.worker = gpuworker.Worker(work.run_batch, name=f"soak-{os.getpid()}", **OPTIONS)
        self.pids, self.lives = [0] * places, 0
        self.stopped = {}  # pid -> (place or None for an owner, when it goes on)
        self.lost, self.odd_ends = [], []
        self.killed_on_their_way = 0

    def run(self, seconds):
        with self.worker:
            self._settle()
            before = leaks.Footprint(self.worker)
            for place in range(self.places):
                self._start_frontend(place)
            self._break_things(seconds)
            self._end_frontends()
            leaked = self._leaks_of_the_living(before)
            stats = self.worker.stats()
        files = leaks.settled(lambda: leaks.shm_files(self.worker.name), lambda found: not found)
        leaked += [f"/dev/shm/{file}" for file in files] + [f"zombie {pid}" for pid in leaks.zombies()]
        return self._report(stats, leaked)

    # Faults.

    def _break_things(self, seconds):
        now_s = time.monotonic()
        end_s, owner_every_s = now_s + seconds, min(OWNER_FAULT_EVERY_S, seconds / 4)
        next_frontend_s, next_owner_s, next_other_s = now_s, now_s + owner_every_s / 2, now_s + owner_every_s
        while now_s < end_s:
            if now_s >= next_frontend_s:
                next_frontend_s += FRONTEND_FAULT_EVERY_S
                self._frontend_fault(now_s)
            if now_s >= next_owner_s:
                next_owner_s += owner_every_s
                self._kill_owner()
            if now_s >= next_other_s:
                next_other_s += owner_every_s
                self.chance.choice((self._kill_spare, self._stop_owner, self._reload))(now_s)
            self._let_go_on(now_s)
            self._look_for_lost()
            time.sleep(max(min(next_frontend_s, next_owner_s, next_other_s, now_s + 0.02) - time.monotonic(), 0))
            now_s = time.monotonic()

    def _start_frontend(self, place):
        self.lives += 1
        self.records.begin(place, 0)
        pid = os.fork()
        if pid:
            self.pids[place] = pid
            return
        status = 1
        try:
            Frontend(self.worker.name, self.records, place, self.lives).run()
            status = 0
        except BaseException:
            self.records.note(place, traceback.format_exc())
        finally:
            os._exit(status)

    def _frontend_fault(self, now_s):
        place = self.chance.randrange(self.places)
        pid = self.pids[place]
        if pid in self.stopped:
            return
        if self.chance.random() < 0.5:
            self._stop(pid, place, now_s)
            self.counts["frontends stopped"] += 1
        else:
            self._kill_frontend(place)
            self._start_frontend(place)

    def _kill_frontend(self, place):
        os.kill(self.pids[place], signal.SIGKILL)
        _, status = os.waitpid(self.pids[place], 0)
        self.stopped.pop(self.pids[place], None)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            self.odd_ends.append(f"a frontend had ended with {os.waitstatus_to_exitcode(status)}")
        self.counts["frontends killed"] += 1
        on_their_way = self.records.on_their_way(place)
        self.killed_on_their_way += on_their_way
        self.records.add(place, "dropped", on_their_way)

    def _kill_owner(self):
        pid = self.worker.pid
        if pid is not None:
            self.records.owner_died(time.monotonic_ns())
            self._signal(pid, signal.SIGKILL)
            self.counts["owners killed"] += 1

    def _kill_spare(self, now_s):
        spare = [child.pid for child in leaks.owners_of(self.worker.supervisor_pid) if child.pid != self.worker.pid]
        if spare:
            self._signal(spare[0], signal.SIGKILL)
            self.counts["spares killed"] += 1

    def _stop_owner(self, now_s):
        pid = self.worker.pid
        if pid is not None and pid not in self.stopped:
            self._stop(pid, None, now_s)
            self.counts["owners stopped"] += 1

    def _reload(self, now_s):
        self._signal(self.worker.supervisor_pid, signal.SIGUSR1)
        self.counts["reloads asked for"] += 1

    @staticmethod
    def _signal(pid, number):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def _stop(self, pid, place, now_s):
        if place is not None:
            self.records.paused(place, time.monotonic_ns())
        if self._signal(pid, signal.SIGSTOP):
            self.stopped[pid] = (place, now_s + self.chance.random() * LONGEST_STOP_S)

    def _let_go_on(self, now_s):
        for pid, (place, until_s) in list(self.stopped.items()):
            if now_s >= until_s:
                del self.stopped[pid]
                self._signal(pid, signal.SIGCONT)
                if place is not None:
                    self.records.paused(place, time.monotonic_ns())

    # What became of it.

    def _look_for_lost(self):
        now_ns = time.monotonic_ns()
        for place, pid in enumerate(self.pids):
            since_ns = self.records.since_ns(place)
            if pid and pid not in self.stopped and since_ns and now_ns - since_ns > LOST_AFTER_S * 1e9:
                self.lost.append(f"frontend {pid} has been in a call for {(now_ns - since_ns) / 1e9:.1f} s; {self.worker.stats()}")
                self._kill_frontend(place)
                self._start_frontend(place)

    def _end_frontends(self):
        self._let_go_on(float("inf"))
        self.records.finish()
        give_up_s = time.monotonic() + LOST_AFTER_S
        for place, pid in enumerate(self.pids):
            ended = status = 0
            while not ended and time.monotonic() < give_up_s:
                ended, status = os.waitpid(pid, os.WNOHANG)
                time.sleep(0 if ended else 0.005)
            if not ended:
                self.lost.append(f"frontend {pid} did not end; {self.worker.stats()}")
                self._kill_frontend(place)
            elif status:
                self.odd_ends.append(f"a frontend ended with {os.waitstatus_to_exitcode(status)}")
            elif self.records.on_their_way(place):
                self.lost.append(f"{self.records.on_their_way(place)} requests of frontend {pid} have not ended in anything")
            self.pids[place] = 0

    def _settle(self):
        """Until owner and spare are there and idle."""
        leaks.settled(lambda: len(leaks.owners_of(self.worker.supervisor_pid)), lambda n: n == 2)
        leaks.settled(lambda: self.worker.pid, bool)
        self.worker.connect().submit(b"are you there?", timeout=PATIENCE_S)
        stats = leaks.settled(self.worker.stats, lambda now: not now.clients and not now.slots_in_use)
        time.sleep(0.5)  # the spare may be loading still
        return stats

    def _leaks_of_the_living(self, before):
        stats = self._settle()
        leaked = [f"{stats.slots_in_use} slots"] if stats.slots_in_use else []
        leaked += [f"the place of client {client.pid}" for client in stats.clients]
        leaked += leaks.settled(lambda: [f"/dev/shm/{file}" for file in leaks.shm_files(self.worker.name)[1:]], lambda found: not found)
        leaked += [f"zombie {pid}" for pid in leaks.settled(leaks.zombies, lambda found: not found)]
        return leaked + leaks.Footprint(self.worker).growth(before)

    def _report(self, stats, leaked):
        records = self.records
        needless = {kind: records.total(kind) for kind in ERRORS if kind not in EXPECTED and records.total(kind)}
        rows = [("requests", records.total("sent"))]
        rows += [(f"  {what}", records.total(what)) for what in COUNTS[1:] if records.total(what) or what == "right"]
        rows += [("    of the dropped, killed with their frontend", self.killed_on_their_way)]
        rows += sorted(self.counts.items())
        rows += [("owner restarts", stats.restarts), ("reloads", stats.reloads), ("run again after a death", stats.requeued)]
        rows += [("slots taken back from the dead", stats.reaped_slots), ("clients found dead or gone", stats.reaped_clients)]
        rows += [("late wakes", stats.late_wakes)]
        latencies = records.latencies_ms()
        if len(latencies):
            p50, p99, most = (latencies[min(int(q * len(latencies)), len(latencies) - 1)] for q in (0.5, 0.99, 1))
            rows += [("calls under way when an owner was killed", len(latencies))]
            rows += [("  from the kill to their end, ms: p50, p99, max", f"{p50:.1f}, {p99:.1f}, {most:.1f}")]
        zeros = {"wrong": records.total("wrong"), "lost": len(self.lost), "leaked": len(leaked), "needless errors": sum(needless.values()),
                 "processes that ended oddly": len(self.odd_ends)}  # fmt: skip
        for label, value in (*rows, *zeros.items()):
            print(f"{label:<46} {value:>12,}" if isinstance(value, int) else f"{label:<46} {value:>12}")
        for evidence in (*self.lost, *leaked, *self.odd_ends, *records.notes()):
            print(f"! {evidence}")
        sys.stdout.flush()
        return int(any(zeros.values()))
