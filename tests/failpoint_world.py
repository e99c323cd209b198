"""What test_failpoints.py runs under the build that has the failpoints: frontends, owners and supervisors that die or stop at a named point.

`python -m tests.failpoint_world` reads commands as lines of JSON, (method, arguments), and answers each with the list of what went wrong.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import json
import mmap
import os
import select
import signal
import sys
import threading
import time
import traceback

import numpy as np

import gpuworker
from gpuworker._native import ffi, lib
from gpuworker.segment import Geometry, Segment
from gpuworker.worker.job import Job
from gpuworker.worker.supervisor import Supervisor

PR_SET_PDEATHSIG = 1
PATIENCE_S = 20.0
MOST_ROUNDS = 30  # what one of them does not pass, a next one may
# Slots for everybody's quota: they send several requests before they read an answer.
OPTIONS = {
    "max_batch_size": 4, "capacity": 64, "max_clients": 32, "client_quota": 4, "wake": "park", "on_full": "block", "standby": True,
    "max_request_bytes": 4096, "max_response_bytes": 4096, "max_attempts": 1 << 20, "max_restarts": 1 << 20,
}  # fmt: skip
GONE = (gpuworker.WorkerDied, gpuworker.WorkerNotFound, gpuworker.WorkerDraining, gpuworker.RequestCancelled)


def run_batch(requests):
    """The handler. What is run is written down, so that it can be seen what ran twice."""
    answers = []
    for request in requests:
        if isinstance(request, list):
            what, number, *rest = request
            os.write(RUNS, f"{number} {os.getpid()}\n".encode())
            if what == "slow":
                time.sleep(rest[0] / 1e3)
            elif what == "arm" and rest[0] == os.getpid():  # not in the next owner, when this very request is run again
                arm(rest[1])
        answers.append(answer(request))
    return answers


def answer(request):
    if isinstance(request, np.ndarray):
        return request * 2
    if isinstance(request, bytes):
        return request[::-1]
    what, number, *rest = request
    return [number, bytes(rest[0])] if what == "large" else [number, np.full(8, number)] if what == "pieces" else [number]


RUNS = os.open(os.environ["FAILPOINT_RUNS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if "FAILPOINT_RUNS" in os.environ else -1


def arm(point, action=lib.GW_POINT_KILL, nth=1):
    assert lib.gw_failpoint_arm(point.encode(), action, nth) == 0, point


def eventually(condition, what):
    """Waits for what other processes do. The bound is for failures only."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise AssertionError(f"did not happen: {what}")
        time.sleep(0.002)


def in_child(body, *arguments):
    """Forks; the child's status is 1 if `body` raises."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            body(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def end_of(pid, options=0):
    """Waits for a child to end, or with WUNTRACED to stop. The status as waitpid gives it."""
    status = []

    def has_ended():
        found, how = os.waitpid(pid, options | os.WNOHANG)
        status.extend([how] * bool(found))
        return found

    try:
        eventually(has_ended, f"child {pid} ends or stops")
    except AssertionError:
        os.kill(pid, signal.SIGABRT)  # says where it is
        raise
    return status[0]


class Frontend:
    """Calls everything there is to call, and checks every answer."""

    def __init__(self, name, tolerant=False):
        self.name, self.number, self.errors = name, os.getpid() << 24, GONE if tolerant else ()

    def ask(self, what, *rest):
        self.number += 1
        return [what, self.number, *rest]

    def check(self, request, got):
        right = answer(request)
        same = np.array_equal(got, right) if isinstance(right, np.ndarray) else repr(got) == repr(right)
        assert same, f"asked {request!r}, got {got!r}"

    def submit(self, client, request):
        with contextlib.suppress(*self.errors):
            self.check(request, client.submit(request, timeout=PATIENCE_S))

    def result(self, request, pending):
        with contextlib.suppress(*self.errors):
            self.check(request, pending.result(PATIENCE_S))

    def round(self):
        with gpuworker.connect(self.name, on_full="block") as client, contextlib.suppress(*self.errors):
            self.submits(client)
            asyncio.run(self.awaits())
            self.cancels(client)
            self.waits_for_room(client)
            self.cancels_under_a_waiter(client)
            self.leaves_while_claiming(client)

    def submits(self, client):
        for _ in range(3):  # the second answer of one shape is received another way
            self.submit(client, np.arange(16) + self.number)
        self.submit(client, b"%d" % self.number)
        for request in (self.ask("echo"), self.ask("pieces"), self.ask("large", 10_000)):
            self.submit(client, request)
        self.submit(client, bytes(10_000))
        with contextlib.suppress(gpuworker.DeadlineExceeded):
            client.submit(self.ask("slow", 4), timeout=0.001)

    async def awaits(self):
        async with gpuworker.AsyncClient(self.name, on_full="block") as client:
            requests = [self.ask("slow", 1), *(self.ask("echo") for _ in range(5))]  # more than the quota
            answers = await asyncio.gather(*(client.submit(request, timeout=PATIENCE_S) for request in requests), return_exceptions=True)
            for request, got in zip(requests, answers, strict=True):
                if not isinstance(got, self.errors):
                    self.check(request, got)

    def cancels(self, client):
        link = client._link  # None while there is no worker, in the scenarios that kill it
        ticket = lib.gw_claim(link.port) if link else -1
        if ticket >= 0:
            lib.gw_cancel(link.port, ticket)
        running, queued = (client.enqueue(self.ask("slow", 2)) for _ in range(2))
        queued.cancel()
        del running  # RUNNING or READY
        answered = client.enqueue(self.ask("echo"))
        give_up_s = time.monotonic() + PATIENCE_S
        while not answered.done() and time.monotonic() < give_up_s:
            time.sleep(0.0005)
        del answered  # DONE
        overdue = client.enqueue(self.ask("echo"), timeout=0.0)  # nobody waits for it: the owner's to expire
        while not overdue.done() and time.monotonic() < give_up_s:
            time.sleep(0.0005)

    def waits_for_room(self, client):
        held = [self.ask("slow", 1) for _ in range(4)]
        pending = [(request, client.enqueue(request, timeout=PATIENCE_S)) for request in held]  # the quota

        def one_more():
            self.submit(client, self.ask("echo"))

        others = [threading.Thread(target=one_more) for _ in range(2)]
        for other in others:
            other.start()
        for request, one in pending:
            self.result(request, one)
        for other in others:
            other.join()

    def cancels_under_a_waiter(self, client):
        pending = client.enqueue(self.ask("slow", 3))

        def wait():
            with contextlib.suppress(gpuworker.RequestCancelled, *self.errors):
                pending.result(PATIENCE_S)

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.001)
        pending.cancel()
        waiter.join()

    def leaves_while_claiming(self, client):
        link = client._link
        ticket = lib.gw_claim(link.port)
        pending = client.enqueue(self.ask("slow", 1))
        client.close()
        if ticket >= 0:
            assert lib.gw_publish(link.port, ticket, 0, 0, 0) < 0
        with contextlib.suppress(gpuworker.RequestCancelled):
            pending.result(PATIENCE_S)
        link.segment.close()


class Bystanders:
    """Frontends that run on all the while, and must be served all the while."""

    def __init__(self, name, tolerant=False, count=2):
        self._rounds = np.frombuffer(mmap.mmap(-1, 8 * 16), np.int64)
        self._count, self.name = count, name
        self.pids = [in_child(self._run, i, tolerant) for i in range(count)]

    def _run(self, i, tolerant):
        frontend = Frontend(self.name, tolerant)
        while True:
            if self._rounds[8]:
                gc.collect()  # an error's traceback may keep a closed client's port open, and so its place taken
            while self._rounds[8]:
                self._rounds[9 + i] = 1
                time.sleep(0.001)
            self._rounds[9 + i] = 0
            frontend.round()
            self._rounds[i] += 1

    def await_progress(self, rounds=2):
        """Each of them has been served since this was called."""
        before = self._rounds.copy()

        def went_on():
            for pid in self.pids:
                assert os.waitpid(pid, os.WNOHANG) == (0, 0), f"bystander {pid} has ended"
            return all(self._rounds[i] >= before[i] + rounds for i in range(self._count))

        eventually(went_on, "the others are served")

    @contextlib.contextmanager
    def paused(self):
        """None of them is in a call."""
        self._rounds[8] = 1
        eventually(lambda: all(self._rounds[9 + i] for i in range(self._count)), "the others pause")
        yield
        self._rounds[8] = 0

    def all_is_free(self, what):
        """Every slot, every place, every file."""
        with self.paused():
            segment = Segment.attach(self.name)
            eventually(lambda: segment.overview().in_use == 0, f"{what}: all slots are free")
            eventually(lambda: lib.gw_next_participant(segment.port, 0) == 0, f"{what}: all places are free")
            beside = f"gpuworker-{self.name}."
            eventually(lambda: not any(file.startswith(beside) for file in os.listdir("/dev/shm")), f"{what}: no file is left")

    def end(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def runs_more_than_once(owners_died):
    """Requests that ran oftener than owners died."""
    counts = {}
    with open(os.environ["FAILPOINT_RUNS"]) as file:
        for line in file:
            number, _ = line.split()
            counts[number] = counts.get(number, 0) + 1
    return [number for number, n in counts.items() if n > 1 + owners_died]


class World:
    """The scenarios. Each takes a list of points and returns what went wrong, by point."""

    def __init__(self):
        self.name = f"t-{os.getpid()}-points"
        self.worker = self.bystanders = None

    def start(self):
        self.worker = gpuworker.Worker("tests.failpoint_world:run_batch", name=self.name, **OPTIONS).start()
        self.bystanders = Bystanders(self.name)

    @staticmethod
    def points():
        names, i = [], 0
        while (found := lib.gw_failpoint_name(i)) != ffi.NULL:
            names.append(ffi.string(found).decode())
            i += 1
        return names

    def stop(self):
        self.bystanders.end()
        self.worker.stop()

    # Frontends, several victims at a time.

    def frontends_killed(self, names):
        return self._frontends(names, lib.GW_POINT_KILL, os.WIFSIGNALED)

    def frontends_stopped(self, names):
        return self._frontends(names, lib.GW_POINT_STOP, os.WIFSTOPPED)

    def _frontends(self, names, action, has_been_hit):
        wrong = []
        for k in range(0, len(names), 4):
            group = names[k : k + 4]
            pids = [in_child(self._victim, name, action) for name in group]
            hit = {pid: has_been_hit(end_of(pid, os.WUNTRACED)) for pid in pids}
            wrong += [f"{name} was not reached" for name, pid in zip(group, pids, strict=True) if not hit[pid]]
            self.bystanders.await_progress()
            for name, pid in zip(group, pids, strict=True):
                if hit[pid] and action == lib.GW_POINT_STOP:
                    os.kill(pid, signal.SIGCONT)
                    status = end_of(pid)
                    wrong += [f"{name}: stopped there and let go on, it ended with {status}"] if status else []
            self.bystanders.all_is_free(group)
        twice = runs_more_than_once(0)
        return wrong + [f"request {number} ran twice" for number in twice]

    def _victim(self, point, action):
        arm(point, action)
        frontend = Frontend(self.name)
        went_on = []
        signal.signal(signal.SIGCONT, lambda *_: went_on.append(True))
        for _ in range(MOST_ROUNDS):
            frontend.round()
            if went_on:
                return

    # The owner, under the supervisor of a Worker.

    def owners_killed(self, names):
        wrong = []
        client = self.worker.connect(on_full="block")
        for name in names:
            eventually(lambda: self.worker.pid, "an owner")
            pid = self.worker.pid
            watched = os.pidfd_open(pid)
            client.submit(["arm", -pid, pid, name], timeout=PATIENCE_S)
            give_up_s = time.monotonic() + PATIENCE_S
            while not gone(watched) and time.monotonic() < give_up_s:
                if name.startswith(("reap", "space")):
                    end_of(in_child(self._die_with_slots))
                time.sleep(0.001)
            wrong += [] if gone(watched) else [f"{name} was not reached"]
            os.close(watched)
            self.bystanders.await_progress(1)
        client.close()
        self.bystanders.all_is_free("owners killed")
        return wrong + [f"request {number} ran again and again" for number in runs_more_than_once(3)]

    def _die_with_slots(self):
        client = gpuworker.connect(self.name)
        left = [client.enqueue(["slow", os.getpid() << 24, 1]) for _ in range(2)]
        os.kill(os.getpid(), signal.SIGKILL)
        return left

    # Supervisors: each dies at a point, at its start or when its owner has died, and another one comes.

    def supervisors_killed(self, names):
        wrong = []
        for k in range(0, len(names), 3):
            group = [SupervisedWorld(name) for name in names[k : k + 3]]
            for step in (SupervisedWorld.start, SupervisedWorld.await_death, SupervisedWorld.restart, SupervisedWorld.end):
                wrong += [problem for world in group if (problem := step(world))]
        return wrong

    def owners_killed_in_recovery(self, names):
        return [problem for name in names if (problem := recover_with_a_death_at(name))]


class SupervisedWorld:
    """A worker whose supervisor dies at one point."""

    AT_START = ("format_written", "identity_odd", "identity_written")
    AT_STOP = ("wake_all_posted", "wake_all_bumped")

    def __init__(self, point):
        self.point, self.name = point, f"t-{os.getpid()}-{point.replace('_', '-')}"
        self.others = None
        self.supervisor = in_child(self._supervise, point)

    def _supervise(self, point=None):
        if point:
            arm(point, nth=2 if point == "note_written" else 1)  # the first note is an empty one
        Supervisor(Job.of("tests.failpoint_world:run_batch", self.name, OPTIONS), lambda **_: None).run()

    def _owner_pid(self):
        try:
            segment = Segment.attach(self.name, read_only=True)
        except gpuworker.GpuWorkerError:
            return 0
        return segment.overview().state == lib.GW_SERVING and not segment.owner_is_dead() and segment.owner().pid

    def start(self):
        if self.point in self.AT_START:
            return
        self.others = Bystanders(self.name, tolerant=True)
        self.others.await_progress()
        if self.point in self.AT_STOP:
            os.kill(self.supervisor, signal.SIGTERM)

    def await_death(self):
        if self.point not in (*self.AT_START, *self.AT_STOP):  # an owner that was running nothing leaves less to do than one that was
            eventually(lambda: not self._is_supervised_after_a_death(), f"{self.point} is reached")
        status = end_of(self.supervisor)
        if not os.WIFSIGNALED(status):
            return f"{self.point} was not reached: {status}"
        return None

    def _is_supervised_after_a_death(self):
        if owner := self._owner_pid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(owner, signal.SIGKILL)
        time.sleep(0.01)
        return os.waitid(os.P_PID, self.supervisor, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def restart(self):
        self.supervisor = in_child(self._supervise)
        self.others = self.others or Bystanders(self.name, tolerant=True)
        self.others.await_progress()
        self.others.all_is_free(self.point)

    def end(self):
        self.others.end()
        os.kill(self.supervisor, signal.SIGTERM)
        status = end_of(self.supervisor)
        if status or any(file.startswith(f"gpuworker-{self.name}") for file in os.listdir("/dev/shm")):
            return f"{self.point}: the last supervisor ended with {status}"
        return None


# Recovery, step by step: no Worker, but bare owners, one after the other, on a ring that has a slot in every state.

CLAIMED, QUEUED, COLLECTED, RUNNING, RESPONDED, ABANDONED, ANSWERED = range(7)
PHASES = {CLAIMED: 1, QUEUED: 2, COLLECTED: 2, RUNNING: 3, RESPONDED: 3, ABANDONED: 5, ANSWERED: 4}  # as native/layout.h counts them
TOO_OFTEN = ("recover_too_often", "recover_refused", "finish_looked", "finish_done", "finish_posted")
GEOMETRY = Geometry(capacity=8, max_request_bytes=64, max_response_bytes=512, max_participants=4)


def recover_with_a_death_at(point):
    """An owner dies, a second one dies while it recovers, a third one serves. What went wrong, or None."""
    name = f"t-{os.getpid()}-{point.replace('_', '-')}"
    first = in_child(leave_every_state, name)
    segment = client_of(name)
    try:
        tickets = submit_every_state(segment, first)
        if not os.WIFSIGNALED(end_of(in_child(recover, name, point))):
            return f"{point} was not reached"
        last = in_child(serve_all, name)
        if lib.gw_publish(segment.port, tickets[CLAIMED], GW_BYTES_OF_1, 0, 0):
            return f"{point}: the claimed slot is lost"
        for what, ticket in tickets.items():
            response = lib.gw_wait(segment.port, ticket, time.monotonic_ns() + int(PATIENCE_S * 1e9), int(PATIENCE_S * 1e9))
            kind, got = response >> 54, bytes(segment.response_buffers[ticket & 0xFFF][: response & 0xFF])
            if what == ABANDONED:
                right = response < 0
            elif kind == lib.GW_KIND_BYTES:
                right = got == b"answer to %d" % what
            else:
                right = kind in ((lib.GW_KIND_DIED,) * (point in TOO_OFTEN) + (lib.GW_KIND_DRAINING,) * point.startswith("refuse"))
            if not right or (what != ABANDONED and lib.gw_release(segment.port, ticket)):
                return f"{point}: request {what} got {response} ({kind}, {got})"
        eventually(lambda: segment.overview().in_use == 0, f"{point}: all slots are free")
        os.kill(last, signal.SIGKILL)
        end_of(last)
    finally:
        segment.close()
        Segment.discard(name)


GW_BYTES_OF_1 = lib.GW_KIND_BYTES << 54 | 1


def owner_of(name):
    segment = Segment.own(name, GEOMETRY)
    lib.gw_set_policy(segment.port, lib.GW_BLOCK, lib.GW_PARK, 8, 8, 0, 8)
    assert lib.gw_open_backlog(segment.port) == 0
    return segment


def client_of(name):
    found = []

    def has_attached():
        with contextlib.suppress(gpuworker.GpuWorkerError):
            found.append(Segment.attach(name))
        return found and found[-1].overview().state == lib.GW_SERVING

    eventually(has_attached, "an owner")
    assert found[-1].join()
    return found[-1]


def submit_every_state(segment, owner):
    """One request for each state, by state; the owner brings each where it is to be, and dies."""
    port = segment.port
    tickets = {CLAIMED: lib.gw_claim(port)}
    segment.requests[tickets[CLAIMED] & 0xFFF][:1] = b"%d" % CLAIMED
    for what in (RUNNING, RESPONDED, ABANDONED, ANSWERED, COLLECTED, QUEUED):
        tickets[what] = lib.gw_submit(port, lib.GW_KIND_BYTES, b"", 0, b"%d" % what, 1, 0, 0)
        if what == ANSWERED:
            eventually(lambda: lib.gw_phase(port, tickets[ANSWERED]) == PHASES[ANSWERED], "one is answered")
        elif what == COLLECTED:
            assert lib.gw_cancel(port, tickets[ABANDONED]) == 1
            assert os.WIFSIGNALED(end_of(owner))
    found = {what: lib.gw_phase(port, ticket) for what, ticket in tickets.items()}
    assert found == PHASES, found
    return tickets


def collect_and_take(port, count):
    taken = ffi.new("uint64_t[]", 16)
    eventually(lambda: lib.gw_collect(port, time.monotonic_ns() + 10_000_000) >= count, "requests")
    return taken, lib.gw_take(port, count, 0, taken)


def respond(segment, ticket):
    text = b"answer to " + bytes(segment.request_buffers[ticket & 0xFFF][:1])
    lib.gw_respond(segment.port, ticket, lib.GW_KIND_BYTES, b"", 0, text, len(text))


def leave_every_state(name):
    """The first owner."""
    segment = owner_of(name)
    port = segment.port
    lib.gw_set_state(port, lib.GW_SERVING)
    taken, n = collect_and_take(port, 4)
    assert n == 4
    _, responded, abandoned, answered = ffi.unpack(taken, 8)[::2]
    respond(segment, responded)
    respond(segment, answered)
    lib.gw_finish(port, taken + 6, 1)
    eventually(lambda: lib.gw_collect(port, 0) == 1, "one more is collected")
    eventually(lambda: lib.gw_phase(port, abandoned) == PHASES[ABANDONED], "one is cancelled")
    os.kill(os.getpid(), signal.SIGKILL)


def recover(name, point):
    """The second owner."""
    arm(point)
    segment = owner_of(name)
    lib.gw_recover(segment.port, 1 if point in TOO_OFTEN else 1 << 20, lib.GW_KIND_DIED)
    if point.startswith("refuse"):
        lib.gw_refuse_all(segment.port, lib.GW_KIND_DRAINING)
    lib.gw_wake_all(segment.port)


def serve_all(name):
    """The third owner."""
    segment = owner_of(name)
    port = segment.port
    lib.gw_recover(port, 1 << 20, lib.GW_KIND_DIED)
    lib.gw_set_state(port, lib.GW_SERVING)
    while True:
        taken, n = collect_and_take(port, 1)
        for ticket in ffi.unpack(taken, 2 * n)[::2]:
            respond(segment, ticket)
        lib.gw_finish(port, taken, n)


def gone(pidfd):
    """Whether the process is dead."""
    return bool(select.select([pidfd], [], [], 0)[0])


def main():
    faulthandler.enable()
    world = World()
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            result = getattr(world, method)(*arguments)
        except Exception:
            result = [traceback.format_exc()]
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
