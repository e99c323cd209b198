"""Fixtures: a user's project folder, and workers that `gpuworker serve` runs from it."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

HANDLERS = """
import os, time

def upper(requests):
    while b"hold" in requests and not os.path.exists("release"):
        time.sleep(0.005)
    return [request.upper() for request in requests]

class Broken:
    def load(self):
        raise RuntimeError("weights are missing")
    def run_batch(self, requests):
        return requests
"""
SMALL = ("--capacity", "16", "--max-request-bytes", "4096", "--max-response-bytes", "4096")


@pytest.fixture
def app(tmp_path, name):
    """A user's project folder; segments of workers killed in a test are removed after it."""
    (tmp_path / "handlers.py").write_text(HANDLERS)
    (tmp_path / "lacks.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "garbled.py").write_text("def run_batch(\n")
    yield tmp_path
    for left in Path("/dev/shm").glob(f"gpuworker-{name}*"):
        left.unlink(missing_ok=True)


@pytest.fixture
def imported_app(app, monkeypatch):
    """The same as this process's current directory; what is imported from it is forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.setenv("GPUWORKER_LOG", "WARNING")  # the command sets it for the processes that it starts
    monkeypatch.chdir(app)
    monkeypatch.syspath_prepend(app)
    yield app
    for module in set(sys.modules) - before:
        del sys.modules[module]
    logging.getLogger("gpuworker").setLevel(logging.NOTSET)


@pytest.fixture
def serve(app, name):
    """Starts `gpuworker serve` and waits for its ready line."""
    started = []

    def start(*args, program=(sys.executable, "-m", "gpuworker.cli")):
        process = subprocess.Popen([*program, "serve", "handlers:upper", "--name", name, *SMALL, *args], cwd=app, stderr=subprocess.PIPE, text=True)
        started.append(process)
        process.ready_line = next((line for line in process.stderr if "ready" in line), "")
        assert process.ready_line
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()
