"""Forks in the way programs really make them: process pools, threads that go on meanwhile, children that end in every way, parents that die first."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import psutil
import pytest

import gpuworker
from tests import handlers
from tests.conftest import eventually, is_gone
from tests.test_fork import in_child, right_answers, succeeded
from tests.test_pause import forked  # noqa: F401 (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # Python 3.12 and later; it is what is tested here

BIG = 100_000  # bytes: more than a slot holds


@pytest.fixture
def worker(name):
    with gpuworker.Worker(handlers.double, name=name, max_batch_size=16, max_clients=1024) as worker:
        yield worker


@pytest.fixture
def script(tmp_path):
    """Starts a program of its own with these arguments; its main module can be imported again, as spawned children do."""
    started = []

    def start(body, *args, **options):
        file = tmp_path / f"script{len(started)}.py"
        file.write_text(textwrap.dedent(body))
        started.append(subprocess.Popen([sys.executable, file, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finished(process):
    """-> what a script printed; it must succeed without a word on stderr."""
    output, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (0, ""), errors
    return output


@contextlib.contextmanager
def threads_busy(*calls):
    """Each call again and again, in a thread of its own, for as long as this lasts; all must return true each time."""
    over, wrong, rounds = threading.Event(), [], [0] * len(calls)

    def repeat(index, call):
        while not over.is_set() and not wrong:
            try:
                if not call():
                    wrong.append(index)
            except Exception as error:
                wrong.append(error)
            rounds[index] += 1

    threads = [threading.Thread(target=repeat, args=numbered) for numbered in enumerate(calls)]
    for thread in threads:
        thread.start()
    try:
        yield rounds
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert wrong == []


# pools


POOLS = """
    import sys
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    import gpuworker

    method, name = sys.argv[1:]
    client = gpuworker.connect(name)

    def ask(i):
        return client.submit(i)

    if __name__ == "__main__":
        context, expected = get_context(method), [2 * i for i in range(200)]
        assert ask(1) == 2, "connected before there is a pool"
        with context.Pool(2, maxtasksperchild=2) as pool:
            answers = pool.map_async(ask, range(200), chunksize=25)  # eight tasks: four processes, one after the other in two places
            assert [ask(i) for i in range(200)] == expected
            assert answers.get(60) == expected
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            answers = pool.map(ask, range(200), chunksize=20)
            assert [ask(i) for i in range(200)] == expected
            assert list(answers) == expected
    """


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_pools_of_processes_call_the_client_of_their_main_module(worker, script, method):
    finished(script(POOLS, method, worker.name))
    eventually(lambda: worker.stats().clients == ())
    stats = worker.stats()
    assert (stats.completed, stats.failed, stats.slots_in_use, stats.late_wakes) == (1 + 4 * 200, 0, 0, 0)


def test_a_pool_that_is_terminated_in_the_middle_gives_its_slots_back(name, tmp_path, script):
    held = tmp_path / "held"
    held.touch()
    body = """
        import sys
        from multiprocessing import get_context

        import gpuworker

        client = gpuworker.connect(sys.argv[1])

        def ask(request):
            return client.submit(request)

        if __name__ == "__main__":
            mine = client.enqueue(sys.argv[2])
            with get_context("fork").Pool(3) as pool:
                pool.map_async(ask, [sys.argv[2]] * 3)
                print("started", flush=True)
                sys.stdin.readline()
            print("terminated", flush=True)
            assert mine.result() == sys.argv[2]
        """
    with gpuworker.Worker(handlers.hold_while_file_exists, name=name, max_batch_size=1) as worker:
        process = script(body, name, str(held), stdin=subprocess.PIPE)
        assert process.stdout.readline() == "started\n"
        eventually(lambda: worker.stats().slots_in_use == 4)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "terminated\n"
        eventually(lambda: worker.stats().slots_in_use == 1)
        held.unlink()
        finished(process)
        eventually(lambda: worker.stats().slots_in_use == 0)


# forks beside threads


def test_hundreds_of_forks_while_threads_submit(worker):
    client, array = worker.connect(), np.arange(1000)

    def map_some():
        return list(client.map(range(40))) == [2 * i for i in range(40)]

    calls = (
        lambda: right_answers(client, 7, 20),
        lambda: (client.submit(array) == 2 * array).all(),
        lambda: len(client.submit(bytes(BIG))) == 2 * BIG,
        map_some,
    )
    with threads_busy(*calls) as rounds:
        children = []
        for i in range(200):
            children.append(in_child(lambda i=i: client.submit(i) == 2 * i and (client.submit(array + i) == 2 * (array + i)).all()))
            if len(children) == 4:
                assert succeeded(children)
                children.clear()
        eventually(lambda: min(rounds) > 0)
    eventually(lambda: worker.stats().slots_in_use == 0)
    stats = worker.stats()
    assert (stats.failed, stats.cancelled, stats.abandoned, stats.reaped_slots, stats.late_wakes) == (0, 0, 0, 0, 0)


def holds_a_lock_of_a_segment():
    """Whether a descriptor of this process refers to an open file description with a lock on it."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{fd}") as info:
            if "OFDLCK" in info.read():
                return True
    return False


def test_forks_in_the_middle_of_joining_take_neither_the_parents_lock_nor_its_place(worker):
    """The lock of a place is the proof of its holder's life: in a child of the parent's it would tell another pid namespace that the parent lives."""
    clients = [worker.connect(), worker.connect()]

    def come_and_go(i):
        clients[i].close()
        clients[i] = worker.connect()
        return clients[i].submit(21) == 42

    def child():
        return not holds_a_lock_of_a_segment() and all(client.submit(4) == 8 for client in list(clients) if not client._closed)

    with threads_busy(lambda: come_and_go(0), lambda: come_and_go(1)):
        for _ in range(150):
            assert succeeded([in_child(child)])
    eventually(lambda: worker.stats().slots_in_use == 0)


def test_a_request_that_a_thread_waits_for_is_not_waited_for_in_the_child(in_process, gate, forked):  # noqa: F811
    gate.shut()
    pending = in_process(gate.run_batch).connect().enqueue("x")
    gate.wait_entered()
    waiter = threading.Thread(target=pending.result)
    waiter.start()
    eventually(pending._lock.locked)  # the waiter has it, and will not exist in the child

    def child():
        with pytest.raises(gpuworker.SegmentError, match="before a fork"):
            pending.result()
        return True

    pid = forked(child)
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert succeeded([pid])
    gate.open()
    waiter.join(30)
    assert pending.result() == "x"


def test_three_generations_at_once(worker):
    client = worker.connect()

    def generation(depth):
        assert client.submit(depth) == 2 * depth, "used before the fork, in each of them"
        children = [in_child(lambda: generation(depth + 1)) for _ in range(2)] if depth < 2 else []
        return right_answers(client, depth, 150) and succeeded(children)

    assert generation(0)
    eventually(lambda: worker.stats().slots_in_use == 0)
    stats = worker.stats()
    assert (stats.completed, stats.failed, stats.reaped_slots) == (7 * 151, 0, 0)


# ends


ENDS = """
    import gc, os, sys
    import gpuworker

    name, held = sys.argv[1:]
    client = gpuworker.connect(name)
    answered = [client.enqueue("answered"), client.enqueue(held[:-1] + bytes(100_000).decode())]
    while not all(one.done() for one in answered):
        pass
    waiting = [client.enqueue(held) for _ in range(3)] + [client.enqueue(held + bytes(100_000).decode())]

    def collect():
        global answered, waiting, client
        answered.clear(), waiting.clear()
        del client
        gc.collect()
        os._exit(0)

    def cancel():
        assert not any(one.cancel() for one in answered + waiting)

    def close():
        client.close()

    def fail():
        sys.stderr = open(os.devnull, "w")
        raise RuntimeError("the child's own fault")

    with client.reserve(1000, "i8") as array:
        array[:] = 1
        for number, end in enumerate((collect, cancel, close, fail, sys.exit, lambda: os._exit(0), lambda: os.execlp("true", "true"))):
            child = os.fork()
            if not child:
                end()
                sys.exit()  # out of the block: the interpreter ends as usual
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == (end is fail), (number, status)
        print("forked", flush=True)
        sys.stdin.readline()
        assert client.submit(array)[5] == 1
    assert answered[0].result() == "answered" and len(answered[1].result()) == len(held) - 1 + 100_000
    assert [one.result() for one in waiting[:3]] == [held] * 3
    assert len(waiting[3].result()) == len(held) + 100_000
    """


def test_nothing_of_the_parents_goes_with_a_child_however_it_ends(name, tmp_path, script):
    held = tmp_path / "held"
    held.touch()
    with gpuworker.Worker("tests.test_fork_pools:hold", name=name, max_batch_size=1) as worker:
        process = script(ENDS, name, str(held), stdin=subprocess.PIPE)
        assert process.stdout.readline() == "forked\n", process.stderr.read()
        stats = worker.stats()
        assert [(client.pid, client.slots_held) for client in stats.clients] == [(process.pid, 7)]
        assert (stats.slots_in_use, stats.cancelled, stats.reaped_slots) == (7, 0, 0)
        assert len([file for file in os.listdir("/dev/shm") if f"{name}.spill" in file]) == 2, "a request and a response"
        held.unlink()
        process.stdin.write("\n")
        process.stdin.flush()
        finished(process)
        eventually(lambda: worker.stats().slots_in_use == 0)


def hold(requests):
    """The handler of the test above: waits while a request names a file that exists."""
    if isinstance(requests[0], str):
        handlers.hold_while_file_exists([requests[0].rstrip("\0")])
    return requests


def test_a_child_goes_on_when_its_parent_is_killed(name, tmp_path, script):
    held = tmp_path / "held"
    held.touch()
    body = """
        import os, sys
        import gpuworker

        client = gpuworker.connect(sys.argv[1])
        pending = [client.enqueue(sys.argv[2]) for _ in range(4)]
        child = os.fork()
        if child:
            pending[0].result()
        mine = client.enqueue(sys.argv[2])
        print(os.getpid(), flush=True)
        sys.stdin.readline()
        assert mine.result() == sys.argv[2]
        assert [client.submit(str(i)) for i in range(200)] == [str(i) for i in range(200)]
        print("served", flush=True)
        """
    with gpuworker.Worker(handlers.hold_while_file_exists, name=name, max_batch_size=1) as worker:
        parent = script(body, name, str(held), stdin=subprocess.PIPE)
        child = int(parent.stdout.readline())
        assert sorted(client.slots_held for client in worker.stats().clients) == [1, 4]
        parent.kill()
        parent.wait()
        eventually(lambda: worker.stats().slots_in_use == 1 + 1)  # the child's, and the one that runs until its batch ends
        held.unlink()
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "served\n"
        eventually(lambda: is_gone(child))
        eventually(lambda: worker.stats().slots_in_use == 0)


# exec


def test_programs_started_while_threads_submit_inherit_nothing(worker):
    client = worker.connect()
    with threads_busy(lambda: right_answers(client, 1, 50), lambda: len(client.submit(bytes(BIG))) == 2 * BIG) as rounds:
        for _ in range(30):
            assert os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ), 0)[1] == 0
            listing = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True).stdout
            assert "gpuworker" not in listing
        eventually(lambda: min(rounds) > 0)
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert worker.stats().reaped_slots == 0


def test_a_program_that_outlives_its_starter_does_not_keep_its_slots(name, tmp_path, script):
    held = tmp_path / "held"
    held.touch()
    body = """
        import os, sys, time
        import gpuworker

        client = gpuworker.connect(sys.argv[1])
        pending = [client.enqueue(sys.argv[2]) for _ in range(3)]
        print(os.posix_spawn("/bin/sleep", ["sleep", "100"], {}), flush=True)
        time.sleep(100)
        """
    with gpuworker.Worker(handlers.hold_while_file_exists, name=name, max_batch_size=1) as worker:
        starter = script(body, name, str(held), stdin=subprocess.DEVNULL)
        sleeper = int(starter.stdout.readline())
        try:
            assert worker.stats().slots_in_use == 3
            starter.kill()
            starter.wait()
            eventually(lambda: worker.stats().slots_in_use == 1)
            held.unlink()
            eventually(lambda: worker.stats().slots_in_use == 0)
        finally:
            os.kill(sleeper, signal.SIGKILL)
