"""Processes that are stopped for longer than anybody waits: nobody takes them for dead, nobody waits for them, and they go on where they were."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest

import gpuworker
from gpuworker.segment import Segment
from gpuworker.segment.stats import Stats
from tests import handlers
from tests.conftest import eventually
from tests.test_fork import in_child, succeeded

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

BIG = 100_000  # bytes: more than a slot holds
SERVE = "import json, sys, gpuworker; gpuworker.serve(sys.argv[1], name=sys.argv[2], **json.loads(sys.argv[3]))"


@pytest.fixture
def serve(name):
    """Starts an owner that nobody supervises, and waits until it serves; the one before it must be dead. `before`: what to start it with."""
    started = []

    def start(handler, before=(), **options):
        command = [*before, sys.executable, "-c", SERVE, f"tests.handlers:{handler.__name__}", name, json.dumps(options)]
        started.append(subprocess.Popen(command))
        eventually(is_served)
        return started[-1]

    def is_served():
        assert started[-1].poll() is None
        try:
            stats = Stats.of(name)
        except gpuworker.GpuWorkerError:
            return False
        return stats.owner_alive and stats.state == "serving"

    yield start
    for process in started:
        process.kill()
        process.wait()
    eventually(lambda: Segment.discard(name) or not os.path.exists(f"/dev/shm/gpuworker-{name}"))


@pytest.fixture
def forked():
    """Calls a function in a forked child, which does not outlive the test, stopped or not. -> its pid"""
    pids = []

    def start(call):
        pids.append(in_child(call))
        return pids[-1]

    yield start
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # the test has waited for it
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def kill(process):
    process.kill()
    process.wait()


def outlast_every_timer(name, ticks=4):
    """Until the owner's keeper has come round some times: each looks for the dead, and takes longer than a client trusts its owner."""
    segment, beats = Segment.attach(name, read_only=True), set()

    def came_round():
        beats.add(segment.overview().heartbeat_ns)
        return len(beats) > ticks

    eventually(came_round)


def others_go_on(client, count=300):
    assert [client.submit(i) for i in range(count)] == list(range(count))
    assert (client.submit(np.arange(100)) == np.arange(100)).all()
    assert client.submit(bytes(BIG)) == bytes(BIG)


def stop_myself():
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_until_stopped(pid):
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    wait_until_stopped(pid)


def wait_until_asleep_in_the_ring(pid):
    """For a client with wake="park", which in the end sleeps in a futex."""

    def is_asleep():
        where = pathlib.Path(f"/proc/{pid}/wchan").read_text()  # "0" where the kernel does not tell
        return psutil.Process(pid).status() == psutil.STATUS_SLEEPING and ("futex" in where or where == "0")

    eventually(is_asleep)


# frontends, each stopped by itself at a known place


def filling(client):
    with client.reserve(1000, "i8") as array:
        array[:500] = np.arange(500)
        stop_myself()
        array[500:] = np.arange(500, 1000)
        return (client.submit(array) == np.arange(1000)).all()


def filling_a_file(client):
    with client.reserve(BIG, "i8") as array:
        array[: BIG // 2] = np.arange(BIG // 2)
        stop_myself()
        array[BIG // 2 :] = np.arange(BIG // 2, BIG)
        return (client.submit(array) == np.arange(BIG)).all()


def sent(client):
    pending = client.enqueue("sent")
    stop_myself()
    return pending.result() == "sent"


def answered(client):
    pending = client.enqueue("answered")
    eventually(pending.done)
    stop_myself()
    return pending.result() == "answered"


def answered_in_a_file(client):
    pending = client.enqueue(bytes(BIG))
    eventually(pending.done)
    stop_myself()
    return pending.result() == bytes(BIG)


def cancelled(client):
    while not (pending := client.enqueue("cancelled")).cancel():  # it was answered already
        pending.result()
    stop_myself()
    with pytest.raises(gpuworker.RequestCancelled):
        pending.result()
    return client.submit("after") == "after"


def idle(client):
    assert client.submit("before") == "before"
    stop_myself()
    return client.submit("after") == "after"


HOLDING = (filling, filling_a_file, sent, answered, answered_in_a_file)
IDLE = (cancelled, idle)


def test_frontends_stopped_at_every_stage_cost_nobody_anything_and_finish_even_after_a_restart(serve, forked, name):
    owner = serve(handlers.identity, capacity=16, max_batch_size=4)
    client = gpuworker.connect(name)
    children = [forked(lambda stage=stage: stage(client)) for stage in HOLDING + IDLE]
    for pid in children:
        wait_until_stopped(pid)
    others_go_on(client)
    outlast_every_timer(name)
    assert Stats.of(name).slots_in_use == len(HOLDING)

    kill(owner)
    serve(handlers.identity, capacity=16, max_batch_size=4)
    others_go_on(client)
    outlast_every_timer(name)
    stats = Stats.of(name)
    assert (stats.slots_in_use, stats.reaped_clients, stats.reaped_slots) == (len(HOLDING), 0, 0)

    for pid in children:
        os.kill(pid, signal.SIGCONT)
    assert succeeded(children)
    eventually(lambda: Stats.of(name).slots_in_use == 0)
    others_go_on(client)


def test_frontends_stopped_while_they_wait_for_an_answer_get_it(serve, forked, name, tmp_path):
    held = tmp_path / "held"
    held.touch()
    owner = serve(handlers.hold_while_file_exists, capacity=16, max_batch_size=1)
    client = gpuworker.connect(name, wake="park")
    running = forked(lambda: client.submit(str(held)) == str(held))
    eventually(lambda: Stats.of(name).batch_running_s > 0)
    queued = forked(lambda: client.submit("queued") == "queued")
    patient = forked(lambda: client.submit("patient", timeout=1000) == "patient")
    children = [running, queued, patient]
    eventually(lambda: Stats.of(name).slots_in_use == 3)
    for pid in children:
        wait_until_asleep_in_the_ring(pid)
        stop(pid)
    outlast_every_timer(name)

    kill(owner)
    serve(handlers.hold_while_file_exists, capacity=16, max_batch_size=1)
    eventually(lambda: Stats.of(name).batch_running_s > 0)
    outlast_every_timer(name)
    assert Stats.of(name).requeued == 1, "the one that was running when its owner died"

    held.unlink()
    assert [client.submit(str(i)) for i in range(300)] == [str(i) for i in range(300)]
    outlast_every_timer(name)
    stats = Stats.of(name)
    assert (stats.slots_in_use, stats.reaped_clients) == (3, 0), "three answers that nobody has read"
    for pid in children:
        os.kill(pid, signal.SIGCONT)
    assert succeeded(children)
    eventually(lambda: Stats.of(name).slots_in_use == 0)


def test_a_frontend_stopped_while_it_waits_for_a_slot_takes_no_wake_up_away(forked, name, tmp_path):
    held = tmp_path / "held"
    held.touch()
    with gpuworker.Worker(handlers.hold_while_file_exists, name=name, capacity=2, client_quota=2, max_batch_size=1) as worker:
        client = worker.connect(on_full="block", wake="park")
        pending = [client.enqueue(str(held)) for _ in range(2)]
        children = [forked(lambda i=i: [client.submit(f"{i}-{k}") for k in range(50)] == [f"{i}-{k}" for k in range(50)]) for i in range(4)]
        eventually(lambda: len(worker.stats().clients) == 5)
        for pid in children:
            wait_until_asleep_in_the_ring(pid)
        stopped, others = children[:2], children[2:]
        for pid in stopped:
            stop(pid)
        outlast_every_timer(name)
        held.unlink()
        assert [one.result() for one in pending] == [str(held)] * 2
        assert succeeded(others)
        assert [client.submit(str(i)) for i in range(300)] == [str(i) for i in range(300)]
        outlast_every_timer(name)
        assert worker.stats().slots_in_use == 0
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert succeeded(stopped)


def test_a_stopped_frontend_that_is_killed_gives_back_exactly_what_it_held(forked, name):
    with gpuworker.Worker(handlers.identity, name=name, capacity=16) as worker:
        client = worker.connect()
        children = [forked(lambda stage=stage: stage(client)) for stage in HOLDING]
        for pid in children:
            wait_until_stopped(pid)
        eventually(lambda: worker.stats().slots_in_use == len(HOLDING))
        for left, pid in reversed(list(enumerate(children))):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            eventually(lambda left=left: worker.stats().slots_in_use == left)
        assert worker.stats().reaped_slots == len(HOLDING)
        others_go_on(client)
    assert not [file for file in os.listdir("/dev/shm") if name in file]


def test_stopped_frontends_keep_no_owner_from_ending_and_still_read_their_answers(forked, name):
    def claimed(client):
        with client.reserve(10) as array:
            stop_myself()
            with pytest.raises((gpuworker.WorkerDraining, gpuworker.WorkerDied, gpuworker.WorkerNotFound)):
                client.submit(array, timeout=30)
        return True

    with gpuworker.Worker(handlers.identity, name=name, capacity=16) as worker:
        client = worker.connect(connect_timeout_s=0)
        children = [forked(lambda stage=stage: stage(client)) for stage in (answered, claimed)]
        for pid in children:
            wait_until_stopped(pid)
        os.kill(worker.pid, signal.SIGTERM)
        eventually(lambda: worker.pid is None)
    for pid in children:
        os.kill(pid, signal.SIGCONT)
    assert succeeded(children)


# the owner


def test_a_stopped_owner_is_waited_for_by_those_who_can_wait_and_replaced_by_nobody(forked, name):
    with gpuworker.Worker(handlers.identity, name=name, capacity=32) as worker:
        client, owner = worker.connect(), worker.pid
        client.submit("before")
        os.kill(owner, signal.SIGSTOP)
        patient = [forked(lambda i=i: client.submit(i) == i) for i in range(4)]
        killed = forked(lambda: client.submit("never"))
        eventually(lambda: worker.stats().slots_in_use == 5)
        pending = [client.enqueue(i) for i in range(8)]
        for _ in range(4):
            with pytest.raises(gpuworker.DeadlineExceeded) as caught:
                client.submit("late", timeout=0.06)  # longer than a client trusts its owner
            assert caught.value.stage == "queued"
        os.kill(killed, signal.SIGKILL)
        os.waitpid(killed, 0)
        assert worker.stats().slots_in_use == 5 + 8
        assert worker.stats().owner_alive
        with pytest.raises(gpuworker.WorkerStartupError, match="already running"):
            gpuworker.Worker(handlers.identity, name=name).start()
        with pytest.raises(gpuworker.WorkerAlreadyRunning):
            gpuworker.Worker(handlers.identity, name=name, in_process=True).start()
        assert not Segment.discard(name), "nor is its segment removed"

        os.kill(owner, signal.SIGCONT)
        assert [one.result() for one in pending] == list(range(8))
        assert succeeded(patient)
        eventually(lambda: worker.stats().slots_in_use == 0)
        eventually(lambda: [one.pid for one in worker.stats().clients] == [os.getpid()])
        assert worker.pid == owner
        assert worker.stats().completed <= 1 + 8 + 4 + 1, "the late ones never ran"


def test_an_owner_stopped_in_the_middle_of_a_batch_finishes_it(name, tmp_path):
    held = tmp_path / "held"
    held.touch()
    with gpuworker.Worker(handlers.hold_while_file_exists, name=name, max_batch_size=2) as worker:
        client, answers = worker.connect(), []
        callers = [threading.Thread(target=lambda: answers.append(client.submit(str(held)))) for _ in range(6)]
        for caller in callers:
            caller.start()
        eventually(lambda: worker.stats().batch_running_s > 0 and worker.stats().slots_in_use == 6)
        for _ in range(3):
            os.kill(worker.pid, signal.SIGSTOP)
            with pytest.raises(gpuworker.DeadlineExceeded):
                client.submit("late", timeout=0.06)
            os.kill(worker.pid, signal.SIGCONT)
        held.unlink()
        for caller in callers:
            caller.join(30)
        assert answers == [str(held)] * 6
        assert worker.stats().requeued == 0
