"""Fixtures, and the check that every test leaves the machine as it found it."""

import os
import threading
import time

import psutil
import pytest

import gpuworker


def shm_files():
    return {name for name in os.listdir("/dev/shm") if name.startswith("gpuworker-")}


def eventually(condition, within_s=30.0):
    """Waits for something that another process does; the bound is for failures only."""
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No segment, no spill file, no child process of this test survives it."""
    mine = psutil.Process()
    before_files, before_children = shm_files(), set(mine.children(recursive=True))
    yield
    own = f"-{os.getpid()}-"
    eventually(lambda: not {name for name in shm_files() - before_files if own in name}, 10)
    eventually(lambda: not set(mine.children(recursive=True)) - before_children, 10)


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
