"""Many processes: forked, spawned, killed, stopped. Every answer belongs to its question, and capacity always comes back."""

import os
import signal
import subprocess
import sys
import traceback

import pytest

import gpuworker
from tests import handlers
from tests.conftest import Gate, eventually


def in_child(call):
    """Runs `call` in a forked child; returns its pid. The child's exit status tells whether it returned true."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = 0 if call() else 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def succeeded(pids):
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * len(pids)


@pytest.fixture
def worker(name):
    with gpuworker.Worker(handlers.double, name=name, max_batch_size=16) as worker:
        yield worker


def right_answers(client, process, count=200):
    return all(client.submit(process * 100_000 + i) == 2 * (process * 100_000 + i) for i in range(count))


def test_a_client_made_before_a_fork_serves_parent_and_children_at_once(worker):
    client = worker.connect()
    assert client.submit(1) == 2, "connected before the fork"
    children = [in_child(lambda i=i: right_answers(client, i)) for i in range(1, 7)]
    assert right_answers(client, 0)
    assert succeeded(children)
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert worker.stats().completed == 1 + 7 * 200


def test_a_client_that_first_connects_after_the_fork(worker):
    client = worker.connect()
    assert succeeded([in_child(lambda i=i: right_answers(client, i, 50)) for i in range(4)])
    assert right_answers(client, 9, 50)


def test_grandchildren(worker):
    client = worker.connect()
    client.submit(1)
    assert succeeded([in_child(lambda: client.submit(2) == 4 and succeeded([in_child(lambda: right_answers(client, 5, 20))]))])


def test_threads_in_forked_children(worker):
    from concurrent.futures import ThreadPoolExecutor

    client = worker.connect()
    client.submit(1)

    def child():
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(client.submit, range(200))) == [2 * i for i in range(200)]

    assert succeeded([in_child(child) for _ in range(2)])


def test_spawned_processes(worker):
    code = f"import gpuworker; c = gpuworker.connect({worker.name!r}); assert [c.submit(i) for i in range(50)] == [2 * i for i in range(50)]"
    children = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(3)]
    for child in children:
        assert child.communicate(timeout=60)[1] == b"", "not a word on stderr: no resource tracker, no leak warning"
        assert child.returncode == 0
    assert worker.connect().submit(4) == 8, "and the segment is still there"


def test_a_childs_end_never_touches_its_parents_requests(in_process):
    gate = Gate(is_open=False)
    worker = in_process(gate.run_batch, capacity=8)
    client = worker.connect()
    pending = [client.enqueue(i) for i in range(3)]
    gate.wait_entered()

    def child():
        with pytest.raises(gpuworker.SegmentError, match="before a fork"):
            pending[0].result()
        pending[1].cancel()
        pending.clear()  # __del__ runs here
        client.close()
        return True

    assert succeeded([in_child(child)])
    assert worker.stats().slots_in_use == 3
    gate.open()
    assert [one.result() for one in pending] == [0, 1, 2]


def test_kill_9_of_clients_gives_all_capacity_back(name, tmp_path):
    held = tmp_path / "held"
    held.touch()
    with gpuworker.Worker(handlers.hold_while_file_exists, name=name, capacity=16, max_batch_size=4) as worker:
        client = worker.connect()

        def child():
            mine = [client.enqueue(str(held)) for _ in range(5)] + [client.enqueue(bytes(100_000))]
            os.write(write_end, b"x")
            signal.pause()
            return mine

        read_end, write_end = os.pipe()
        children = [in_child(child) for _ in range(2)]
        for _ in children:
            assert os.read(read_end, 1) == b"x"
        assert worker.stats().slots_in_use == 12
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
        os.close(read_end)
        os.close(write_end)
        eventually(lambda: worker.stats().slots_in_use <= 4)  # what is queued comes back while a batch still runs
        held.unlink()
        eventually(lambda: worker.stats().slots_in_use == 0)
        assert client.submit(str(held)) == str(held)
        assert not [f for f in os.listdir("/dev/shm") if f"{name}.spill" in f]


def test_a_stopped_client_blocks_nobody_and_goes_on_when_continued(worker):
    client = worker.connect()
    child = in_child(lambda: right_answers(client, 3, 2000))
    for _ in range(5):
        os.kill(child, signal.SIGSTOP)
        assert right_answers(client, 1, 100)
        os.kill(child, signal.SIGCONT)
    assert succeeded([child])
    assert worker.stats().reaped_clients <= 1, "only the one that ended"


def test_random_kills_of_busy_clients_lose_no_slot(worker):
    import random

    rng = random.Random(20261130)
    client = worker.connect()
    for _ in range(15):
        children = [in_child(lambda i=i: all(right_answers(client, i, 100) for _ in range(10_000))) for i in range(3)]
        assert right_answers(client, 9, rng.randrange(5, 60))
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert right_answers(client, 9, 100)
    assert worker.stats().late_wakes == 0
