"""Processes that share a segment cannot hurt each other: by what they write into it, by what they keep of it, or by the locks and forks around it."""

import contextlib
import os
import random
import signal
import struct
import subprocess
import sys
import threading

import pytest

import gpuworker
from gpuworker._native import ffi, lib
from gpuworker.segment import Geometry, Segment
from gpuworker.segment.names import worker_names
from tests import handlers
from tests.conftest import eventually, is_gone, kill_all
from tests.test_behaviours_shared_memory import run_script
from tests.test_fork import in_child, succeeded

SLOT_BYTES, SEMAPHORE = 192, 128  # of native/layout.h: three cache lines, the semaphore in the last


def scribble(chance, most=4):
    return bytes(chance.choice((0, 1, 2, 255, chance.randrange(256))) for _ in range(chance.randrange(1, most + 1)))


# what is written into the segment


def test_a_segment_with_a_scribbled_header_is_refused_or_used_but_breaks_nobody(name):
    segment = Segment.own(name, Geometry(capacity=4, max_request_bytes=64, max_response_bytes=64, max_participants=4))
    chance, refused = random.Random(1), 0
    with open(f"/dev/shm/gpuworker-{name}", "r+b", 0) as file:
        whole = file.read()
        for _ in range(1000):
            at = chance.randrange(56)  # magic, version, geometry
            file.seek(at)
            file.write(scribble(chance, 8))
            try:
                found = Segment.attach(name, read_only=True)
                assert (found.geometry().capacity, found.geometry().max_participants) == (4, 4)
            except gpuworker.SegmentError:
                refused += 1
            file.seek(0)
            file.write(whole[:256])
    assert refused > 500
    segment.unlink()


def test_an_owner_survives_whatever_is_scribbled_into_slots_and_areas(name):
    options = {"capacity": 8, "max_request_bytes": 256, "max_response_bytes": 512, "max_clients": 4}
    with gpuworker.Worker(handlers.identity, name=name, **options) as worker:
        client, segment, chance = worker.connect(), Segment.attach(name), random.Random(18)
        whole = memoryview(segment._map)
        areas = int(ffi.cast("uintptr_t", segment.port.areas)) - int(ffi.cast("uintptr_t", segment._base))
        slots = areas - 8 * SLOT_BYTES
        for i in range(1000):
            slot_at, area_at = slots + chance.randrange(8) * SLOT_BYTES + chance.randrange(SEMAPHORE - 8), chance.randrange(areas, len(whole) - 8)
            patch = scribble(chance, 8)
            at = slot_at if i % 2 else area_at
            whole[at : at + len(patch)] = patch
            with contextlib.suppress(Exception):  # its answer may be anything, and so may its slot
                client.submit([b"x", i, {"key": 1.5}], timeout=0.02)
        assert worker.pid is not None, "the owner has died"
        beat = segment.overview().heartbeat_ns
        eventually(lambda: segment.overview().heartbeat_ns != beat)
        for i in range(8):  # with its slots as they should be, it serves on
            at = slots + i * SLOT_BYTES
            whole[at : at + 8] = bytes(8)
        assert gpuworker.connect(name).submit("and serves") == "and serves"


# what is kept of the segment


def test_arrays_outlive_their_client_their_owner_and_their_segment():
    script = """
        import gc, numpy as np, gpuworker
        seen = []
        def run_batch(requests):
            seen.extend(requests)  # views of slots: to be read until run_batch returns, and never a crash
            return [request * 2 for request in requests]
        with gpuworker.Worker(run_batch, in_process=True, capacity=4) as worker:
            client = worker.connect()
            results = [client.submit(np.full(1000, i)) for i in range(8)]
            with client.reserve(10) as reserved:
                reserved[:] = 5
            client.close()
        del client, worker
        gc.collect()
        assert all((result == 2 * i).all() for i, result in enumerate(results))
        assert all(len(view.tobytes()) == 8000 for view in seen)
        assert len(reserved.tobytes()) == 40 and not reserved.flags.writeable
        results[0][:] = 1
        print("alive")
        """
    assert run_script(script) == "alive\n"


def test_a_client_that_closes_while_answers_are_on_their_way_ends_their_waits(in_process, gate):
    gate.shut()
    worker = in_process(gate.run_batch)
    client = worker.connect()
    pending = [client.enqueue(i) for i in range(3)]
    gate.wait_entered()
    client.close()
    gate.open()
    for one in pending:
        with pytest.raises(gpuworker.RequestCancelled):
            one.result(30)
    eventually(lambda: worker.stats().slots_in_use == 0)


# locks, namespaces, forks


def test_opening_and_closing_the_file_elsewhere_gives_up_no_lock(name):
    segment = Segment.own(name, Geometry(4, 64, 64, 4))
    with open(f"/dev/shm/gpuworker-{name}", "r+b"):
        pass
    assert lib.gw_is_locked(Segment.attach(name).fd, 0) == 1
    with pytest.raises(gpuworker.WorkerAlreadyRunning):
        Segment.own(name, Geometry(4, 64, 64, 4))
    segment.unlink()
    segment.close()


def test_a_client_that_closes_all_its_descriptors_is_not_taken_for_dead(name):
    with gpuworker.Worker(handlers.double, name=name) as worker:
        client = worker.connect()

        def daemonized():
            assert client.submit(1) == 2
            os.closerange(3, 1024)
            ticks = set()
            while len(ticks) < 4:  # some rounds of the owner's keeper
                ticks.add(worker.stats().heartbeat_age_s)
                assert client.submit(len(ticks)) == 2 * len(ticks)
            return True

        assert succeeded([in_child(daemonized)])


def test_two_clients_with_the_same_pid_in_different_namespaces_are_told_apart(name, tmp_path):
    if subprocess.run(["unshare", "-pf", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a pid namespace")
    held = tmp_path / "held"
    held.touch()
    code = """if True:
        import os, sys, gpuworker
        client = gpuworker.connect(sys.argv[1])
        pending = [client.enqueue(sys.argv[2]) for _ in range(int(sys.argv[3]))]
        print(os.getpid(), flush=True)
        sys.stdin.read()
        print([one.result() for one in pending] == [sys.argv[2]] * len(pending), flush=True)
        """
    with gpuworker.Worker(handlers.hold_while_file_exists, name=name, max_batch_size=1) as worker:
        running = worker.connect().enqueue(str(held))
        eventually(lambda: worker.stats().batch_running_s > 0)
        inside = ["unshare", "-pf", "--mount-proc", "--kill-child", sys.executable, "-c", code, name, held]
        clients = [subprocess.Popen([*inside, n], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for n in ("2", "3")]
        with clients[0] as killed, clients[1] as alive:
            assert [process.stdout.readline() for process in clients] == ["1\n", "1\n"]
            assert worker.stats().slots_in_use == 1 + 2 + 3
            killed.kill()
            eventually(lambda: worker.stats().slots_in_use == 1 + 3)
            assert worker.stats().reaped_clients == 1
            held.unlink()
            assert alive.communicate(timeout=60)[0] == "True\n"
        assert running.result() == str(held)
        eventually(lambda: worker.stats().slots_in_use == 0)


@pytest.mark.parametrize("supervisor_dies_too", [False, True])
def test_a_client_in_another_pid_namespace_outlives_its_owner(name, tmp_path, supervisor_dies_too):
    if subprocess.run(["unshare", "-pf", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a pid namespace")
    held = tmp_path / "held"
    held.touch()
    code = """if True:
        import sys, gpuworker
        try:
            print(gpuworker.connect(sys.argv[1]).submit(sys.argv[2], timeout=60) == sys.argv[2])
        except gpuworker.WorkerDied as error:
            print(type(error).__name__)
        """
    with gpuworker.Worker(handlers.hold_while_file_exists, name=name) as worker:
        command = ["unshare", "-pf", "--mount-proc", "--kill-child", sys.executable, "-c", code, name, held]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            eventually(lambda: worker.stats().batch_running_s > 0)
            if supervisor_dies_too:
                kill_all(worker)
            else:
                first = worker.pid
                os.kill(first, signal.SIGKILL)
                eventually(lambda: worker.pid not in (None, first) and worker.stats().batch_running_s > 0)
                held.unlink()
            assert client.communicate(timeout=60)[0] == ("WorkerDied\n" if supervisor_dies_too else "True\n")
    assert name not in worker_names()


def test_a_process_that_the_handler_left_behind_dies_with_its_owner(name):
    with gpuworker.Worker(handlers.fork_a_child, name=name) as worker:
        client = worker.connect()
        child = client.submit("x")
        os.kill(worker.pid, signal.SIGKILL)
        eventually(lambda: is_gone(child))
        assert client.submit("y") != child


def test_a_process_that_the_handler_left_behind_keeps_no_dead_owner_alive(name):
    with gpuworker.Worker(handlers.fork_a_child, name=name) as worker:
        child = worker.connect().submit("x")
        kill_all(worker)  # nobody is left to end it
        try:
            with gpuworker.Worker(handlers.identity, name=name) as successor:
                assert successor.connect().submit("y") == "y"
            os.kill(child, 0)  # it was there all the time
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_client_that_closes_all_its_descriptors_while_it_waits_does_not_take_its_owner_for_dead(name, tmp_path):
    held = tmp_path / "held"
    held.touch()
    with gpuworker.Worker(handlers.hold_while_file_exists, name=name) as worker:
        client = worker.connect()

        def daemonized():
            pending = client.enqueue(str(held))
            os.closerange(3, 1024)
            threading.Timer(0.2, held.unlink).start()  # longer than a client trusts an owner without asking the kernel
            return pending.result() == str(held)

        assert succeeded([in_child(daemonized)])


def test_a_scribbled_participant_keeps_nobody_elses_slots_from_coming_back(in_process, gate):
    gate.shut()
    worker = in_process(gate.run_batch, max_clients=8)
    hostile, other = worker.connect(), worker.connect()
    running = hostile.enqueue("running")
    gate.wait_entered()
    other.enqueue("makes it join").cancel()
    view, segment = ffi.new("gw_participant_view *"), Segment.attach(worker.name)
    assert lib.gw_read_participant(segment.port, 1, view) == lib.GW_ALIVE
    whole = memoryview(segment._map)
    at = bytes(whole).index(struct.pack("=QqQ", view.word, os.getpid(), view.identity.start_ticks))  # its entry: word, pid, start time
    whole[at : at + 16] = struct.pack("=Qq", view.word + 4, 1 << 40)
    child = in_child(lambda: (other.enqueue("left behind"), os.kill(os.getpid(), signal.SIGKILL)))
    os.waitpid(child, 0)
    eventually(lambda: worker.stats().slots_in_use == 1)
    gate.open()
    assert running


def test_a_scribbled_info_is_left_out_of_the_statistics(in_process, gate):
    worker = in_process(gate.run_batch)
    worker.connect().submit("x")
    segment = Segment.attach(worker.name)
    segment._map[bytes(segment._map).index(b'{"name"')] = 0xFF
    assert worker.stats().handler == ""
    assert worker.stats().completed == 1
