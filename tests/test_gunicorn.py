"""gunicorn with the sidecar, over real HTTP: master, workers, supervisor and owner are all real processes."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import gpuworker
from gpuworker.errors import GpuWorkerError
from gpuworker.segment.stats import Stats

from .conftest import eventually, is_gone

APP = pathlib.Path(__file__).with_name("gunicorn_app")
SUPERVISOR = "gpuworker.worker.supervise"


class Gunicorn:
    """One gunicorn with its configuration in a file that a test may change before HUP."""

    def __init__(self, directory, name, workers=2, preload=False, handler="model:run_batch", **options):
        self.name, self.directory = name, directory
        self.log_file, self.options_file, self.fifo = directory / "log", directory / "options", directory / "fifo"
        self.worker_count = workers
        self.configure(workers=workers, preload=preload, handler=handler, **options)
        os.mkfifo(self.fifo)
        with open(self.log_file, "wb") as log:
            self.process = subprocess.Popen(
                [pathlib.Path(sys.executable).with_name("gunicorn"), "-c", APP / "conf.py", "--chdir", APP, "-b", "127.0.0.1:0", "app:app"],
                env={**os.environ, "TEST_WORKER": name, "TEST_OPTIONS": str(self.options_file)},
                stdout=log,
                stderr=log,
            )
        self.master = psutil.Process(self.process.pid)

    def configure(self, **settings):
        self.options_file.write_text(json.dumps(settings))

    def log(self):
        return self.log_file.read_text()

    def call(self, method, path="/", body=None, **headers):
        """-> status, JSON, headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read()), response.headers

    def post(self, value, **headers):
        return self.call("POST", "/", json.dumps(value), **headers)

    def answer(self, value):
        """What the handler says of a request, which must succeed."""
        status, answer, _ = self.post(value)
        assert (status, answer.get("value")) == (200, value), (status, answer)
        return answer

    def up(self):
        """Waits until it serves with all its workers. -> pid of the owner."""
        eventually(lambda: "Listening at" in self.log(), 60)
        self.port = int(re.search(r"Listening at: http://127.0.0.1:(\d+)", self.log())[1])
        status, body = self.health()
        assert (status, body["status"]) == (200, "ok")
        eventually(lambda: len(self.workers()) == self.worker_count)
        return body["owner_pid"]

    def health(self):
        return self.call("GET", "/healthz")[:2]

    def stats(self):
        return Stats.of(self.name)

    def workers(self, master=None):
        """Pids of gunicorn's workers."""
        return {process.pid for process in (master or self.master).children() if not is_supervisor(process)}

    def supervisor(self):
        (supervisor,) = filter(is_supervisor, self.master.children())
        return supervisor

    def send(self, number):
        os.kill(self.master.pid, number)

    @contextlib.contextmanager
    def owner_held(self):
        """While this lasts the owner is in a batch of its own, and everything else queues up. Yields that batch's Pending."""
        with gpuworker.connect(self.name, connect_timeout_s=60) as client:
            held = client.enqueue(["hold", str(self.fifo)])
            eventually(lambda: self.stats().batch_running_s > 0)
            try:
                yield held
            finally:
                fifo = os.open(self.fifo, os.O_RDWR)
                with contextlib.suppress(GpuWorkerError):
                    held.result(60)
                os.close(fifo)

    def wait_for_slots(self, count):
        eventually(lambda: self.stats().slots_in_use == count)

    def kill_all(self):
        family = [self.master, *self.master.children(recursive=True)] if self.master.is_running() else []
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def is_supervisor(process):
    with contextlib.suppress(psutil.Error):
        return SUPERVISOR in process.cmdline()
    return False


@pytest.fixture
def gunicorn(tmp_path, name):
    """Starts one; whatever becomes of it in the test, it is gone afterwards, and its log is shown if the test failed."""
    started = []

    def start(**settings):
        started.append(Gunicorn(tmp_path, name, **settings))
        return started[0]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.terminate()
            for _ in range(20):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.process.wait(2)
                    break
                for worker in server.workers():  # gunicorn may have lost the signal to one that was starting
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker, signal.SIGTERM)
        server.kill_all()
        print(server.log())


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as threads:
        yield threads


@pytest.mark.parametrize("preload", [False, True])
def test_one_owner_batches_the_requests_of_all_workers(gunicorn, pool, preload):
    server = gunicorn(workers=4, preload=preload)
    owner = server.up()
    with server.owner_held():
        answers = [pool.submit(server.answer, number) for number in range(4)]
        server.wait_for_slots(5)
    batches = [answer.result()["web_workers"] for answer in answers]
    assert [set(batch) for batch in batches] == [server.workers()] * 4, "one batch of four, of one request from each worker"
    assert {answer["owner"] for answer in pool.map(server.answer, range(40))} == {owner}
    assert psutil.Process(owner).parent() == server.supervisor()


def test_errors_over_http(gunicorn):
    server = gunicorn(capacity=8, client_quota=8)
    server.up()
    assert server.call("POST", "/", "{nonsense")[0] == 400
    with server.owner_held():
        status, body, _ = server.post("late", **{"X-Timeout-Ms": "50"})
        assert (status, body["error"]["type"]) == (504, "DeadlineExceeded")
        with gpuworker.connect(server.name) as client:
            waiting = [client.enqueue(["fill", i]) for i in range(7)]
            status, body, headers = server.post("one too many")
            assert (status, body["error"]["type"]) == (503, "QueueFull")
            assert int(headers["Retry-After"]) >= 1
            for pending in waiting:
                pending.cancel()
    eventually(lambda: server.post("again")[0] == 200)


def test_hup_loses_nothing_and_keeps_the_owner(gunicorn, pool):
    server = gunicorn(workers=4)
    owner, supervisor, old = server.up(), server.supervisor(), server.workers()
    server.configure(workers=4, preload=False, handler="model:run_batch", max_batch_size=5)
    with server.owner_held():
        answers = [pool.submit(server.answer, number) for number in range(8)]
        server.wait_for_slots(5)  # the other half waits to be accepted
        server.send(signal.SIGHUP)
        server.wait_for_slots(9)  # by the new workers
        assert len(server.workers() - old) == 4
    owners = {answer.result()["owner"] for answer in answers}
    eventually(lambda: not server.workers() & old)
    owners |= {server.answer("after")["owner"]}
    assert owners == {owner}
    assert server.supervisor() == supervisor
    assert server.stats().options["max_batch_size"] == 32
    assert "needs a restart of gunicorn" in server.log()


def test_term_finishes_requests_before_the_owner_goes(gunicorn, pool):
    server = gunicorn()
    owner = server.up()
    with server.owner_held():
        answer = pool.submit(server.answer, "in time")
        server.wait_for_slots(2)
        server.send(signal.SIGTERM)
        eventually(lambda: "Handling signal: term" in server.log())
    assert answer.result()["owner"] == owner
    assert server.process.wait(30) == 0
    assert is_gone(owner)
    assert "own on_exit ran after" in server.log()


def test_everything_ends_with_a_killed_master(gunicorn):
    server = gunicorn(preload=True)
    owner, supervisor, workers = server.up(), server.supervisor().pid, server.workers()
    server.send(signal.SIGKILL)
    eventually(lambda: is_gone(supervisor))
    eventually(lambda: is_gone(owner))
    for pid in workers:  # gunicorn's idle workers look for their master only every timeout / 2
        os.kill(pid, signal.SIGKILL)


def test_a_dead_owner_is_replaced_without_its_callers_noticing(gunicorn, pool):
    server = gunicorn()
    owner = server.up()
    supervisor = server.supervisor()
    supervisor.suspend()  # so that there is time to see the owner dead
    with server.owner_held() as held:
        caught = pool.submit(server.post, "caught")
        server.wait_for_slots(2)
        os.kill(owner, signal.SIGKILL)
        eventually(lambda: server.health()[0] == 503)
        assert server.health()[1]["status"] == "restarting"
        supervisor.resume()
        eventually(lambda: server.stats().owner_pid != owner and server.stats().batch_running_s > 0)
    assert held.result() is not None
    status, answer, _ = caught.result()
    assert (status, answer["value"]) == (200, "caught")
    eventually(lambda: server.health()[0] == 200)
    assert answer["owner"] == server.health()[1]["owner_pid"] != owner
    assert "was killed by SIGKILL" in server.log()


def test_hup_brings_back_a_sidecar_whose_supervisor_was_killed(gunicorn):
    server = gunicorn()
    owner = server.up()
    server.supervisor().kill()
    server.send(signal.SIGHUP)
    eventually(lambda: is_gone(owner))
    eventually(lambda: server.health()[0] == 200)
    assert server.answer("back")["owner"] != owner


def test_a_handler_that_cannot_load_stops_gunicorn(gunicorn):
    server = gunicorn(handler="model:Broken")
    assert server.process.wait(60) == 1
    log = server.log()
    assert "FileNotFoundError: weights.bin is not there" in log
    assert 'raise FileNotFoundError("weights.bin is not there")' in log, "the handler's own traceback"
    assert "Listening at" not in log
    assert "gunicorn/arbiter.py" not in log
    assert not (server.directory / "options.pid").exists()


def test_a_wrong_option_stops_gunicorn(gunicorn):
    server = gunicorn(max_bach_size=8)
    assert server.process.wait(60) == 1
    assert "did you mean 'max_batch_size'?" in server.log()


def test_a_name_that_is_taken_stops_gunicorn(gunicorn, name):
    with gpuworker.Worker("tests.handlers:identity", name=name) as other:
        server = gunicorn()
        assert server.process.wait(60) == 1
        assert f"already running in process {other.supervisor_pid}" in server.log()


def test_usr2_goes_on_with_the_old_owner_until_it_ends(gunicorn):
    server = gunicorn(preload=True)
    old_owner, old_workers, pidfile = server.up(), server.workers(), server.directory / "options.pid"
    server.send(signal.SIGUSR2)
    successor = pathlib.Path(f"{pidfile}.2")
    eventually(lambda: successor.exists() and successor.read_text().strip())
    new_master = psutil.Process(int(successor.read_text()))
    try:
        eventually(lambda: len(server.workers(new_master)) == 2)
        assert server.answer("to either")["owner"] == old_owner
        server.send(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert not old_workers & server.workers(new_master)
        eventually(lambda: server.post("to the new one")[0] == 200)
        new_owner = server.answer("again")["owner"]
        assert is_gone(old_owner)
        assert psutil.Process(new_owner).parent().parent() == new_master
    finally:
        new_master.terminate()
        eventually(lambda: is_gone(new_master.pid), 60)
    eventually(lambda: is_gone(new_owner), 60)


def test_a_handler_is_named_not_imported():
    from gpuworker.frontends.gunicorn import sidecar

    with pytest.raises(TypeError, match="module:attr"):
        sidecar(print, name="x")
