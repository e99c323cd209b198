"""An owner dies, and nothing is lost: what is queued, what was running, and whoever waits. And everything else that can end, in every order."""

import ctypes
import gc
import os
import signal
import threading

import psutil
import pytest

import gpuworker
from gpuworker.segment.names import worker_names
from gpuworker.worker.job import Job
from gpuworker.worker.supervisor import Supervisor
from tests import handlers
from tests.conftest import eventually, is_gone, kill_owner, running


def outcome(pending):
    try:
        return pending.result(60)
    except gpuworker.GpuWorkerError as error:
        return type(error)


# what becomes of requests


def test_what_is_queued_and_what_was_running_is_served_by_the_next_owner(start, held):
    worker = start(max_batch_size=1)
    client = worker.connect()
    first = client.enqueue(["hold", str(held)])
    queued = [client.enqueue(["pid"]) for _ in range(5)]
    eventually(lambda: running(worker))
    owner = kill_owner(worker)
    eventually(lambda: running(worker))
    held.unlink()
    assert first.result(60) == "held"
    assert {one.result(60) for one in queued} == {worker.pid}
    assert worker.pid != owner
    stats = worker.stats()
    assert (stats.restarts, stats.requeued, stats.state, stats.slots_in_use) == (1, 1, "serving", 0)
    assert stats.note == "the owner was killed by SIGKILL"


def test_with_fail_what_was_running_is_failed_and_what_is_queued_is_served(start, held):
    worker = start(max_batch_size=1, on_owner_death="fail")
    client = worker.connect()
    first, second = client.enqueue(["hold", str(held)]), client.enqueue(["echo", 2])
    eventually(lambda: running(worker))
    kill_owner(worker)
    assert [outcome(first), outcome(second)] == [gpuworker.WorkerDied, 2]


@pytest.mark.parametrize(("max_attempts", "answer"), [(2, gpuworker.WorkerDied), (3, "held")])
def test_a_request_is_run_by_max_attempts_owners(start, held, max_attempts, answer):
    worker = start(max_attempts=max_attempts)
    pending = worker.connect().enqueue(["hold", str(held)])
    for _ in range(2):
        eventually(lambda: running(worker))
        kill_owner(worker)
    if max_attempts > 2:
        eventually(lambda: running(worker))
    held.unlink()
    assert outcome(pending) == answer


def test_a_poison_request_takes_nobody_with_it(start, held):
    worker = start(max_batch_size=8)
    client = worker.connect()
    first = client.enqueue(["hold", str(held)])
    eventually(lambda: running(worker))
    batch = [client.enqueue(request) for request in (["echo", 1], ["die"], ["echo", 3], ["echo", 4])]
    held.unlink()
    assert [outcome(one) for one in (first, *batch)] == ["held", 1, gpuworker.WorkerDied, 3, 4]
    stats = worker.stats()
    assert (stats.restarts, stats.requeued) == (2, 4)
    assert stats.batch_sizes == {"1": 4}, "those of the first batch ran one by one; it and the poison's own have no end that could be counted"


def test_an_owner_that_leaves_by_itself_is_replaced_too(start):
    worker = start()
    client = worker.connect()
    with pytest.raises(gpuworker.RemoteError, match="SystemExit: 3"):
        client.submit(["leave", 3])
    assert client.submit(["echo", "and on"]) == "and on"
    assert worker.stats().restarts == 1
    assert "exited with status 3" in worker.stats().note


def test_an_owner_told_to_stop_by_somebody_else_drains_and_is_replaced(start, held):
    worker = start(max_batch_size=1)
    client = worker.connect()
    pending = [client.enqueue(["hold", str(held)]), client.enqueue(["pid"])]
    eventually(lambda: running(worker))
    owner = worker.pid
    os.kill(owner, signal.SIGTERM)
    eventually(lambda: worker.stats().state == "draining")
    held.unlink()
    assert [one.result(60) for one in pending] == ["held", owner]
    eventually(lambda: worker.stats().state == "serving")
    assert client.submit(["pid"]) == worker.pid != owner


@pytest.mark.parametrize("request_", [["sleep", 10_000], ["hog"]], ids=["sleeps", "holds the GIL"])
def test_a_batch_that_runs_too_long_is_ended_with_its_owner(start, request_):
    worker = start(max_batch_size=1, run_timeout_s=0.3)
    client = worker.connect()
    stuck, queued = client.enqueue(request_), client.enqueue(["pid"])
    with pytest.raises(gpuworker.WorkerDied, match="longer than run_timeout_s"):
        stuck.result(60)
    assert queued.result(60) == worker.pid
    assert worker.stats().restarts == 1, "the next one has time of its own"
    assert worker.stats().note == "the owner ran a batch for longer than run_timeout_s=0.3 and was ended"


# owners that do not come back


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "could not start: FileNotFoundError: weights.bin is not there"),
        ("die", "was killed by SIGKILL. Its last words:\nGPU has fallen off the bus"),
    ],
)
def test_a_worker_whose_owners_keep_dying_fails_and_says_why(start, tmp_path, how, cause):
    worker = start(handlers.Loads(tmp_path), max_restarts=2)
    client = worker.connect(connect_timeout_s=1000)
    waiting = client.enqueue(["hold", str(tmp_path)])
    eventually(lambda: running(worker))
    (tmp_path / how).touch()
    kill_owner(worker)
    new = worker.connect(connect_timeout_s=1000)
    for call in (lambda: waiting.result(60), lambda: client.submit(["echo", 1]), lambda: new.submit(["echo", 1])):
        with pytest.raises(gpuworker.WorkerDied) as caught:
            call()
        assert "has failed and is not started again: 3 owners in a row died before they had answered anything, the last one " + cause in str(
            caught.value
        )
    assert worker.stats().state == "failed"
    eventually(lambda: worker.supervisor_pid is None)
    (tmp_path / how).unlink()
    assert len(list(tmp_path.glob("begun-*"))) == 3
    start(handlers.Loads(tmp_path))
    assert client.submit(["echo", "again"]) == new.submit(["echo", "again"]) == "again"


def test_a_first_owner_that_is_killed_is_a_startup_error_with_its_last_words(start, tmp_path, name):
    (tmp_path / "die").touch()
    with pytest.raises(gpuworker.WorkerStartupError, match=r"(?s)its owner was killed by SIGKILL, before it was ready.*GPU has fallen off the bus"):
        start(handlers.Loads(tmp_path))
    assert name not in worker_names()


def test_an_owner_that_is_not_ready_in_time_is_a_startup_error(start, tmp_path, name):
    (tmp_path / "hold").touch()
    with pytest.raises(gpuworker.WorkerStartupError, match=r"was not ready within startup_timeout_s=0\.1"):
        start(handlers.Loads(tmp_path), startup_timeout_s=0.1)
    assert name not in worker_names()


# ends


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_what_an_owner_started_ends_with_it(start, how):
    worker = start()
    client = worker.connect()
    daemon = client.submit(["daemon"])
    eventually(lambda: psutil.Process(daemon).ppid() == worker.supervisor_pid)
    if how == "killed":
        kill_owner(worker)
        assert client.submit(["echo", "next"]) == "next"
    else:
        worker.stop()
    eventually(lambda: not psutil.pid_exists(daemon))  # nor a zombie


@pytest.mark.parametrize("is_busy", [False, True])
def test_without_its_supervisor_an_owner_ends_and_its_callers_are_told(start, held, name, is_busy):
    worker = start()
    client, owner = worker.connect(), worker.pid
    pending = client.enqueue(["hold", str(held)])
    eventually(lambda: running(worker))
    if not is_busy:
        held.unlink()
        assert pending.result(60) == "held"
    os.kill(worker.supervisor_pid, signal.SIGKILL)
    if is_busy:
        assert outcome(pending) == gpuworker.WorkerDied
    else:
        eventually(lambda: name not in worker_names())
    eventually(lambda: is_gone(owner))
    successor = start()
    assert client.submit(["pid"]) == successor.pid


def test_the_name_is_free_as_soon_as_a_supervisor_was_killed(start, held):
    worker = start()
    pending = worker.connect().enqueue(["hold", str(held)])
    eventually(lambda: running(worker))
    os.kill(worker.supervisor_pid, signal.SIGKILL)
    successor = start()  # takes over what there is
    held.unlink()
    assert successor.connect().submit(["echo", 1]) == 1
    assert outcome(pending) in ("held", gpuworker.WorkerDied), "by when its caller looked"


def test_the_same_sigterm_to_owner_and_supervisor_drains(start, held):
    worker = start(max_batch_size=1, drain_timeout_s=1000)
    client = worker.connect()
    pending = [client.enqueue(["hold", str(held)]), client.enqueue(["echo", 2])]
    eventually(lambda: running(worker))
    for pid in (worker.pid, worker.supervisor_pid):  # as systemd sends it
        os.kill(pid, signal.SIGTERM)
    eventually(lambda: worker.stats().state == "draining")
    with pytest.raises(gpuworker.WorkerDraining):
        client.submit(["echo", 3])
    held.unlink()
    assert [one.result(60) for one in pending] == ["held", 2]
    eventually(lambda: worker.supervisor_pid is None)
    assert worker._process.returncode == 0


def test_a_second_sigterm_refuses_what_is_queued(start, held):
    worker = start(max_batch_size=1, drain_timeout_s=1000)
    client = worker.connect()
    first, queued = client.enqueue(["catch", "SIGINT", str(held)]), client.enqueue(["echo", 2])
    eventually(lambda: running(worker))
    os.kill(worker.supervisor_pid, signal.SIGTERM)
    eventually(lambda: worker.stats().state == "draining")
    os.kill(worker.supervisor_pid, signal.SIGTERM)  # its owner leaves once its batch is over
    assert outcome(first) == "caught"
    assert outcome(queued) == gpuworker.WorkerDraining
    eventually(lambda: worker.supervisor_pid is None)


def test_sigterm_while_the_first_owner_loads(start, tmp_path, name):
    (tmp_path / "hold").touch()
    errors = []

    def start_it():
        try:
            start(handlers.Loads(tmp_path))
        except gpuworker.WorkerStartupError as error:
            errors.append(str(error))

    starter = threading.Thread(target=start_it)
    starter.start()
    eventually(lambda: list(tmp_path.glob("begun-*")))
    os.kill(psutil.Process(int(next(tmp_path.glob("begun-*")).name[6:])).ppid(), signal.SIGTERM)
    starter.join(60)
    assert "stopped by SIGTERM before it was ready" in errors[0]
    assert name not in worker_names()


def test_sigterm_while_the_next_owner_loads(start, tmp_path, name):
    worker = start(handlers.Loads(tmp_path))
    (tmp_path / "hold").touch()
    pending = worker.connect().enqueue(["hold", str(tmp_path)])
    eventually(lambda: running(worker))
    kill_owner(worker)
    eventually(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
    os.kill(worker.supervisor_pid, signal.SIGTERM)
    assert outcome(pending) == gpuworker.WorkerDraining
    assert worker._process.wait(60) == 0
    assert name not in worker_names()


def test_a_stopped_owner_does_not_keep_its_supervisor_from_stopping(start, name):
    worker = start(drain_timeout_s=0)
    os.kill(worker.pid, signal.SIGSTOP)
    worker.stop()
    assert name not in worker_names()


# what it leaves to the process it runs in, and what it passes on


def test_a_supervisor_leaves_its_process_as_it_was(name):
    def condition():
        handled = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)]
        with open(f"/proc/{os.getpid()}/stat") as stat:
            return handled, signal.set_wakeup_fd(-1), stat.read().split()[3], sorted(os.listdir("/proc/self/fd"))

    gc.collect()  # of other tests
    before, told = condition(), []
    for _ in range(2):
        assert Supervisor(Job.of("tests.handlers:FailsToLoad", name, {}), lambda **report: told.append(report)).run() == 1
    assert condition() == before
    assert "weights.bin is not there" in told[1]["error"]
    is_subreaper = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(is_subreaper), 0, 0, 0)
    assert not is_subreaper.value


def test_what_an_owner_writes_is_passed_on_and_its_last_words_are_kept(start, capfd):
    worker = start()
    client = worker.connect()
    client.submit(["write", 10, "goodbye"])
    kill_owner(worker)
    eventually(lambda: worker.stats().restarts == 1)
    assert client.submit(["echo", 1]) == 1
    assert worker.stats().note.endswith("\ngoodbye")
    written = capfd.readouterr().err
    assert written.count("x" * 1023 + "\n") == 10 * 1024
    assert "goodbye\n" in written


def test_a_supervisor_whose_own_stderr_nobody_reads_goes_on(start):
    read, write = os.pipe()
    stderr = os.dup(2)
    os.dup2(write, 2)
    try:
        worker = start()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(write)
    client = worker.connect()
    client.submit(["write", 1, "goodbye"], timeout=60)
    kill_owner(worker)
    assert client.submit(["echo", 1], timeout=60) == 1
    assert worker.stats().note.endswith("\ngoodbye")
    os.close(read)
