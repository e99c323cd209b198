"""Fixtures, and the check that every test leaves the machine as it found it."""

import os
import signal
import tempfile
import threading
import time

import psutil
import pytest

import gpuworker
from gpuworker.segment.stats import Stats
from gpuworker.worker import logs
from tests import handlers

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background has it ignored, in our children too

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # torch's, here and in the owners: models are tiny, and threads that wait for each other crawl on busy cores
_cache = tempfile.TemporaryDirectory(prefix="gpuworker-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name  # learned run times are no business of the next run's, nor of whoever runs the tests


def shm_files():
    return {name for name in os.listdir("/dev/shm") if name.startswith("gpuworker-")}


def eventually(condition, within_s=30.0):
    """Waits for something that another process does; the bound is for failures only."""
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.005)


def is_gone(pid):
    """Dead; whether its parent has reaped it is not our concern."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_all(worker):
    """Kills a worker's supervisor and its owner: nobody is left to start another."""
    _kill_at_once(worker.supervisor_pid, worker.pid)
    eventually(lambda: worker.pid is worker.supervisor_pid is None)


def kill_served(process, name):
    """Kills the supervisor that `serve` has started, and its owner."""
    _kill_at_once(process.pid, Stats.of(name).owner_pid)
    process.wait()
    eventually(lambda: not Stats.of(name).alive)


def _kill_at_once(supervisor, owner):
    os.kill(owner, signal.SIGSTOP)  # or it would see the other's end, and tidy up
    os.kill(supervisor, signal.SIGKILL)
    os.kill(owner, signal.SIGKILL)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No segment, no spill file, no child process of this test survives it."""
    mine = psutil.Process()
    before_files, before_children = shm_files(), set(mine.children(recursive=True))
    yield
    own = f"-{os.getpid()}-"
    eventually(lambda: not {name for name in shm_files() - before_files if own in name}, 10)
    eventually(lambda: not set(mine.children(recursive=True)) - before_children, 10)


@pytest.fixture(autouse=True)
def log_settings_stay():
    """A command that was run in this process leaves its log settings to the processes that later tests start."""
    before = {variable: os.environ.get(variable) for variable in (logs.LEVEL, logs.FORMAT)}
    yield
    for variable, value in before.items():
        os.environ.pop(variable, None)
        if value is not None:
            os.environ[variable] = value


@pytest.fixture
def name():
    """A worker name of this test's own."""
    return f"t-{os.getpid()}-{os.urandom(3).hex()}"


class Gate:
    """A handler (for in-process workers) that records its batches and, while shut, holds each until it is let through."""

    def __init__(self, answer=lambda request: request, is_open=True):
        self.batches, self.answer = [], answer
        self.entered = threading.Semaphore(0)
        self._open = threading.Event()
        if is_open:
            self._open.set()

    def run_batch(self, requests):
        self.batches.append(list(requests))
        self.entered.release()
        assert self._open.wait(60), "the test never opened the gate"
        return [self.answer(request) for request in requests]

    def shut(self):
        self._open.clear()

    def open(self):
        self._open.set()

    def wait_entered(self):
        assert self.entered.acquire(timeout=60), "no batch came"


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def in_process(name):
    """Starts in-process workers that end with the test."""
    workers = []

    def start(handler, **options):
        worker = gpuworker.Worker(handler, name=f"{name}-{len(workers)}", in_process=True, **options)
        workers.append(worker)
        return worker.start()

    yield start
    for worker in workers:
        holder = getattr(worker._handler, "__self__", None)
        if isinstance(holder, Gate):
            holder.open()
        worker.stop()


SMALL = {"capacity": 16, "max_request_bytes": 4096, "max_response_bytes": 4096}


@pytest.fixture
def start(name):
    """Starts workers of this test's name, which end with it."""
    workers = []

    def start(handler=handlers.obeys, **options):
        worker = gpuworker.Worker(handler, name=name, **SMALL, **options)
        workers.append(worker)
        return worker.start()

    yield start
    for worker in workers:
        worker.stop()


@pytest.fixture
def held(tmp_path):
    """A file that a batch waits for to go."""
    file = tmp_path / "held"
    file.touch()
    return file


def running(worker):
    return worker.pid is not None and worker.stats().batch_running_s > 0


def kill_owner(worker):
    """-> its pid."""
    owner = worker.pid
    os.kill(owner, signal.SIGKILL)
    eventually(lambda: worker.pid != owner)
    return owner
