"""`gpuworker reload`: the code that is there now, and no request that fails."""

import os
import signal
import threading

import gpuworker
from gpuworker.cli import main
from gpuworker.segment.stats import Stats

pytest_plugins = ("tests.served_app",)


def test_reload_brings_in_new_code_and_no_request_fails(app, serve, name, capsys):
    supervisor = serve()
    before, over = Stats.of(name).owner_pid, threading.Event()
    failures, answers = [], set()

    def ask():
        with gpuworker.connect(name) as client:
            while not over.is_set():
                try:
                    answers.add(client.submit(b"question"))
                except Exception as error:
                    failures.append(error)

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    (app / "handlers.py").write_text("def upper(requests):\n    return [b'new'] * len(requests)\n")
    assert main(["reload", name]) == 0
    with gpuworker.connect(name) as client:
        assert client.submit(b"question") == b"new"
    over.set()
    for asker in askers:
        asker.join()
    assert (failures, answers) == ([], {b"QUESTION", b"new"})
    stats = Stats.of(name)
    assert (stats.reloads, stats.restarts, stats.supervisor_pid) == (1, 0, supervisor.pid)
    assert f"process {stats.owner_pid} took over from process {before}" in capsys.readouterr().out


def test_a_reload_that_fails_leaves_the_old_owner_and_says_why(app, serve, name, capsys):
    serve()
    before = Stats.of(name).owner_pid
    (app / "handlers.py").write_text("import nothing_of_this_name\n")
    assert main(["reload", name]) == 1
    assert "the old one goes on: ModuleNotFoundError: No module named 'nothing_of_this_name'" in capsys.readouterr().err
    with gpuworker.connect(name) as client:
        assert client.submit(b"still there") == b"STILL THERE"
    assert Stats.of(name).owner_pid == before


def test_what_cannot_be_reloaded_says_so(app, serve, name, in_process, gate, capsys):
    assert main(["reload", name]) == 1
    assert "no worker named" in capsys.readouterr().err
    assert main(["reload", in_process(gate).name]) == 1
    assert "has no supervisor" in capsys.readouterr().err
    supervisor = serve()
    owner = Stats.of(name).owner_pid
    os.kill(owner, signal.SIGSTOP)  # so that it cannot clean up behind its supervisor
    supervisor.kill()
    supervisor.wait()
    os.kill(owner, signal.SIGKILL)
    assert main(["reload", name]) == 1
    assert "is not running" in capsys.readouterr().err
