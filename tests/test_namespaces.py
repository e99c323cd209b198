"""Containers that share /dev/shm: pid namespaces in which every first process has pid 1, so that only the lock bytes tell who lives."""

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

import gpuworker
from gpuworker.segment.stats import Stats
from tests import handlers
from tests.conftest import eventually
from tests.test_pause import outlast_every_timer, serve  # noqa: F401 (a fixture)

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
CLIENT = """
    import os, sys, gpuworker

    client = gpuworker.connect(sys.argv[1], connect_timeout_s=60)
    held, count = sys.argv[2], int(sys.argv[3])

    def outcome(pending):
        try:
            return pending.result() == held
        except gpuworker.GpuWorkerError as error:
            return type(error).__name__

    pending = [client.enqueue(held) for _ in range(count)]
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        if line == "results\\n":
            print([outcome(one) for one in pending], flush=True)
            pending = []
        elif line == "submit\\n":
            print([client.submit(str(i)) for i in range(200)] == [str(i) for i in range(200)], flush=True)
    """


@pytest.fixture(scope="module", autouse=True)
def may_unshare():
    """Skips where no pid namespace can be made."""
    refused = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"needs the right to make pid namespaces: {refused.stderr.strip()}")


@pytest.fixture
def contained(name, tmp_path):
    """Starts a frontend, in a container of its own, that has so many requests on their way."""
    started = []

    def start(count, before=CONTAINER, code=CLIENT):
        command = [*before, sys.executable, "-c", textwrap.dedent(code), name, str(tmp_path / "held"), str(count)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == ("1\n" if before else f"{started[-1].pid}\n")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def first_process(container):
    """The process that has pid 1 inside."""
    (inside,) = psutil.Process(container.pid).children()
    return inside


def kill_contained(container):
    first_process(container).kill()
    container.wait()


def ask(frontend, what):
    frontend.stdin.write(f"{what}\n")
    frontend.stdin.flush()
    return frontend.stdout.readline()


def slots(name):
    return Stats.of(name).slots_in_use


def test_an_owner_in_a_container_takes_back_exactly_what_a_killed_frontend_held(serve, contained, held, name):  # noqa: F811
    serve(handlers.hold_while_file_exists, before=CONTAINER, capacity=32, client_quota=32, max_batch_size=1)
    assert Stats.of(name).owner_pid == 1
    first = contained(1)
    eventually(lambda: Stats.of(name).batch_running_s > 0)
    killed, stopped, outside = contained(3), contained(5), contained(7, before=())
    assert slots(name) == 1 + 3 + 5 + 7
    first_process(stopped).suspend()
    outlast_every_timer(name)
    assert slots(name) == 1 + 3 + 5 + 7

    first_process(killed).kill()
    eventually(lambda: slots(name) == 1 + 5 + 7)
    outside.kill()
    outside.wait()
    eventually(lambda: slots(name) == 1 + 5)
    outlast_every_timer(name)
    stats = Stats.of(name)
    assert (stats.slots_in_use, stats.reaped_clients, stats.reaped_slots) == (1 + 5, 2, 3 + 7)

    first_process(stopped).resume()
    held.unlink()
    assert ask(first, "results") == f"{[True]}\n"
    assert ask(stopped, "results") == f"{[True] * 5}\n"
    assert ask(stopped, "submit") == "True\n"
    eventually(lambda: slots(name) == 0)


def test_a_forked_worker_of_a_container_dies_alone_and_its_first_process_with_all(contained, held, name):
    forks = """
        import os, sys, signal, gpuworker

        client = gpuworker.connect(sys.argv[1])
        held, count = sys.argv[2], int(sys.argv[3])
        mine = [client.enqueue(held) for _ in range(count)]  # connected before the fork, as with --preload
        ready, written = os.pipe()
        workers = []
        for extra in (1, 2):
            workers.append(os.fork())
            if not workers[-1]:
                pending = [client.enqueue(held) for _ in range(count + extra)]
                os.write(written, b"x")
                signal.pause()
        while len(os.read(ready, 1)) < 1 or len(os.read(ready, 1)) < 1:
            pass
        print(os.getpid(), flush=True)
        for line in sys.stdin:
            os.kill(workers.pop(0), signal.SIGKILL)
            print("killed", flush=True)
        """
    with gpuworker.Worker(handlers.hold_while_file_exists, name=name, capacity=64, max_batch_size=1) as worker:
        running = worker.connect().enqueue(str(held))
        eventually(lambda: worker.stats().batch_running_s > 0)
        one, other = contained(2, code=forks), contained(2, code=forks)
        assert worker.stats().slots_in_use == 1 + 2 * (2 + 3 + 4)
        assert ask(one, "kill one") == "killed\n"
        eventually(lambda: worker.stats().slots_in_use == 1 + (2 + 4) + (2 + 3 + 4))
        first_process(one).kill()
        eventually(lambda: worker.stats().slots_in_use == 1 + (2 + 3 + 4))
        outlast_every_timer(name)
        assert (worker.stats().slots_in_use, worker.stats().reaped_clients) == (1 + (2 + 3 + 4), 3)
        first_process(other).kill()
        eventually(lambda: worker.stats().slots_in_use == 1)
        held.unlink()
        assert running.result() == str(held)


def test_waiters_learn_of_the_death_of_an_owner_in_another_container_and_are_served_by_the_next(serve, contained, held, name):  # noqa: F811
    owner = serve(handlers.hold_while_file_exists, before=CONTAINER, max_batch_size=2)
    frontends = [contained(4), contained(4), contained(4, before=())]
    with pytest.raises(gpuworker.WorkerAlreadyRunning, match="another pid namespace"):
        gpuworker.Worker(handlers.identity, name=name, in_process=True).start()

    first_process(owner).suspend()
    patient = contained(1)
    patient.stdin.write("results\n")
    patient.stdin.flush()
    late = gpuworker.connect(name)
    for _ in range(4):
        with pytest.raises(gpuworker.DeadlineExceeded):
            late.submit("late", timeout=0.06)  # longer than a client trusts its owner
    assert Stats.of(name).owner_alive, "it is stopped, not dead"
    first_process(owner).resume()

    kill_contained(owner)
    for frontend in frontends:
        assert ask(frontend, "results") == f"{['WorkerDied'] * 4}\n"
    assert patient.stdout.readline() == "['WorkerDied']\n"
    assert not Stats.of(name).owner_alive

    held.unlink()
    serve(handlers.hold_while_file_exists, before=CONTAINER, max_batch_size=2)
    for frontend in [*frontends, patient]:
        assert ask(frontend, "submit") == "True\n"
    assert late.submit("after") == "after"
    eventually(lambda: slots(name) == 0)


def test_requests_that_nobody_was_waiting_for_are_served_by_the_next_owner_in_another_container(serve, contained, held, name):  # noqa: F811
    owner = serve(handlers.hold_while_file_exists, before=CONTAINER, max_batch_size=2)
    frontends = [contained(4), contained(4), contained(4, before=())]
    eventually(lambda: Stats.of(name).batch_running_s > 0)
    kill_contained(owner)
    serve(handlers.hold_while_file_exists, before=CONTAINER, max_batch_size=2)
    eventually(lambda: Stats.of(name).requeued > 0)
    held.unlink()
    for frontend in frontends:
        assert ask(frontend, "results") == f"{[True] * 4}\n"
    eventually(lambda: slots(name) == 0)


def test_a_container_that_is_told_to_stop_lets_its_owner_drain(serve, contained, held, name):  # noqa: F811
    owner = serve(handlers.hold_while_file_exists, before=CONTAINER, max_batch_size=2)
    frontend = contained(6)
    eventually(lambda: Stats.of(name).batch_running_s > 0)
    first_process(owner).send_signal(signal.SIGTERM)  # as pid 1 it would not even get it without a handler
    eventually(lambda: Stats.of(name).state == "draining")
    held.unlink()
    assert ask(frontend, "results") == f"{[True] * 6}\n"
    assert owner.wait(30) == 0
    assert not os.path.exists(f"/dev/shm/gpuworker-{name}")
