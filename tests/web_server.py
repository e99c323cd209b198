"""A web server and its worker, started by a command as documents have it, in a folder of its own."""

import contextlib
import os
import shlex
import socket
import subprocess
import sys

import psutil
import pytest

import gpuworker
from gpuworker.errors import GpuWorkerError
from tests.conftest import eventually

RECYCLED_AFTER = 150
"""Requests that a process answers before it is replaced, where the server can do that."""
PROGRAMS = {"gpuworker": "gpuworker.cli", **{server: server for server in ("gunicorn", "uvicorn", "granian")}}


def words_of(command):
    """With this interpreter, whatever is in PATH."""
    return [part for word in shlex.split(command) for part in ([sys.executable, "-m", PROGRAMS[word]] if word in PROGRAMS else [word])]


class Server:
    """files: what the command finds in its folder, by path. Worker `named` is one of this test's own there, and the port is a free one."""

    def __init__(self, command, files, directory, name, named="embed"):
        self.name, self.fifo, self.log_file = name, directory / "fifo", directory / "log"
        os.mkfifo(self.fifo)
        for path, text in files.items():
            (directory / path).parent.mkdir(exist_ok=True)
            (directory / path).write_text(text.replace(f'"{named}"', f'"{name}"'))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        environment = {
            "GUNICORN_CMD_ARGS": f"--bind 127.0.0.1:{self.port} --max-requests {RECYCLED_AFTER} --no-control-socket --worker-tmp-dir /dev/shm",
            "UVICORN_PORT": str(self.port),
            "UVICORN_LIMIT_MAX_REQUESTS": str(RECYCLED_AFTER),
            "GRANIAN_PORT": str(self.port),
            "GRANIAN_RESPAWN_INTERVAL": "1",
        }
        with open(self.log_file, "wb") as log:
            command = command.replace(f"--name {named}", f"--name {name}")
            self.process = subprocess.Popen(words_of(command), cwd=directory, env={**os.environ, **environment}, stdout=log, stderr=log)
        self.top = psutil.Process(self.process.pid)

    def log(self):
        return self.log_file.read_text()

    def is_up(self):
        assert self.process.poll() is None, self.log()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    @contextlib.contextmanager
    def owner_held(self):
        """While this lasts the owner is in a batch of its own, and everything else queues up."""
        with gpuworker.connect(self.name, connect_timeout_s=60) as client:
            held = client.enqueue(["hold", str(self.fifo)])
            eventually(lambda: gpuworker.Stats.of(self.name).batch_running_s > 0)
            try:
                yield
            finally:
                fifo = os.open(self.fifo, os.O_RDWR)
                with contextlib.suppress(GpuWorkerError):
                    held.result(60)
                os.close(fifo)

    def end(self):
        """As a service manager would. -> the exit status."""
        self.process.terminate()
        for _ in range(20):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(2)
            for child in self.top.children():
                if "gunicorn" in child.cmdline():  # it may have lost its master's signal when it was starting
                    child.terminate()
        for process in [*self.top.children(recursive=True), self.top]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return self.process.wait()


@pytest.fixture
def serving(tmp_path, name):
    """Starts one and waits until it listens; its log is shown if the test fails."""
    servers = []

    def start(*about):
        servers.append(Server(*about[:2], tmp_path, name, *about[2:]))
        eventually(servers[0].is_up, 60)
        return servers[0]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.end()
        print(server.log())
