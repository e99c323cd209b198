"""What people found wrong with programs that share memory, as behaviours of this one: leaks, trackers, full memory, and processes that are killed or
stopped at the worst moment."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import gpuworker
from gpuworker.segment import Segment
from gpuworker.segment.stats import Stats
from tests import handlers
from tests.conftest import eventually, kill_all, shm_files
from tests.test_fork import in_child, succeeded


def run_script(body, *args, before=()):
    """Runs a script in a fresh interpreter; it must succeed without a word on stderr. -> its output."""
    command = [*before, sys.executable, "-c", textwrap.dedent(body), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def shared_inodes(pid):
    """Of everything in /dev/shm that a process has mapped."""
    maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
    return {int(line.split()[4]) for line in maps.splitlines() if " /dev/shm/" in line}


@pytest.fixture
def worker(name):
    with gpuworker.Worker(handlers.double, name=name, max_batch_size=16) as worker:
        yield worker


# files


def test_clients_that_come_and_go_leave_the_segment_no_tracker_and_no_word(worker):
    script = """
        import sys, gpuworker, psutil
        for i in range(100):
            with gpuworker.connect(sys.argv[1]) as client:
                assert client.submit(i) == 2 * i
        print(psutil.Process().children(), "multiprocessing.resource_tracker" in sys.modules)
        """
    assert run_script(script, worker.name) == "[] False\n"
    assert worker.connect().submit(4) == 8
    eventually(lambda: len(worker.stats().clients) <= 1)


def test_the_segment_is_all_that_owner_and_clients_share(worker):
    segment = {os.stat(f"/dev/shm/gpuworker-{worker.name}").st_ino}
    script = """
        import os, sys, gpuworker
        sys.path.insert(0, os.getcwd())
        from tests.test_behaviours_shared_memory import shared_inodes
        client = gpuworker.connect(sys.argv[1])
        assert client.submit(2) == 4
        print(shared_inodes(os.getpid()))
        """
    assert run_script(script, worker.name) == f"{segment}\n"
    assert shared_inodes(worker.pid) == segment
    assert {file for file in shm_files() if worker.name in file} == {f"gpuworker-{worker.name}"}


def test_no_lock_that_could_die_with_its_holder_lies_in_the_segment():
    layout = (pathlib.Path(__file__).parent.parent / "native" / "layout.h").read_text()
    assert "pthread" not in layout
    assert "sem_t" not in layout
    assert "_Atomic uint32_t semaphore" in layout, "a futex word has no holder"


def test_files_beside_the_segment_are_private_too(in_process, gate):
    gate.shut()
    before = os.umask(0)
    try:
        worker = in_process(gate.run_batch)
        pending = worker.connect().enqueue(bytes(100_000))
        gate.wait_entered()
        modes = {file: os.stat(f"/dev/shm/{file}").st_mode & 0o777 for file in shm_files() if worker.name in file}
        gate.open()
        assert pending.result() == bytes(100_000)
    finally:
        os.umask(before)
    assert len(modes) == 2
    assert set(modes.values()) == {0o600}


def test_a_file_removed_under_load_stops_nobody_who_is_there(name, in_process, gate, caplog):
    worker = in_process(gate.run_batch)
    client = worker.connect()
    client.submit("before")
    os.unlink(f"/dev/shm/gpuworker-{worker.name}")
    assert list(client.map(range(200))) == list(range(200))
    eventually(lambda: "file was removed by somebody else" in caplog.text)
    with pytest.raises(gpuworker.WorkerNotFound, match=worker.name):
        gpuworker.connect(worker.name, connect_timeout_s=0).submit("x")
    with gpuworker.Worker(gate.run_batch, name=worker.name, in_process=True) as successor:
        worker.stop()
        assert gpuworker.connect(worker.name).submit("to the new one") == "to the new one", "the old one's end took nothing of it away"
        assert successor.stats().completed == 1


# memory that is not there


@pytest.fixture
def small_shm():
    """Runs a script in a mount namespace of its own, where /dev/shm is this large."""

    def run(size, script):
        return run_script(script, before=["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"', "sh"])

    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a mount namespace")
    return run


def test_a_shared_memory_that_is_too_small_is_a_clear_error_and_leaves_nothing(small_shm):
    script = """
        import os, gpuworker
        try:
            gpuworker.Worker(lambda requests: requests, in_process=True).start()
        except gpuworker.SegmentError as error:
            print(error)
        print(os.listdir("/dev/shm"))
        """
    error, left = small_shm("64k", script).splitlines()
    for part in ("bytes of shared memory needed", "65,536 free in /dev/shm", "shrink capacity"):
        assert part in error
    assert left == "[]"


def test_memory_that_fills_up_later_hurts_no_slot_and_only_payloads_that_need_more(small_shm):
    script = """
        import os, gpuworker
        with gpuworker.Worker(lambda requests: requests, in_process=True, capacity=16, max_batch_size=4) as worker:
            client = worker.connect()
            with open("/dev/shm/filler", "wb", 0) as filler:
                try:
                    while True:
                        filler.write(bytes(4096))
                except OSError as error:
                    print(error.strerror)
            payloads = [bytes([i]) * 65536 for i in range(16)]
            pending = [client.enqueue(payload) for payload in payloads]
            assert [one.result() for one in pending] == payloads
            try:
                client.submit(bytes(100_000))
            except gpuworker.SegmentError as error:
                print(error)
            assert client.submit("small") == "small"
            os.unlink("/dev/shm/filler")
            assert client.submit(bytes(100_000)) == bytes(100_000)
        print(os.listdir("/dev/shm"))
        """
    full, error, left = small_shm("6m", script).splitlines()
    assert full == "No space left on device"
    assert "100,000 bytes of shared memory needed, 0 free" in error
    assert left == "[]"


# killed and stopped


def test_a_client_killed_while_it_fills_its_slot_blocks_nobody(name):
    with gpuworker.Worker(handlers.double, name=name, capacity=2) as worker:
        client = worker.connect()
        client.submit(0)

        def child():
            with client.reserve(100, "i8") as array:
                array[:50] = 1
                os.kill(os.getpid(), signal.SIGKILL)

        os.waitpid(in_child(child), 0)
        assert [client.submit(i) for i in range(50)] == [2 * i for i in range(50)]
        eventually(lambda: worker.stats().slots_in_use == 0)
        assert worker.stats().reaped_slots == 1


def test_a_client_stopped_at_its_worst_loses_nothing_to_the_others(worker):
    client = worker.connect()
    segment = Segment.attach(worker.name, read_only=True)

    def stopped_twice():
        with client.reserve(1000, "i8") as array:
            array[:500] = np.arange(500)
            os.kill(os.getpid(), signal.SIGSTOP)  # it has a slot and has not published it
            array[500:] = np.arange(500, 1000)
            pending = client.enqueue(array)
            os.kill(os.getpid(), signal.SIGSTOP)  # its answer lies there, unread
            return (pending.result() == 2 * np.arange(1000)).all()

    child = in_child(stopped_twice)
    for _ in range(2):
        assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
        beats = set()

        def three_ticks(beats=beats):
            beats.add(segment.overview().heartbeat_ns)
            return len(beats) > 3

        assert [client.submit(i) for i in range(500)] == [2 * i for i in range(500)]
        eventually(three_ticks)  # nor does time make it dead
        assert worker.stats().slots_in_use == 1
        os.kill(child, signal.SIGCONT)
    assert succeeded([child])
    eventually(lambda: worker.stats().slots_in_use == 0)


def test_a_stopped_owner_is_not_taken_for_dead(worker):
    client, answers = worker.connect(), []
    client.submit(0)
    os.kill(worker.pid, signal.SIGSTOP)
    caller = threading.Thread(target=lambda: answers.append(client.submit(21)))
    caller.start()
    caller.join(0.4)  # longer than a client trusts an owner without asking the kernel
    assert caller.is_alive()
    assert worker.stats().owner_alive
    with pytest.raises(gpuworker.WorkerAlreadyRunning, match=str(worker.supervisor_pid)):
        gpuworker.Worker(handlers.double, name=worker.name, in_process=True).start()
    os.kill(worker.pid, signal.SIGCONT)
    caller.join(30)
    assert answers == [42]
    assert worker.stats().reaped_clients == 0


def test_idling_longer_than_every_timer_changes_nothing(worker):
    client = worker.connect()
    client.submit(1)
    before = worker.stats().clients
    time.sleep(0.5)
    assert client.submit(2) == 4
    stats = worker.stats()
    assert (stats.clients, stats.reaped_clients, stats.late_wakes) == (before, 0, 0)


@pytest.mark.parametrize("supervisors_die_too", [False, True])
def test_owners_killed_again_and_again_under_load_leave_one_file_and_no_call_hanging(name, supervisors_die_too):
    over, outcomes = threading.Event(), []
    client = gpuworker.connect(name, connect_timeout_s=60)

    def calls():
        while not over.is_set():
            try:
                outcomes.append(client.submit(21))
            except gpuworker.WorkerDied:
                outcomes.append("died")

    workers = [gpuworker.Worker(handlers.double, name=name, capacity=16).start()]
    size = os.path.getsize(f"/dev/shm/gpuworker-{name}")
    callers = [threading.Thread(target=calls) for _ in range(4)]
    for caller in callers:
        caller.start()
    for _ in range(5):
        served = len(outcomes)
        eventually(lambda served=served: len(outcomes) > served + 20)
        if supervisors_die_too:
            kill_all(workers[-1])
            workers.append(gpuworker.Worker(handlers.double, name=name, capacity=16).start())
            workers[-2].stop()  # it is dead: this must not touch its successor's segment
        else:
            os.kill(workers[-1].pid, signal.SIGKILL)
        assert {file for file in shm_files() if name in file} == {f"gpuworker-{name}"}
        assert os.path.getsize(f"/dev/shm/gpuworker-{name}") == size
    over.set()
    for caller in callers:
        caller.join(30)
        assert not caller.is_alive()
    assert set(outcomes) <= ({42, "died"} if supervisors_die_too else {42})
    eventually(lambda: Stats.of(name).slots_in_use == 0)
    workers[-1].stop()
    assert not {file for file in shm_files() if name in file}
