"""`gpuworker run`: a worker beside a command. What a web server makes of it is in test_servers."""

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

import gpuworker
from gpuworker.cli import main
from tests.conftest import eventually, is_gone

SMALL = ("--capacity", "16", "--max-request-bytes", "4096", "--max-response-bytes", "4096")
ASKS = """
import os, sys, gpuworker
assert sys.argv[2:] == ["--name", "x", "--", "-v"]
assert gpuworker.connect(sys.argv[1]).submit("x") == "x"
os.kill(os.getpid(), 9)
"""
WAITS = """
import signal, sys
def note(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(5)
for name in ("TERM", "INT", "HUP", "USR1"):
    signal.signal(getattr(signal, "SIG" + name), note)
print("started", flush=True)
while True:
    signal.pause()
"""


def run(name, *command, handler="tests.handlers:identity"):
    return main(["run", handler, "--name", name, *SMALL, "--", *command])


@pytest.fixture
def waiting(name):
    """A command that says which signals it gets and ends with SIGTERM, status 5; its process here is gpuworker's."""
    words = [sys.executable, "-m", "gpuworker.cli", "run", "tests.handlers:identity", "--name", name, *SMALL, "--", sys.executable, "-c", WAITS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"
        yield process
        process.kill()


def command_of(process):
    (command,) = (child for child in psutil.Process(process.pid).children() if WAITS in child.cmdline())
    return command


def test_the_command_finds_the_worker_has_options_of_its_own_and_its_status_is_passed_on(name):
    assert run(name, sys.executable, "-c", ASKS, name, "--name", "x", "--", "-v") == 128 + signal.SIGKILL
    with pytest.raises(gpuworker.WorkerNotFound):
        gpuworker.Stats.of(name)


def test_what_cannot_be_run(name, tmp_path, capsys):
    assert run(name, "no-such-command") == 127
    assert "there is no command no-such-command" in capsys.readouterr().err
    mark = tmp_path / "mark"
    assert run(name, "touch", str(mark), handler="tests.handlers:nothing_of_this_name") == 1
    assert "nothing_of_this_name" in capsys.readouterr().err
    assert not mark.exists()
    (odd := tmp_path / "odd").write_bytes(b"\x7fELF")
    odd.chmod(0o755)
    assert run(name, str(odd)) == 126
    for wrong in (["run", "m:f", "--name", name], ["run", "m:f", "--name", name, "--"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
        assert "give the command to run after --" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["run", "m:f", "--nme", name, "--", "x", "--nme"])
    assert "did you mean --name" in capsys.readouterr().err


def test_signals_are_handed_on_and_the_worker_outlives_the_command(waiting, name):
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
        waiting.send_signal(number)
        assert waiting.stdout.readline() == f"{number.name}\n"
    with gpuworker.connect(name) as client:
        assert client.submit("still there") == "still there"
    owner = gpuworker.Stats.of(name).owner_pid
    waiting.terminate()
    assert waiting.wait(60) == 5
    assert is_gone(owner)


def test_neither_outlives_the_other_for_long(waiting, name):
    owner = gpuworker.Stats.of(name).owner_pid
    psutil.Process(owner).parent().kill()
    assert waiting.stdout.readline() == "SIGTERM\n"
    assert waiting.wait(60) == 1
    eventually(lambda: is_gone(owner))


def test_both_end_when_gpuworker_is_killed(waiting, name):
    command, owner = command_of(waiting), gpuworker.Stats.of(name).owner_pid
    waiting.kill()
    assert waiting.stdout.readline() == "SIGTERM\n"
    eventually(lambda: is_gone(command.pid))
    eventually(lambda: is_gone(owner))


def test_a_terminals_ctrl_c_reaches_the_command_once(name):
    pid, terminal = pty.fork()
    if pid == 0:
        words = ["-m", "gpuworker.cli", "run", "tests.handlers:identity", "--name", name, *SMALL, "--", sys.executable, "-c", WAITS]
        os.execv(sys.executable, [sys.executable, *words])
    with open(terminal, "r+b", buffering=0) as screen:
        said = b""

        def has_said(words):
            nonlocal said
            while words not in said:
                said += screen.read(1024)

        has_said(b"started")
        screen.write(b"\x03")
        has_said(b"SIGINT")
        os.kill(pid, signal.SIGHUP)
        has_said(b"SIGHUP")  # whatever else Ctrl-C had come to was before this
        os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal open any more
            has_said(b"the end of it")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    assert said.count(b"SIGINT") == 1


LEAVES_AN_ORPHAN = """
import os, time
read, write = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.write(write, b"%d" % os.getpid())
    os._exit(0)
os.wait()
orphan = int(os.read(read, 16))
assert os.getppid() == 1
while os.path.exists(f"/proc/{orphan}"):
    time.sleep(0.01)
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare for a pid namespace")
def test_as_pid_1_of_a_container_it_reaps_what_the_command_leaves_behind(name):
    words = [
        sys.executable,
        "-m",
        "gpuworker.cli",
        "run",
        "tests.handlers:identity",
        "--name",
        name,
        *SMALL,
        "--",
        sys.executable,
        "-c",
        LEAVES_AN_ORPHAN,
    ]
    assert subprocess.run(["unshare", "--fork", "--kill-child", "--pid", "--mount-proc", *words], timeout=60, check=False).returncode == 0
