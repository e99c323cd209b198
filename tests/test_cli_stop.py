"""`gpuworker stop`: ends an owner, says so when it does not, and never ends anybody else."""

import os
import signal
import subprocess
import sys

import gpuworker
from gpuworker._native import lib
from gpuworker.cli import control, main
from gpuworker.segment import Geometry, Segment
from gpuworker.segment.liveness import Identity, identify
from gpuworker.segment.names import worker_names
from gpuworker.segment.stats import Stats
from tests.conftest import eventually, kill_served

pytest_plugins = ("tests.served_app",)


def test_stop_waits_until_the_worker_is_gone(serve, name, capsys):
    owner = serve()
    assert main(["stop", name]) == 0
    assert f"worker {name!r} (process {owner.pid}) has stopped after" in capsys.readouterr().out
    assert owner.wait(30) == 0
    assert main(["stop", name]) == 1
    assert "no worker named" in capsys.readouterr().err


def test_stop_of_a_draining_worker_waits_and_does_not_hurry_it(app, serve, name, capsys):
    owner = serve()
    with gpuworker.connect(name) as client:
        held = client.enqueue(b"hold")
        eventually(lambda: Stats.of(name).batch_running_s > 0)
        owner.terminate()
        eventually(lambda: Stats.of(name).state == "draining")
        assert main(["stop", name, "--timeout-s", "0.1"]) == 1
        assert "it is still draining; wait longer (--timeout-s)" in capsys.readouterr().err
        (app / "release").touch()
        assert held.result(timeout=30) == b"HOLD"
    assert owner.wait(30) == 0


def test_stop_kill_ends_what_does_not_end_by_itself(serve, name, capsys):
    owner = serve()
    owner.send_signal(signal.SIGSTOP)
    assert main(["stop", name, "--timeout-s", "0.1"]) == 1
    assert "(its handler holds the GIL, or the process is stopped); wait longer" in capsys.readouterr().err
    assert main(["stop", name, "--timeout-s", "0.1", "--kill"]) == 0
    assert "was killed" in capsys.readouterr().out
    assert owner.wait(30) == -signal.SIGKILL
    eventually(lambda: name not in worker_names())  # its owner has seen that, and leaves nothing
    again = serve()
    kill_served(again, name)
    assert main(["stop", name]) == 1
    assert f"is not running: its process {again.pid} has died" in capsys.readouterr().err
    serve()  # takes the dead one's segment over
    assert main(["stop", name]) == 0


def test_stop_leaves_a_program_alone_that_goes_on_after_serving(app, name, capsys, monkeypatch):
    monkeypatch.setattr(control, "EXIT_GRACE_S", 0.05)
    program = f"import gpuworker, sys; gpuworker.serve('handlers:upper', name={name!r}); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], cwd=app, stdin=subprocess.PIPE) as process:
        gpuworker.connect(name, connect_timeout_s=30).submit(b"x")
        assert main(["stop", name]) == 0
        assert f"process {process.pid} goes on without it" in capsys.readouterr().out
        assert process.poll() is None
        process.stdin.close()


def test_stop_never_signals_a_stranger_who_got_the_pid(name, capsys):
    with subprocess.Popen(["sleep", "60"]) as stranger:
        segment = Segment.own(name, Geometry(4, 64, 512, 1))
        for pretend in (lib.gw_set_owner, lib.gw_set_supervisor):
            pretend(segment.port, stranger.pid, identify(stranger.pid).start_ticks - 1, identify().pid_namespace)
        assert main(["stop", name]) == 1
        assert "is not running" in capsys.readouterr().err
        segment.unlink()
        assert stranger.poll() is None
        right = identify(stranger.pid)
        assert control.open_process(Identity(right.pid, right.start_ticks - 1, right.pid_namespace)) == -1
        os.close(control.open_process(right))
        stranger.kill()
    assert control.open_process(right) == -1


def test_stop_of_a_worker_in_another_pid_namespace_explains(in_process, gate, capsys, monkeypatch):
    monkeypatch.setattr(control, "is_local", lambda segment: False)
    assert main(["stop", in_process(gate).name]) == 1
    assert "another pid namespace" in capsys.readouterr().err
