"""Beginnings and ends: of workers, of the programs that call them, of calls that are interrupted, and of gunicorn's workers under load."""

import contextlib
import http.client
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import gpuworker
from gpuworker.segment import Segment
from tests import handlers
from tests.conftest import eventually, is_gone, shm_files
from tests.test_gunicorn import gunicorn  # noqa: F401 (a fixture)

BIG = 100_000  # bytes: more than a slot holds


# workers


def test_fifty_starts_and_stops_leave_nothing(name):
    me = psutil.Process()

    def cycles(which, count):
        for _ in range(count):
            with gpuworker.Worker(handlers.identity, name=f"{name}-{which}", capacity=8) as worker, worker.connect() as client:
                assert client.submit("x") == "x"

    cycles(0, 1)
    before = me.num_fds(), threading.active_count(), me.num_threads(), me.children(recursive=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cycles, range(2), (25, 25)))
    assert not {file for file in shm_files() if name in file}
    eventually(lambda: (me.num_fds(), threading.active_count(), me.num_threads()) == before[:3])
    assert me.children(recursive=True) == before[3], "not even a zombie"


# programs that end while requests of theirs are on their way

CALLER = """
    import os, signal, sys, threading, time
    import gpuworker

    name, held, how = sys.argv[1:]
    client = gpuworker.connect(name, on_full="block")
    pending = [client.enqueue(held) for _ in range(3)] + [client.enqueue(held + chr(0) * 100_000)]
    answered = client.enqueue("answered")
    reserved = client.reserve(1000)
    array = reserved.__enter__()
    in_a_file = client.reserve(1_000_000)
    in_a_file.__enter__()
    threads = [threading.Thread(target=client.submit, args=(held,), daemon=True) for _ in range(3)]
    threads += [threading.Thread(target=lambda: list(client.map([held] * 4)), daemon=True)]
    for thread in threads:
        thread.start()
    while [one.slots_held for one in gpuworker.Stats.of(name).clients if one.pid == os.getpid()] != [14]:
        time.sleep(0.001)
    print("all on their way", flush=True)
    sys.stdin.readline()
    """
ENDS = {
    "the end of the script": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(4)", 4),
    "an exception": ("raise RuntimeError('of the caller')", 1),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGINT": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    "SIGABRT": ("os.abort()", -signal.SIGABRT),
    "another program": ("os.execlp('sleep', 'sleep', '0')", 0),
}


def hold(requests):
    """The handler of the next test: waits while a request names a file that exists."""
    if isinstance(requests[0], str):
        handlers.hold_while_file_exists([requests[0].rstrip("\0")])
    return requests


def test_programs_that_end_with_requests_on_their_way_do_not_hang_and_give_all_slots_back(name, tmp_path):
    held = tmp_path / "held"
    held.touch()
    with gpuworker.Worker("tests.test_lifecycle:hold", name=name, capacity=256, client_quota=256, max_batch_size=1) as worker:
        client = worker.connect()
        callers = {}
        for how, (end, _) in ENDS.items():
            script = textwrap.dedent(CALLER) + end
            callers[how] = subprocess.Popen(
                [sys.executable, "-c", script, name, str(held), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        try:
            for caller in callers.values():
                assert caller.stdout.readline() == "all on their way\n", caller.stderr.read()
            left = worker.stats().slots_in_use
            assert left == 14 * len(ENDS)
            for how, caller in callers.items():
                _, errors = caller.communicate("\n", timeout=60)
                assert caller.returncode == ENDS[how][1], (how, errors)
                traceback = errors.startswith("Traceback") and errors.count("Traceback") == 1
                assert traceback if how in ("an exception", "SIGINT") else not errors, (how, errors)
                left -= 14
                eventually(lambda left=left: left <= worker.stats().slots_in_use <= left + 1)  # one runs until its batch ends
            held.unlink()
            eventually(lambda: worker.stats().slots_in_use == 0)
        finally:
            for caller in callers.values():
                caller.kill()
                caller.communicate()
        assert client.submit("after") == "after"
        eventually(lambda: not [file for file in shm_files() if f"{name}.spill" in file])


def test_a_program_that_ends_waits_no_longer_than_its_own_threads_do(name, tmp_path):
    held = tmp_path / "held"
    held.touch()
    script = """
        import concurrent.futures, sys
        import gpuworker

        client = gpuworker.connect(sys.argv[1])
        client.submit("connects")
        pool = concurrent.futures.ThreadPoolExecutor(4)
        late = [pool.submit(client.submit, sys.argv[2], timeout=0.2) for _ in range(4)]
        forgotten = client.enqueue(sys.argv[2])
        for one in late:
            one.add_done_callback(lambda future: sys.stdout.write(type(future.exception()).__name__ + chr(10)))
        """
    with gpuworker.Worker(handlers.hold_while_file_exists, name=name, max_batch_size=1) as worker:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), name, str(held)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "DeadlineExceeded\n" * 4
        eventually(lambda: worker.stats().slots_in_use == 1)
        held.unlink()
        eventually(lambda: worker.stats().slots_in_use == 0)


# calls that are interrupted


@pytest.fixture
def interrupt_when(name):
    """Sends this process SIGINT once a condition holds."""
    threads = []

    def start(condition):
        main = threading.main_thread().ident

        def wait_and_interrupt():
            eventually(condition)
            signal.pthread_kill(main, signal.SIGINT)

        threads.append(threading.Thread(target=wait_and_interrupt))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def wait_in_submit(client):
    client.submit("held")


def wait_in_result(client):
    client.enqueue("held").result()


def wait_in_a_file(client):
    client.submit(bytes(BIG))


def wait_in_map(client):
    list(client.map(["held"] * 4))


def wait_in_a_reservation(client):
    with client.reserve(10) as array:
        array[:] = 1
        client.submit(array)


@pytest.mark.parametrize("wait", [wait_in_submit, wait_in_result, wait_in_a_file, wait_in_map, wait_in_a_reservation])
def test_ctrl_c_while_waiting_for_an_answer_gives_the_slots_back(in_process, gate, interrupt_when, wait):
    gate.shut()
    worker = in_process(gate.run_batch, capacity=8, client_quota=8, max_batch_size=1)
    client, other = worker.connect(), worker.connect()
    running = other.enqueue("running")
    gate.wait_entered()
    sent = 4 if wait is wait_in_map else 1
    interrupt_when(lambda: worker.stats().slots_in_use == 1 + sent)
    with pytest.raises(KeyboardInterrupt):
        wait(client)
    assert worker.stats().slots_in_use == 1, "at once, as none of them was running"
    gate.open()
    assert running.result() == "running"
    assert client.submit("after") == "after"
    assert worker.stats().slots_in_use == 0
    assert not [file for file in shm_files() if f"{worker.name}.spill" in file]
    assert gate.batches == [["running"], ["after"]]


@pytest.mark.parametrize("wait", [wait_in_submit, wait_in_result, wait_in_a_file, wait_in_map, wait_in_a_reservation])
def test_ctrl_c_while_waiting_for_a_slot_leaves_none_behind(in_process, gate, interrupt_when, wait):
    worker = in_process(gate.run_batch, capacity=2, client_quota=2, max_batch_size=1)
    client, other = worker.connect(on_full="block"), worker.connect()
    client.submit("joins")
    gate.wait_entered()
    gate.shut()
    pending = [other.enqueue(i) for i in range(2)]
    gate.wait_entered()
    interrupt_when(lambda: sys._current_frames()[threading.main_thread().ident].f_code.co_filename.endswith("steps.py"))
    with pytest.raises(KeyboardInterrupt):
        wait(client)
    assert worker.stats().slots_in_use == 2
    gate.open()
    assert [one.result() for one in pending] == [0, 1]
    assert [client.submit(i) for i in range(10)] == list(range(10))
    assert worker.stats().slots_in_use == 0


def test_ctrl_c_while_waiting_for_a_worker_to_come_up(in_process, gate, name, interrupt_when):
    client = gpuworker.connect(f"{name}-0", connect_timeout_s=100)
    asked = threading.Event()
    interrupt_when(asked.is_set)
    with pytest.raises(KeyboardInterrupt):
        asked.set()
        client.submit("too early")
    in_process(gate.run_batch)
    assert client.submit("after") == "after"


def test_the_first_error_of_map_gives_back_the_slots_of_the_answers_behind_it(in_process):
    def fails_on_zero(requests):
        return [ValueError("zero") if request == 0 else request for request in requests]

    worker = in_process(fails_on_zero)

    def requests():
        yield from range(8)
        eventually(lambda: worker.stats().completed == 7)

    with pytest.raises(ValueError, match="zero") as caught:
        list(worker.connect().map(requests()))
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert caught.tb, "and not only when nobody keeps the error, and with its traceback the frame of map, any more"


def test_interrupts_at_any_moment_leave_no_slot_behind(name, monkeypatch):
    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        raise Interrupt

    def in_place():
        with client.reserve(1000) as array:
            array[:] = 3
            assert client.submit(array)[999] == 3

    def in_place_in_a_file():
        with client.reserve(BIG) as array:
            array[:] = 3
            assert client.enqueue(array).result()[BIG - 1] == 3

    rng, interrupted, swallowed = random.Random(20261130), 0, []
    monkeypatch.setattr(sys, "unraisablehook", lambda _: swallowed.append(True))  # Python does so with those that meet a __del__
    before = signal.signal(signal.SIGALRM, interrupt)
    with gpuworker.Worker(handlers.identity, name=name, capacity=32) as worker:
        client, segment = worker.connect(), Segment.attach(name, read_only=True)
        client.submit("connects")
        calls = (
            lambda: client.submit(b"small"),
            lambda: client.submit({"a": [1, 2.5]}),
            lambda: client.submit(bytes(BIG)),
            lambda: client.enqueue("small").result(),
            lambda: list(client.map(range(20))),
            in_place,
            in_place_in_a_file,
        )
        try:
            for round_ in range(700):
                call, met = calls[round_ % len(calls)], len(swallowed) + interrupted
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3))
                    for _ in range(1000):  # some are swallowed without a word
                        if len(swallowed) + interrupted != met:
                            break
                        call()
                except Interrupt:
                    interrupted += 1
                eventually(lambda: segment.overview().in_use == 0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert interrupted > 600
        assert worker.stats().reaped_slots == 0
        assert client.submit("after") == "after"


# gunicorn

WEB_WORKERS = {
    "sync": "--worker-class sync",
    "gthread": "--worker-class gthread --threads 4",
    "gevent": "--worker-class gevent --preload",  # so that the client is made before gevent patches its process
}
RESTARTING, EXITING = re.compile(r"\[(\d+)\] \[INFO\] Autorestarting worker"), re.compile(r"Worker exiting \(pid: (\d+)\)")
needs_gevent = pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="needs gevent")


def status_of(server, value):
    """Of a request whose web worker may be killed; 0 when gunicorn closes the connection without a word."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        try:
            connection.request("POST", "/", json.dumps(value))
            return connection.getresponse().status
        except (ConnectionError, http.client.HTTPException):
            return 0


@pytest.fixture
def load():
    """Clients that post one request after the other, each over a connection of its own. -> the answers that were not right, and how many were"""

    @contextlib.contextmanager
    def run(server, clients=6):
        over, wrong, right, lock = threading.Event(), [], [0], threading.Lock()

        def ask(value):
            while True:
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                with contextlib.closing(connection):
                    try:
                        connection.connect()
                    except ConnectionError:  # not a byte was sent
                        continue
                    connection.request("POST", "/", json.dumps(value))
                    response = connection.getresponse()
                    return response.status, json.loads(response.read())

        def client(number):
            i = 0
            while not over.is_set():
                value = f"{number}-{i}"
                i += 1
                try:
                    status, answer = ask(value)
                except Exception as error:
                    status, answer = 0, repr(error)
                with lock:
                    if status == 200 and answer["value"] == value:
                        right[0] += 1
                    else:
                        wrong.append((value, status, answer))

        threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()

        def wait_for_more(count):
            enough = right[0] + count
            eventually(lambda: right[0] >= enough or wrong, 60)

        try:
            yield wait_for_more
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert wrong == []

    return run


@pytest.mark.parametrize("worker_class", ["sync", "gthread", pytest.param("gevent", marks=needs_gevent)])
def test_recycling_growing_shrinking_and_reloading_gunicorn_lose_no_request(gunicorn, load, monkeypatch, worker_class):  # noqa: F811
    monkeypatch.setenv("GUNICORN_CMD_ARGS", f"{WEB_WORKERS[worker_class]} --max-requests 150 --max-requests-jitter 150")
    server = gunicorn()
    owner, old = server.up(), server.workers()
    with load(server) as wait_for_more:
        eventually(lambda: {client.pid for client in server.stats().clients} == old)  # all are up: gunicorn may lose a SIGTERM to one that starts
        server.send(signal.SIGHUP)
        wait_for_more(30)
        eventually(lambda: not server.workers() & old)
        for number, count in ((signal.SIGTTIN, 3), (signal.SIGTTIN, 4), (signal.SIGTTOU, 3), (signal.SIGTTOU, 2)):
            server.send(number)
            eventually(lambda count=count: len(server.workers()) == count)
            wait_for_more(30)
        eventually(lambda: server.log().count("Autorestarting worker") >= 2, 60)
        wait_for_more(100)
    assert server.health()[1]["owner_pid"] == owner
    server.wait_for_slots(0)
    stats = server.stats()
    assert (stats.failed, stats.abandoned, stats.reaped_slots, stats.late_wakes) == (0, 0, 0, 0)
    eventually(lambda: set(RESTARTING.findall(server.log())) <= set(EXITING.findall(server.log())))
    eventually(lambda: server.answer("after") and {client.pid for client in server.stats().clients} == server.workers())


@pytest.mark.parametrize("worker_class", ["sync", "gthread"])
def test_a_web_worker_killed_for_its_timeout_loses_its_own_requests_and_nobody_elses(gunicorn, load, monkeypatch, worker_class):  # noqa: F811
    monkeypatch.setenv("GUNICORN_CMD_ARGS", f"{WEB_WORKERS[worker_class]} --timeout 1 --graceful-timeout 1")
    server = gunicorn()
    owner = server.up()
    with server.owner_held(), ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(status_of, server, "stuck")
        server.wait_for_slots(2)
        (victim,) = [client.pid for client in server.stats().clients if client.slots_held == 1 and client.pid != os.getpid()]
        if worker_class == "gthread":  # there only the main thread's silence counts
            os.kill(victim, signal.SIGSTOP)
        eventually(lambda: is_gone(victim), 60)
        server.wait_for_slots(1)
        assert stuck.result() in (0, 500), "gunicorn's own answer for a worker that it aborts"
    eventually(lambda: len(server.workers() - {victim}) == 2)
    with load(server) as wait_for_more:
        wait_for_more(60)
    server.wait_for_slots(0)
    assert server.answer("after")["owner"] == owner
    assert "WORKER TIMEOUT" in server.log()


def test_a_web_worker_killed_while_its_request_runs_gives_the_slot_back_when_the_batch_ends(gunicorn, load, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setenv("GUNICORN_CMD_ARGS", "--timeout 1 --graceful-timeout 1")
    server = gunicorn(max_wait_ms=20)
    server.up()
    second = tmp_path / "second fifo"
    os.mkfifo(second)
    with gpuworker.connect(server.name) as client, ThreadPoolExecutor(1) as pool:
        with server.owner_held():
            with_it = client.enqueue(["hold", str(second)])
            stuck = pool.submit(status_of, server, "stuck")
            server.wait_for_slots(3)
        eventually(lambda: server.stats().slots_in_use == 2 and server.stats().batch_running_s > 0)  # one batch of these two
        (victim,) = [one.pid for one in server.stats().clients if one.slots_held == 1 and one.pid != os.getpid()]
        eventually(lambda: is_gone(victim), 60)
        assert server.stats().slots_in_use == 2, "the owner may be writing there"
        fifo = os.open(second, os.O_RDWR)
        assert with_it.result()["value"] == str(second)
        os.close(fifo)
        assert stuck.result() in (0, 500)
    server.wait_for_slots(0)
    assert server.stats().abandoned == 1
    with load(server) as wait_for_more:
        wait_for_more(60)
