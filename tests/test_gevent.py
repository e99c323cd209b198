"""Under gevent: a monkey-patched process, patched before or after it became a client. Waiting blocks the thread, as any C call does; nothing hangs."""

import subprocess
import sys
import textwrap

import pytest

import gpuworker
from tests import handlers
from tests.conftest import eventually

pytest.importorskip("gevent")

MADE = """
    import os, sys, threading
    import gpuworker
    client = gpuworker.connect(sys.argv[1])
    """
PATCH = """
    from gevent import monkey
    monkey.patch_all()
    import gevent
    """
USED = """
    client.submit("connects")
    """
TWENTY_GREENLETS = """
    def ask(start):
        for i in range(start, start + 20):
            assert client.submit(i) == 2 * i
            gevent.sleep(0)
        pending = [client.enqueue(start + i) for i in range(4)]
        gevent.sleep(0)
        assert [one.result() for one in pending] == [2 * (start + i) for i in range(4)]
        assert list(client.map(range(start, start + 20))) == [2 * i for i in range(start, start + 20)]
        return True

    def twenty_greenlets():
        return [one.get() for one in [gevent.spawn(ask, 1000 * i) for i in range(20)]] == [True] * 20

    def in_child(call):
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            status = 0 if call() else 2
        finally:
            os._exit(status)

    def succeeded(pids):
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * len(pids)
    """
always = pytest.mark.parametrize("parts", [(PATCH, MADE), (MADE, PATCH), (MADE, USED, PATCH)], ids=["patched", "made", "used"])
"""What came first."""


@pytest.fixture
def worker(name):
    options = {
        "capacity": 1024,
        "max_request_bytes": 1024,
        "max_response_bytes": 1024,
    }  # room for all that twenty greenlets of each process send at once
    with gpuworker.Worker(handlers.double, name=name, max_batch_size=16, **options) as worker:
        yield worker


def run(*parts, args):
    """Runs a script made of these parts; it must succeed without a word on stderr."""
    script = "".join(map(textwrap.dedent, parts))
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@always
def test_each_greenlet_gets_its_own_answers_before_and_after_a_fork(worker, parts):
    script = """
        assert twenty_greenlets()
        children = [in_child(lambda: twenty_greenlets() and succeeded([in_child(twenty_greenlets)])) for _ in range(2)]
        assert twenty_greenlets()
        assert succeeded(children)
        threads = [threading.Thread(target=ask, args=(1000 * i,)) for i in range(5)]  # greenlets, too
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        """
    run(*parts, TWENTY_GREENLETS, script, args=[worker.name])
    eventually(lambda: worker.stats().clients == ())
    stats = worker.stats()
    assert (stats.completed, stats.failed, stats.slots_in_use) == ((USED in parts) + (6 * 20 + 5) * 44, 0, 0)


@always
def test_greenlets_that_a_fork_finds_in_the_middle_of_a_request_end_in_the_child_and_go_on_in_the_parent(worker, parts):
    script = """
        outcomes = []

        def halfway(i):
            pending = client.enqueue(i)
            gevent.sleep(0.001)  # the fork comes here, so that both processes have this greenlet
            try:
                outcomes.append(pending.result() == 2 * i)
            except gpuworker.SegmentError as error:
                outcomes.append("before a fork" in str(error))

        greenlets = [gevent.spawn(halfway, i) for i in range(20)]
        gevent.sleep(0)
        assert worker_has(20)
        child = in_child(lambda: len(gevent.joinall(greenlets)) == 20 and outcomes == [True] * 20 and twenty_greenlets())
        gevent.joinall(greenlets)
        assert outcomes == [True] * 20 and succeeded([child])
        """
    counted = """
        def worker_has(count):
            return [one.slots_held for one in gpuworker.Stats.of(sys.argv[1]).clients] == [count]
        """
    run(*parts, TWENTY_GREENLETS, counted, script, args=[worker.name])
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert worker.stats().failed == 0


@always
def test_in_the_hubs_threadpool_a_wait_lets_all_other_greenlets_run(name, tmp_path, parts):
    held = tmp_path / "held"
    held.touch()
    script = """
        held = sys.argv[2]

        def release_after_a_while():
            for _ in range(20):
                gevent.sleep(0.001)
            os.unlink(held)

        releaser = gevent.spawn(release_after_a_while)
        pool = gevent.get_hub().threadpool
        waiting = [gevent.spawn(pool.apply, client.submit, (held,)) for _ in range(8)]
        assert [one.get() for one in waiting] == [held] * 8
        """
    with gpuworker.Worker(handlers.hold_while_file_exists, name=name, max_batch_size=4) as worker:
        run(*parts, script, args=[name, str(held)])
        eventually(lambda: worker.stats().slots_in_use == 0)


@always
def test_threads_of_the_hubs_pool_do_not_lose_each_other_at_a_clients_lock(worker, parts):
    script = """
        import time

        def connect_slowly():
            for _ in range(20):
                with client._lock:
                    until = time.perf_counter() + 0.0005
                    while time.perf_counter() < until:
                        pass
            return client.submit(21)

        pool = gevent.get_hub().threadpool
        assert [one.get() for one in [gevent.spawn(pool.apply, connect_slowly) for _ in range(8)]] == [42] * 8
        """
    run(*parts, script, args=[worker.name])


def test_a_patched_process_starts_and_stops_workers(name):
    script = """
        if __name__ == "__main__":
            with gpuworker.Worker("tests.handlers:double", name=sys.argv[1]) as worker:
                assert twenty_greenlets()
            assert worker.pid is None
        """
    run(PATCH, MADE, TWENTY_GREENLETS, script, args=[name])
