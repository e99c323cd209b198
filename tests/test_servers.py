"""Each recipe of docs/servers.md, as it is written there: one owner, whose batches span the server's processes, and no request lost while these are replaced."""

import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import psutil
import pytest

import gpuworker
from gpuworker.errors import GpuWorkerError
from tests.conftest import eventually, is_gone
from tests.web_load import Load

DOC = (pathlib.Path(__file__).parent.parent / "docs" / "servers.md").read_text()
APPS = pathlib.Path(__file__).with_name("server_apps")
COMMANDS = [line.removeprefix("$ ") for block in re.findall(r"```console\n(.*?)```", DOC, re.S) for line in block.splitlines()]
CONF = re.search(r"```python\n(# gunicorn.conf.py\n.*?)```", DOC, re.S)[1]
RECYCLED_AFTER = 40
CALLERS = 4


PROGRAMS = {"gpuworker": "gpuworker.cli", **{server: server for server in ("gunicorn", "uvicorn", "granian")}}


def words_of(command, name):
    """With this interpreter, whatever is in PATH."""
    words = shlex.split(command.replace("--name embed", f"--name {name}"))
    return [part for word in words for part in ([sys.executable, "-m", PROGRAMS[word]] if word in PROGRAMS else [word])]


def kind_of(command):
    """-> (server, its mode)"""
    words = shlex.split(command)
    words = words[words.index("--") + 1 :] if "--" in words else words
    return words[0], next((word for word in words if word in ("sync", "gthread", "gevent", "asgi", "wsgi")), "asgi")


class Server:
    """A recipe, run in a folder of its own."""

    def __init__(self, command, directory, name):
        self.name, self.fifo, self.log_file = name, directory / "fifo", directory / "log"
        os.mkfifo(self.fifo)
        self.server, mode = kind_of(command)
        app = APPS / f"{mode if mode in ('asgi', 'gevent') else 'wsgi'}.py"
        (directory / "app.py").write_text(app.read_text().replace('"embed"', f'"{name}"'))
        (directory / "gunicorn.conf.py").write_text(CONF.replace('"embed"', f'"{name}"'))
        shutil.copy(APPS / "model.py", directory)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        environment = {
            "GUNICORN_CMD_ARGS": f"--bind 127.0.0.1:{self.port} --max-requests {RECYCLED_AFTER} --no-control-socket --worker-tmp-dir /dev/shm",
            "UVICORN_PORT": str(self.port),
            "UVICORN_LIMIT_MAX_REQUESTS": str(RECYCLED_AFTER),
            "GRANIAN_PORT": str(self.port),
            "GRANIAN_RESPAWN_INTERVAL": "0.5",
        }
        with open(self.log_file, "wb") as log:
            self.process = subprocess.Popen(words_of(command, name), cwd=directory, env={**os.environ, **environment}, stdout=log, stderr=log)
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

    def kill_all(self):
        for process in [*self.top.children(recursive=True), self.top] if self.top.is_running() else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


@pytest.fixture
def serving(tmp_path, name):
    servers = []

    def start(command):
        servers.append(Server(command, tmp_path, name))
        eventually(servers[0].is_up, 60)
        return servers[0]

    yield start
    for server in servers:
        server.kill_all()
        print(server.log())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(kind_of(command)))
def test_one_owner_whose_batches_span_processes_that_are_replaced_under_load(serving, command):
    pytest.importorskip(kind_of(command)[0])
    server = serving(command)
    with Load(server.port, CALLERS) as load:

        def until(condition):
            eventually(lambda: load.has_failed() or condition(), 60)

        def web_workers():
            return {pid for answer in load.answers for pid in answer["web_workers"]}

        def have_met():
            with server.owner_held():
                until(lambda: gpuworker.Stats.of(server.name).slots_in_use > 2)
            return any(len(set(answer["web_workers"])) > 1 for answer in load.answers)

        until(have_met)
        before = web_workers()
        server.process.send_signal(signal.SIGHUP)
        until(lambda: len(web_workers() - before) >= 2)  # whom HUP has started
        if server.server != "granian":  # it recycles by age only
            until(lambda: len(web_workers()) >= len(before) + 4)
    (owner,) = {answer["owner"] for answer in load.answers}
    assert owner == gpuworker.Stats.of(server.name).owner_pid
    print(server.server, len(load.answers), "answers from", len(web_workers()), "processes;", len(load.cut), "connections closed without one")
    server.process.terminate()
    assert server.process.wait(60) == 0
    assert is_gone(owner)
