"""Owners in processes of their own: starting, stopping, and everything that ends them."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest

import gpuworker
from gpuworker.segment.names import worker_names
from tests import handlers
from tests.conftest import Gate, eventually, is_gone, kill_all


def test_the_owner_is_another_process_and_a_fresh_interpreter(name):
    with gpuworker.Worker(handlers.owner_pid, name=name) as worker:
        assert worker.connect().submit("whose pid?") == worker.pid
        assert psutil.Process(worker.pid).ppid() == worker.supervisor_pid
        assert psutil.Process(worker.supervisor_pid).ppid() == os.getpid()
    assert worker.pid is worker.supervisor_pid is None
    assert name not in worker_names()


def test_a_handler_class_is_loaded_and_warmed_up_once(name):
    with gpuworker.Worker(handlers.Model, name=name) as worker:
        client = worker.connect()
        assert client.submit("a") == ["load", "warmup", 1, 1]
        assert client.submit("b") == ["load", "warmup", 1, 1, 1]


def test_a_handler_by_name(name):
    with gpuworker.Worker("tests.handlers:double", name=name) as worker:
        assert worker.connect().submit(21) == 42


def run_script(tmp_path, body, *args):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    return subprocess.run([sys.executable, str(script), *args], capture_output=True, text=True, timeout=100)


def test_a_handler_defined_in_the_main_script(tmp_path):
    done = run_script(
        tmp_path,
        """
        import gpuworker

        def run_batch(requests):
            return [request.upper() for request in requests]

        if __name__ == "__main__":
            with gpuworker.Worker(run_batch) as worker:
                print(worker.connect().submit("shout"))
        """,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("SHOUT\n", "", 0)


def test_a_main_script_without_its_guard_is_told_so(tmp_path):
    done = run_script(
        tmp_path,
        """
        import gpuworker

        def run_batch(requests):
            return requests

        with gpuworker.Worker(run_batch) as worker:
            print(worker.connect().submit("x"))
        """,
    )
    assert done.returncode != 0
    assert "if __name__ == '__main__':" in done.stderr


def test_a_handler_that_cannot_be_imported_is_refused_before_anything_starts():
    with pytest.raises(TypeError, match="in_process=True"):
        gpuworker.Worker(lambda requests: requests).start()


def test_not_a_handler(name):
    for bad in (42, object, object()):
        with pytest.raises((TypeError, gpuworker.WorkerStartupError), match="run_batch"):
            gpuworker.Worker(bad, name=name).start()


def test_a_failing_load_shows_the_handlers_own_error(name):
    with pytest.raises(gpuworker.WorkerStartupError, match=r"(?s)FileNotFoundError: weights.bin is not there.*handlers.py"):
        gpuworker.Worker(handlers.FailsToLoad, name=name).start()
    assert name not in worker_names()


def test_a_wrong_handler_path_is_a_startup_error(name):
    for path, message in (("tests.handlers:missing", "missing"), ("no_such_module:x", "no_such_module"), ("nocolon", "module:attribute")):
        with pytest.raises(gpuworker.WorkerStartupError, match=message):
            gpuworker.Worker(path, name=name).start()


def test_an_owner_told_to_stop_while_it_loads_stops(name, tmp_path):
    fifo = tmp_path / "weights"
    os.mkfifo(fifo)
    code = f"""
import gpuworker, sys
class Slow:
    def load(self):
        print("loading", flush=True)
        open({str(fifo)!r})
    def run_batch(self, requests):
        return requests
gpuworker.serve(Slow, name={name!r}, drain_timeout_s=1000)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "loading\n"
    process.terminate()
    assert "SIGTERM before it was ready" in process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert name not in worker_names()


@pytest.mark.parametrize("whom", [("pid",), ("supervisor_pid",), ("supervisor_pid", "pid")])
def test_stop_removes_what_the_killed_left(name, whom):
    worker = gpuworker.Worker(handlers.identity, name=name).start()
    for pid in [getattr(worker, which) for which in whom]:
        os.kill(pid, signal.SIGKILL)
    worker.stop()
    assert name not in worker_names()


def test_a_client_finds_the_new_worker_when_the_dead_ones_file_was_removed(name):
    worker = gpuworker.Worker(handlers.identity, name=name).start()
    client = worker.connect()
    client.submit("x")
    kill_all(worker)
    assert worker.pid is worker.supervisor_pid is None
    os.unlink(f"/dev/shm/gpuworker-{name}")  # by hand, or by systemd
    with gpuworker.Worker(handlers.identity, name=name):
        with pytest.raises(gpuworker.WorkerDied):
            client.submit("to the dead one")
        assert client.submit("to the new one") == "to the new one"
    worker.stop()


def test_a_second_worker_of_the_same_name_is_refused(name):
    with gpuworker.Worker(handlers.identity, name=name) as worker:
        with pytest.raises(gpuworker.WorkerStartupError, match=f"already running in process {worker.supervisor_pid};"):
            gpuworker.Worker(handlers.identity, name=name).start()
        assert worker.connect().submit("x") == "x"


def test_sigterm_drains(name, tmp_path):
    held = tmp_path / "held"
    held.touch()
    with gpuworker.Worker(handlers.hold_while_file_exists, name=name, max_batch_size=1) as worker:
        client = worker.connect()
        pending = [client.enqueue(str(held)) for _ in range(3)]
        eventually(lambda: worker.stats().batch_running_s > 0)
        os.kill(worker.supervisor_pid, signal.SIGTERM)
        eventually(lambda: worker.stats().state == "draining")
        with pytest.raises(gpuworker.WorkerDraining):
            client.submit("new")
        held.unlink()
        assert [one.result() for one in pending] == [str(held)] * 3
        eventually(lambda: worker.pid is None)
        eventually(lambda: worker.supervisor_pid is None)
        assert name not in worker_names()


def test_killing_supervisor_and_owner_ends_every_wait_with_a_typed_error_and_a_new_worker_serves(name, tmp_path):
    held = tmp_path / "held"
    held.touch()
    worker = gpuworker.Worker(handlers.hold_while_file_exists, name=name, max_batch_size=1).start()
    client = worker.connect(connect_timeout_s=60)
    outcomes = []

    def call():
        try:
            outcomes.append(client.submit(str(held)))
        except gpuworker.WorkerDied as error:
            outcomes.append(type(error))

    callers = [threading.Thread(target=call) for _ in range(8)]
    for caller in callers:
        caller.start()
    eventually(lambda: worker.stats().slots_in_use == 8)
    kill_all(worker)
    for caller in callers:
        caller.join(30)
    assert outcomes == [gpuworker.WorkerDied] * 8
    worker.stop()
    with gpuworker.Worker(handlers.identity, name=name) as worker:
        assert client.submit("after") == "after", "the same client, without reconnecting by hand"
        eventually(lambda: worker.stats().slots_in_use == 0)


def test_a_request_that_owners_die_of_is_failed_and_the_next_owner_serves(name):
    with gpuworker.Worker(handlers.dies_of_poison, name=name) as worker:
        client = worker.connect()
        with pytest.raises(gpuworker.WorkerDied, match="died while it ran this request"):
            client.submit("poison")
        assert client.submit("x") == "x"
        assert worker.stats().restarts == 2


@pytest.mark.parametrize("how", [signal.SIGKILL, "exit"])
def test_the_owner_ends_with_the_process_that_started_it(name, tmp_path, how):
    body = """
        import os, sys, time
        import gpuworker
        worker = gpuworker.Worker("tests.handlers:hold_while_file_exists", name=sys.argv[1]).start()
        worker.connect().enqueue(sys.argv[2])  # and a batch is running
        print(worker.pid, flush=True)
        if sys.argv[3] == "exit":
            os._exit(0)
        time.sleep(100)
        """
    held = tmp_path / "held"
    held.touch()
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen([sys.executable, str(script), name, str(held), str(how)], stdout=subprocess.PIPE, text=True, env=environment)
    owner = int(parent.stdout.readline())
    if how != "exit":
        parent.kill()
    parent.wait()
    parent.stdout.close()
    eventually(lambda: is_gone(owner), 20)
    with gpuworker.Worker(handlers.identity, name=name) as worker:  # whatever it left is taken over
        assert worker.connect().submit("x") == "x"


def test_a_parent_that_ends_a_thread_does_not_lose_its_owner(name):
    worker = gpuworker.Worker(handlers.identity, name=name)
    starter = threading.Thread(target=worker.start)
    starter.start()
    starter.join()
    assert worker.connect().submit("x") == "x"
    worker.stop()


def test_starting_and_stopping_leaves_no_descriptor_and_no_thread(name, gate):
    def once():
        with gpuworker.Worker(gate.run_batch, name=name, in_process=True) as worker:
            worker.connect().submit("x")

    once()
    before = psutil.Process().num_fds(), threading.active_count()
    for _ in range(20):
        once()
    assert (psutil.Process().num_fds(), threading.active_count()) == before


def test_serve_makes_this_process_the_owner(name):
    code = f"import gpuworker; from tests import handlers; gpuworker.serve(handlers.owner_pid, name={name!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert gpuworker.connect(name, connect_timeout_s=60).submit("x") == process.pid
    finally:
        process.terminate()
    assert process.wait(30) == 0


def test_a_client_whose_worker_was_taken_over_meets_a_full_ring_like_any_other(name):
    worker = gpuworker.Worker(handlers.identity, name=name, capacity=4).start()
    client = worker.connect()
    client.submit("x")
    kill_all(worker)
    with pytest.raises(gpuworker.WorkerDied):
        client.submit("to the dead one")
    gate = Gate(is_open=False)
    with gpuworker.Worker(gate.run_batch, name=name, capacity=4, in_process=True):
        pending = [client.enqueue(i) for i in range(4)]
        with pytest.raises(gpuworker.QueueFull):
            client.submit("too many", timeout=5)
        gate.open()
        assert [one.result() for one in pending] == [0, 1, 2, 3]
    worker.stop()
