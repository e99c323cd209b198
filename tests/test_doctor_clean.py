"""`gpuworker doctor --clean`: away with what is provably nobody's, and with nothing else."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

import gpuworker
from gpuworker._native import lib
from gpuworker.cli import main
from gpuworker.segment import Geometry, Segment, State, chime
from tests.conftest import eventually, shm_files
from tests.test_behaviours_shared_memory import run_script
from tests.test_fork import in_child

SMALL = Geometry(capacity=4, max_request_bytes=64, max_response_bytes=512, max_participants=4)


def of(name):
    return {file for file in shm_files() if name in file}


@pytest.fixture(autouse=True)
def nothing_left(name):
    yield
    for file in of(name):
        os.unlink(f"/dev/shm/{file}")


def clean(capsys, name):
    """What it says that it removed of this worker."""
    assert main(["doctor", "--clean", "--json"]) == 0
    return [part for part in json.loads(capsys.readouterr().out)["removed"] if part["name"].startswith(name)]


def put(file, size=5000, mode=0o600):
    path = f"/dev/shm/{file}"
    with open(path, "wb", opener=lambda p, flags: os.open(p, flags, mode)) as out:
        out.write(bytes(size))
    return path


def dead_child(call):
    """Runs it in a child that is killed at its end."""

    def body():
        kept = call()
        os.kill(os.getpid(), signal.SIGKILL)
        return kept

    os.waitpid(in_child(body), 0)


def test_a_dead_workers_files_go(name, capsys):
    def dies():
        segment = Segment.own(name, SMALL)
        put(f"gpuworker-{name}.spill-{segment.nonce:x}-0-1-q")
        return segment

    dead_child(dies)
    put(f"gpuworker-{name}-gone.spill-1-0-1-r")
    assert len(of(name)) == 3
    found = clean(capsys, name)
    assert [(part["what"], part["files"]) for part in found] == [("a dead segment", 1), ("large payloads", 1), ("large payloads", 1)]
    assert found[1]["bytes"] == 8192
    assert of(name) == set()
    assert clean(capsys, name) == []


def test_it_says_so(name, capsys):
    dead_child(lambda: Segment.own(name, SMALL))
    assert main(["doctor", "--clean"]) == 0
    assert f"a dead segment of worker '{name}'" in capsys.readouterr().out
    main(["doctor", "--clean"])
    assert name not in capsys.readouterr().out


def test_a_failed_worker_goes_once_its_supervisor_is_gone(name, capsys):
    segment = Segment.own(name, SMALL)
    lib.gw_set_state(segment.port, State.FAILED)
    assert clean(capsys, name) == []
    segment.close()  # what the kernel does at its death
    assert [part["what"] for part in clean(capsys, name)] == ["a dead segment"]


@pytest.mark.parametrize("lock", [lib.GW_OWNER_LOCK, lib.GW_SUPERVISOR_LOCK])
def test_either_lock_keeps_it(name, capsys, lock):
    segment = Segment.own(name, SMALL)
    other = os.open(f"/dev/shm/gpuworker-{name}", os.O_RDWR)
    segment.close()
    assert lib.gw_try_lock(other, lock) == 0
    assert clean(capsys, name) == []
    os.close(other)
    assert len(clean(capsys, name)) == 1


def test_a_live_worker_keeps_all_it_has(name, capsys, in_process, gate):
    put(f"gpuworker-{name}-0.spill-1-0-1-r")
    worker = in_process(gate.run_batch, max_request_bytes=64)
    eventually(lambda: len(of(worker.name)) == 1)  # an owner that starts has swept: what comes later is not its concern
    client = worker.connect()
    client.submit(1)
    gate.shut()
    pending = client.enqueue(bytes(100_000))
    gate.wait_entered()
    put(f"gpuworker-{worker.name}.spill-{Segment.attach(worker.name).nonce ^ 1:x}-0-1-r")
    before = of(worker.name)
    assert len(before) == 3
    assert [(part["what"], part["files"]) for part in clean(capsys, worker.name)] == [("large payloads", 1)], "only what is of another segment"
    assert len(of(worker.name)) == 2
    gate.open()
    assert pending.result() == bytes(100_000)


def test_a_segment_that_somebody_still_has_mapped_keeps_its_payloads(name, capsys):
    segment = Segment.own(name, SMALL)
    put(f"gpuworker-{name}.spill-{segment.nonce:x}-0-1-r")
    segment.unlink()  # as systemd's RemoveIPC does
    assert clean(capsys, name) == []
    segment.close()
    del segment
    assert len(clean(capsys, name)) == 1


def test_half_made_segments(name, capsys):
    dead = in_child(lambda: True)
    os.waitpid(dead, 0)
    gone, alive, locked = (f"gpuworker-{name}.new-{pid}-{i}" for i, pid in enumerate((dead, os.getpid(), dead)))
    for file in (gone, alive, locked):
        put(file)
    fd = os.open(f"/dev/shm/{locked}", os.O_RDWR)
    lib.gw_try_lock(fd, lib.GW_SUPERVISOR_LOCK)
    assert [(part["what"], part["files"]) for part in clean(capsys, name)] == [("a half-made segment", 1)]
    assert of(name) == {alive, locked}
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_files_stay_even_for_root(name, capsys):
    dead_child(lambda: Segment.own(name, SMALL))
    put(f"gpuworker-{name}-b.spill-1-0-1-r")
    put(f"gpuworker-{name}-c.new-999999999-0a")
    before = of(name)
    for file in before:
        os.chown(f"/dev/shm/{file}", 12345, -1)
    assert clean(capsys, name) == []
    assert of(name) == before


def test_what_is_no_file_of_ours_stays(name, capsys, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("x")
    put(f"gpuworker-{name}")  # no segment
    os.symlink(precious, f"/dev/shm/gpuworker-{name}.spill-1-0-1-r")
    os.mkfifo(f"/dev/shm/gpuworker-{name}-x.spill-1-0-1-r")
    put(f"gpuworker-{name}-x.spill-1-0-1-z")
    before = of(name)
    assert clean(capsys, name) == []
    assert of(name) == before
    assert precious.read_text() == "x"


def test_a_worker_of_another_pid_namespace_that_lives(name, capsys):
    command = ["unshare", "-p", "-f", "--kill-child"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a pid namespace")
    script = """
        import signal, sys, gpuworker
        with gpuworker.Worker(lambda requests: requests, name=sys.argv[1], in_process=True, capacity=4):
            print("ready", flush=True)
            sys.stdin.read()
        """
    command += [sys.executable, "-c", textwrap.dedent(script), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"ready\n"
        assert clean(capsys, name) == []
        assert gpuworker.connect(name).submit(1) == 1
        other.kill()
        other.wait()  # its child has the signal, too: end of input, which comes next, would let it close the worker
    eventually(lambda: len(clean(capsys, name)) == 1)


def test_doctor_advises_it(name):
    dead_child(lambda: Segment.own(name, SMALL))
    put(f"gpuworker-{name}-gone.spill-1-0-1-r")
    script = """
        from gpuworker.cli import leftovers
        for check in leftovers.leftovers(): print(check.found, check.advice)
        """
    lines = [line for line in run_script(script).splitlines() if name in line]
    assert len(lines) == 2
    assert all("gpuworker doctor --clean" in line for line in lines)


def test_fifos_of_event_loops_go_once_their_segment_is_gone(name, capsys):
    def dies():
        segment = Segment.own(name, SMALL)
        os.mkfifo(f"/dev/shm/gpuworker-{name}.chime-{segment.nonce:x}-1-1", 0o600)
        return segment

    dead_child(dies)
    os.mkfifo(f"/dev/shm/gpuworker-{name}-gone.chime-1-1-1", 0o600)
    put(f"gpuworker-{name}-gone.chime-1-1-2")  # no FIFO, so nothing of ours
    removed = clean(capsys, name)
    assert [(part["name"], part["what"], part["files"]) for part in removed] == [
        (name, "a dead segment", 1),
        (name, "FIFOs", 1),
        (f"{name}-gone", "FIFOs", 1),
    ]
    assert of(name) == {f"gpuworker-{name}-gone.chime-1-1-2"}


def test_the_fifos_of_a_living_worker_stay(name, capsys):
    with gpuworker.Worker(lambda requests: requests, name=name, in_process=True, capacity=4):
        segment = Segment.attach(name)
        assert segment.join()
        mine = chime.Chime(segment)
        assert clean(capsys, name) == []
        assert len([file for file in of(name) if "chime" in file]) == 1
        mine.close()
        segment.close()
