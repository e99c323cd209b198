"""What a service manager is told, read from a socket like systemd's."""

import contextlib
import os
import signal
import socket
import time

import pytest

from gpuworker.segment.stats import Stats
from gpuworker.worker.notify import Notifier
from tests.conftest import eventually

pytest_plugins = ("tests.served_app",)
WATCHDOG_S = 1.0


class Manager:
    """The receiving end."""

    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.setblocking(False)
        self.told = []

    def listen(self):
        with contextlib.suppress(BlockingIOError):
            while True:
                self.told.append(self.socket.recv(4096).decode())
        return self.told


@pytest.fixture
def manager(tmp_path, monkeypatch):
    address = str(tmp_path / "notify")
    manager = Manager(address)
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1e6)))
    yield manager
    manager.socket.close()


def test_a_service_is_ready_well_and_stopping_and_its_owner_knows_nothing_of_it(manager, serve, name):
    supervisor = serve()
    eventually(lambda: "READY=1" in manager.listen())
    owner = Stats.of(name).owner_pid
    eventually(lambda: f"STATUS=worker {name} is served by process {owner}" in manager.listen())
    assert manager.told.index(f"STATUS=worker {name} is loading") < manager.told.index("READY=1")
    eventually(lambda: manager.listen().count("WATCHDOG=1") >= 3)
    with open(f"/proc/{owner}/environ", "rb") as file:
        assert not {b"NOTIFY_SOCKET", b"WATCHDOG_USEC"} & {line.partition(b"=")[0] for line in file.read().split(b"\0")}

    os.kill(owner, signal.SIGSTOP)  # no heartbeat: half the watchdog's time later there is no sign of life any more
    time.sleep(WATCHDOG_S)
    fed = manager.listen().count("WATCHDOG=1")
    time.sleep(WATCHDOG_S)
    assert manager.listen().count("WATCHDOG=1") == fed
    os.kill(owner, signal.SIGCONT)
    eventually(lambda: manager.listen().count("WATCHDOG=1") > fed)

    os.kill(owner, signal.SIGKILL)
    eventually(lambda: Stats.of(name).restarts == 1 and Stats.of(name).owner_alive)
    eventually(lambda: f"STATUS=worker {name} is served by process {Stats.of(name).owner_pid}" in manager.listen())
    assert manager.told.count("READY=1") == 1
    assert "STOPPING=1" not in manager.told
    supervisor.terminate()
    assert supervisor.wait(30) == 0
    assert "STOPPING=1" in manager.listen()
    assert "STATUS=draining" in manager.told


def test_the_socket_may_be_of_the_abstract_namespace(name, monkeypatch):
    manager = Manager(f"@{name}")
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    Notifier().ready()
    assert manager.listen() == ["READY=1"]
    manager.socket.close()


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "2000000"}, None),
        ({"NOTIFY_SOCKET": "/nowhere/at/all"}, None),
        ({"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "2000000"}, 2.0),
        ({"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
        ({"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_who_is_not_listening_is_no_error(environ, watchdog_s, monkeypatch):
    for variable in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    notifier = Notifier()
    assert notifier.watchdog_s == watchdog_s
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & os.environ.keys()
    notifier.ready()
    notifier.status("well")
    notifier.feed(0)
    notifier.stopping()
