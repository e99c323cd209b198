"""A new owner takes over from a living one (reload), and one that is loaded already from a dead one (standby)."""

import os
import signal

import psutil
import pytest

from gpuworker.segment import Segment
from tests import handlers
from tests.conftest import eventually, is_gone, kill_owner, running
from tests.test_fork import in_child, succeeded


def loads(folder, which="begun"):
    """Owners that have begun (or done) loading: their pids."""
    return {int(file.name.partition("-")[2]) for file in folder.glob(f"{which}-*")}


def reload(worker):
    os.kill(worker.supervisor_pid, signal.SIGUSR1)


@pytest.fixture
def module(name, tmp_path, monkeypatch):
    """A module of the user's own, which `write` writes anew. -> (handler, write)."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    file = tmp_path / f"{name.replace('-', '_')}.py"

    def write(version):
        file.write_text(f"def run_batch(requests):\n    return [{version}] * len(requests)\n")

    write(1)
    return f"{file.stem}:run_batch", write


def test_reload_under_load_from_several_processes_fails_no_request(start, module, tmp_path):
    handler, write = module
    worker = start(handler)
    client, first, over = worker.connect(), worker.pid, tmp_path / "over"

    def calls():
        answers = []
        while not over.exists():
            answers.append(client.submit("which version?"))
        return answers == sorted(answers) and set(answers) == {1, 2}

    assert client.submit("x") == 1
    children = [in_child(calls) for _ in range(4)]
    eventually(lambda: worker.stats().completed > 100)
    write(2)
    reload(worker)
    eventually(lambda: worker.stats().reloads == 1)
    assert client.submit("x") == 2
    served = worker.stats().completed
    eventually(lambda: worker.stats().completed > served + 100)
    over.touch()
    assert succeeded(children)
    eventually(lambda: is_gone(first))
    stats = worker.stats()
    assert (stats.failed, stats.restarts, stats.requeued, stats.note) == (0, 0, 0, "")


def test_reload_waits_for_the_running_batch_and_hands_on_what_is_queued(start, tmp_path):
    worker, held = start(handlers.Loads(tmp_path), max_batch_size=1), tmp_path / "held"
    held.touch()
    client, first = worker.connect(), worker.pid
    told, pending, queued = client.enqueue(["catch", "SIGUSR1", str(held)]), client.enqueue(["pid"]), client.enqueue(["pid"])
    eventually(lambda: running(worker))
    (tmp_path / "hold").touch()
    reload(worker)
    eventually(lambda: len(loads(tmp_path)) == 2)
    assert not told.done(), "it runs on while the other one loads"
    (tmp_path / "hold").unlink()
    assert told.result(60) == "caught"
    (second,) = loads(tmp_path) - {first}
    assert pending.result(60) == queued.result(60) == worker.pid == second
    assert worker.stats().requeued == 0


def test_a_reload_that_fails_keeps_the_old_owner_and_says_why(start, tmp_path):
    worker = start(handlers.Loads(tmp_path))
    client, first, segment = worker.connect(), worker.pid, Segment.attach(worker.name, read_only=True)
    (tmp_path / "raise").touch()
    reload(worker)
    eventually(lambda: segment.overview().failed_reloads == 1)
    assert worker.stats().note == "the new owner could not be loaded, the old one goes on: FileNotFoundError: weights.bin is not there"
    assert client.submit(["pid"]) == worker.pid == first
    (tmp_path / "raise").unlink()
    reload(worker)
    eventually(lambda: worker.stats().reloads == 1)
    assert client.submit(["pid"]) == worker.pid != first


def test_an_owner_that_dies_while_the_next_one_loads_is_followed_by_it(start, tmp_path):
    worker = start(handlers.Loads(tmp_path))
    client = worker.connect()
    (tmp_path / "hold").touch()
    reload(worker)
    eventually(lambda: len(loads(tmp_path)) == 2)
    first = kill_owner(worker)
    pending = client.enqueue(["pid"])
    (tmp_path / "hold").unlink()
    assert {first, pending.result(60)} == loads(tmp_path)
    eventually(lambda: worker.stats().reloads == 1)


def test_a_reload_asked_for_during_another_one_follows_it(start, tmp_path):
    worker = start(handlers.Loads(tmp_path))
    (tmp_path / "hold").touch()
    reload(worker)
    eventually(lambda: len(loads(tmp_path)) == 2)
    reload(worker)  # what the first one loads may be older than this
    (tmp_path / "hold").unlink()
    eventually(lambda: worker.stats().reloads == 2)
    assert len(loads(tmp_path)) == 3


def test_sigterm_during_a_reload_ends_all(start, tmp_path):
    worker = start(handlers.Loads(tmp_path))
    (tmp_path / "hold").touch()
    reload(worker)
    eventually(lambda: len(loads(tmp_path)) == 2)
    worker.stop()
    assert all(map(is_gone, loads(tmp_path)))


def test_a_standby_serves_at_once_and_is_followed_by_another(start, tmp_path):
    worker = start(handlers.Loads(tmp_path), standby=True)
    client = worker.connect()
    for n in range(2, 4):
        eventually(lambda n=n: len(loads(tmp_path, "done")) == n)
        (tmp_path / "hold").touch()  # nobody is loaded from now on
        standby = loads(tmp_path) - {worker.pid} & {child.pid for child in psutil.Process(worker.supervisor_pid).children()}
        kill_owner(worker)
        assert {client.submit(["pid"])} == standby
        eventually(lambda n=n: len(loads(tmp_path)) == n + 1)
        assert len(psutil.Process(worker.supervisor_pid).children()) == 2, "one spare, not more"
        (tmp_path / "hold").unlink()


def test_a_standby_that_dies_is_replaced(start, tmp_path):
    worker = start(handlers.Loads(tmp_path), standby=True)
    first = worker.pid
    eventually(lambda: len(loads(tmp_path, "done")) == 2)
    (tmp_path / "die").touch()
    (standby,) = loads(tmp_path) - {first}
    os.kill(standby, signal.SIGKILL)
    eventually(lambda: len(loads(tmp_path)) >= 4)  # tried again, also when it could not be loaded
    assert worker.connect().submit(["pid"]) == first
    (tmp_path / "die").unlink()
    eventually(lambda: len(loads(tmp_path, "done")) == 3)
    assert worker.stats().restarts == 0


def test_reload_replaces_a_standby_that_was_loaded_before(start, module):
    handler, write = module
    worker = start(handler, standby=True)
    client, supervisor = worker.connect(), psutil.Process(worker.supervisor_pid)
    eventually(lambda: len(supervisor.children()) == 2)
    before = set(supervisor.children())
    write(2)
    reload(worker)
    eventually(lambda: worker.stats().reloads == 1)
    eventually(lambda: len(supervisor.children()) == 2 and not before & set(supervisor.children()))
    kill_owner(worker)
    assert client.submit("which version?") == 2


def test_restarts_and_reloads_leave_no_descriptor_and_no_process(start):
    worker = start()
    client, supervisor = worker.connect(), psutil.Process(worker.supervisor_pid)

    def one_restart_and_one_reload(n):
        client.submit(["pid"])
        kill_owner(worker)
        client.submit(["pid"])
        reload(worker)
        eventually(lambda: worker.stats().reloads == n)

    def settled():
        eventually(lambda: len(supervisor.children()) == 1)
        return supervisor.num_fds(), supervisor.num_threads()

    one_restart_and_one_reload(1)
    before = settled()
    for n in range(2, 9):
        one_restart_and_one_reload(n)
    assert settled() == before
