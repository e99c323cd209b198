"""Memory, descriptors and files that are not there, and ones that must all come back."""

import gc
import os
import signal
import threading

import numpy as np
import psutil
import pytest

import gpuworker
from gpuworker._native import lib
from gpuworker.segment.wire import SLOT_MASK, describe
from tests.conftest import eventually, shm_files
from tests.test_behaviours_shared_memory import run_script
from tests.test_fork import in_child

PREAMBLE = """
    import os, resource, sys, gpuworker
    name = f"t-{os.getpid()}-limits"
    echo = lambda requests: requests
    def no_more(kind, n): resource.setrlimit(kind, (n, resource.getrlimit(kind)[1]))
    def told(call):
        try:
            return call()
        except gpuworker.GpuWorkerError as error:
            print(type(error).__name__, error)
    def make(**options): return gpuworker.Worker(echo, name=name, in_process=True, capacity=8, **options)
    def start(): make().start()
"""


def in_limits(script, before=()):
    """-> what the script printed, as lines."""
    return run_script(PREAMBLE + script + "\n    print([file for file in os.listdir('/dev/shm') if name in file])\n", before=before).splitlines()


def own_shm(mount):
    """The start of a command line that runs in a mount namespace with this done to /dev/shm."""
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    import subprocess

    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a mount namespace")
    return command


# What is not there is one clear error, and leaves nothing behind.


def test_a_nearly_full_shared_memory():
    lines = in_limits("    told(start)\n", own_shm("mount -t tmpfs -o size=1m none /dev/shm && head -c 900k /dev/zero > /dev/shm/full"))
    assert lines[0].startswith("SegmentError 1,")
    for part in (
        " bytes of shared memory needed, ",
        " free in /dev/shm: ",
        "shrink capacity, max_request_bytes or max_response_bytes, or enlarge /dev/shm",
    ):
        assert part in lines[0]
    assert lines[1:] == ["[]"]


@pytest.mark.parametrize(
    ("mount", "advice"),
    [
        ("mount -t tmpfs -o ro none /dev/shm", "not writable for this user; mount it writable"),
        ("mount -t tmpfs -o nr_inodes=1 none /dev/shm", "no room for one more file"),
    ],
)
def test_a_shared_memory_that_takes_no_file(mount, advice):
    lines = in_limits("    told(start)\n", own_shm(mount))
    assert lines[0].startswith("SegmentError the segment of worker")
    assert advice in lines[0]
    assert lines[1:] == ["[]"]


def test_no_shared_memory_at_all():
    hide = "mount -t tmpfs none /dev && ln -s /proc/self/fd /dev/fd && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9"
    script = PREAMBLE + "    told(start); told(lambda: gpuworker.connect(name, connect_timeout_s=0).submit(1))\n"
    first, second = run_script(script, before=own_shm(hide)).splitlines()
    assert first == "SegmentError /dev/shm cannot be listed (No such file or directory); gpuworker needs POSIX shared memory there: mount a tmpfs"
    assert second.startswith("WorkerNotFound")


def test_files_that_may_not_be_large():
    script = """
    with make(max_request_bytes=64, max_response_bytes=512) as worker:
        client = worker.connect()
        assert client.submit(bytes(50_000)) == bytes(50_000)
        no_more(resource.RLIMIT_FSIZE, 65536)
        told(lambda: client.submit(bytes(100_000)))
        assert client.submit(1) == 1
    told(start)
    """
    spilled, segment, left = in_limits(script)
    assert (
        spilled == "SegmentError 100,000 bytes of shared memory needed: it is larger than this process's files may be; raise that limit (ulimit -f)"
    )
    assert "bytes of shared memory needed: it is larger than this process's files may be" in segment
    assert left == "[]"


def test_no_address_space_left():
    script = """
    with make(max_payload_bytes=1 << 30) as worker:
        client = worker.connect()
        client.submit(1)
        payload = bytes(200 << 20)
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        no_more(resource.RLIMIT_AS, used + (100 << 20))
        told(lambda: client.submit(payload))
        assert client.submit(2) == 2
        told(lambda: gpuworker.Worker(echo, name=name + "-2", in_process=True, capacity=4096).start())
    """
    spilled, segment, left = in_limits(script)
    assert spilled.startswith("SegmentError 209,715,200 bytes of a payload cannot be mapped: no memory left for this process")
    assert "cannot be made: no memory left for this process; raise its limit (ulimit -v)" in segment
    assert left == "[]"


def test_a_response_without_memory_is_the_error_of_that_one_request():
    script = """
    def answer(requests): return [bytes(n) for n in requests]
    with gpuworker.Worker(answer, name=name, in_process=True, capacity=8, max_batch_size=8, max_wait_ms=50) as worker:
        client = worker.connect()
        pending = [client.enqueue(n) for n in (10, 30 << 20, 20)]
        for one in pending:
            told(lambda: print(len(one.result())))
        print(len(client.submit(1 << 20)))
    """
    ten, error, twenty, after, left = in_limits(script, own_shm("mount -t tmpfs -o size=16m none /dev/shm"))
    assert (ten, twenty, after, left) == ("10", "20", f"{1 << 20}", "[]")
    assert "31,457,280 bytes of shared memory needed" in error


def test_no_descriptors_left():
    script = """
    worker = make(max_request_bytes=64, max_response_bytes=512).start()
    client, late = worker.connect(), gpuworker.connect(name, connect_timeout_s=0)
    client.submit(1)
    taken = []
    def fill():
        try:
            while True: taken.append(os.dup(0))
        except OSError: pass
    no_more(resource.RLIMIT_NOFILE, 64)
    fill()
    told(lambda: late.submit(1))
    told(lambda: client.submit(bytes(100_000)))
    told(gpuworker.Worker(echo, name=name + "-2", in_process=True).start)
    told(gpuworker.Worker("operator:pos", name=name + "-3").start)
    assert client.submit(2) == 2
    for n in (1, 2, 3):  # the last steps of joining
        os.close(taken.pop())
        if n < 3: told(lambda: late.submit(1))
    [os.close(fd) for fd in taken]
    assert late.submit(3) == 3
    assert client.submit(bytes(100_000)) == bytes(100_000)
    worker.stop()
    """
    *errors, left = in_limits(script)
    assert left == "[]"
    assert len(errors) >= 5
    for error in errors:
        assert error.split()[0] in ("SegmentError", "WorkerStartupError"), error
        assert "no file descriptor left; raise its limit (ulimit -n)" in error, error


# What failed or was killed takes nothing with it.


def state_of(process):
    return process.num_fds(), process.num_threads()


def test_ten_thousand_failing_requests_leave_everything_as_it_was(name):
    with gpuworker.Worker(
        "tests.handlers:fails_if_told", name=name, max_request_bytes=4096, max_response_bytes=4096, max_payload_bytes=65536
    ) as worker:
        client = worker.connect()
        owner, me = psutil.Process(worker.pid), psutil.Process()

        def fails(kind, call):
            with pytest.raises(kind):
                call()

        def malformed():
            port = client._link.port
            ticket = lib.gw_claim(port)
            client._link.segment.requests[ticket & SLOT_MASK][:1] = b"\xc1"  # a byte that msgpack does not use
            lib.gw_publish(port, ticket, describe(lib.GW_KIND_TREE, 1, 100), 0, 0)
            fails(gpuworker.SegmentError, lambda: client._link.answer(ticket, 0))

        def missing_file():
            port = client._link.port
            ticket = lib.gw_claim(port)
            lib.gw_publish(port, ticket, describe(lib.GW_KIND_SPILLED | lib.GW_KIND_BYTES, 0, 5000), 0, 0)
            fails(gpuworker.SegmentError, lambda: client._link.answer(ticket, 0))

        def dropped():
            client.enqueue(1).cancel()

        kinds = [
            lambda: fails(gpuworker.UnsupportedPayload, lambda: client.submit({1, 2})),
            lambda: fails(gpuworker.PayloadTooLarge, lambda: client.submit(bytes(70_000))),
            lambda: fails(ValueError, lambda: client.submit("fail")),
            lambda: fails(gpuworker.PayloadTooLarge, lambda: client.submit("large")),
            lambda: fails(gpuworker.UnsupportedPayload, lambda: client.submit("unsupported")),
            lambda: fails(gpuworker.DeadlineExceeded, lambda: client.submit("x", timeout=0)),
            malformed,
            missing_file,
            dropped,
        ]

        def rounds(n):
            for i in range(n):
                kinds[i % len(kinds)]()

        rounds(1000)
        gc.collect()
        before, rss = (state_of(owner), state_of(me)), (owner.memory_info().rss, me.memory_info().rss)
        rounds(10_000)
        gc.collect()
        eventually(lambda: worker.stats().slots_in_use == 0)
        assert (state_of(owner), state_of(me)) == before
        assert owner.memory_info().rss < rss[0] + (24 << 20), "what the collector comes to late is some 9 MB"
        assert me.memory_info().rss < rss[1] + (8 << 20)
        assert {file for file in shm_files() if name in file} == {f"gpuworker-{name}"}
        assert worker.stats().restarts == 0
        assert client.submit("fine") == "fine"


KILLS = int(os.environ.get("GPUWORKER_TEST_KILLS", "300"))


def test_killed_frontends_leave_everything_as_it_was(name):
    """300 of them; GPUWORKER_TEST_KILLS=1000 for more."""
    with gpuworker.Worker("tests.handlers:identity", name=name, capacity=64, max_request_bytes=4096, max_response_bytes=4096) as worker:
        client = worker.connect(on_full="block")  # the dead hold slots until they are taken back
        owner = psutil.Process(worker.pid)
        big = np.zeros(50_000, "u1")

        def killed(how):
            child_client = gpuworker.connect(name, on_full="block")
            child_client.submit(how)
            if how == 0:
                keep = [child_client.enqueue(i) for i in range(5)]
                del keep
            elif how == 1:
                lib.gw_claim(child_client._link.port)
            elif how == 2:
                kept = [child_client.enqueue(big) for _ in range(2)]  # noqa: F841 (held while it is killed)
            else:
                threading.Thread(target=lambda: list(child_client.map(range(10_000)))).start()
            os.kill(os.getpid(), signal.SIGKILL)

        def kill(n):
            for first in range(0, n, 20):
                for child in [in_child(lambda i=i: killed(i % 4)) for i in range(first, min(first + 20, n))]:
                    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL

        def is_quiet():
            stats = worker.stats()
            return (
                stats.slots_in_use == 0
                and {view.pid for view in stats.clients} <= {os.getpid()}
                and {file for file in shm_files() if name in file} == {f"gpuworker-{name}"}
            )

        kill(40)
        client.submit(0)
        eventually(is_quiet)
        before, rss = state_of(owner), owner.memory_info().rss
        kill(KILLS)
        eventually(is_quiet)
        assert state_of(owner) == before
        assert owner.memory_info().rss < rss + (8 << 20)
        assert worker.stats().reaped_clients >= KILLS
        assert [client.submit(i) for i in range(50)] == list(range(50))
