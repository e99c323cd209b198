"""A frontend that writes what it likes where it likes, against a real worker: native/tests/hostile.c does the same to the ring alone, under sanitizers."""

import contextlib
import os
import random
import signal
import subprocess
import threading
import time

import numpy as np
import psutil
import pytest

import gpuworker
from gpuworker._native import ffi, lib
from gpuworker.cli import inspect, leftovers, main
from gpuworker.payload import encode
from gpuworker.segment import Segment, spill
from gpuworker.segment.liveness import identify
from gpuworker.segment.stats import Stats
from gpuworker.segment.wire import SLOT_MASK, describe
from tests.conftest import eventually, shm_files
from tests.test_fork import in_child

PATCHES = 100_000
OPTIONS = {
    "capacity": 64,
    "max_batch_size": 16,
    "max_request_bytes": 4096,
    "max_response_bytes": 4096,
    "max_payload_bytes": 1 << 20,
    "max_clients": 16,
}
SLOT_WORDS = 24
WORD, ENQUEUE, DEADLINE, REQUEST, SEMAPHORE = 0, 1, 2, 3, 16
NASTY = np.array([0, 1, 2, 7, 64, 4095, 4096, 1 << 31, (1 << 36) - 1, 1 << 47, (1 << 63) - 1, 1 << 63, (1 << 64) - 1], "u8")


class Layout:
    """A segment as arrays of words."""

    def __init__(self, segment):
        o, self.port = segment.overview(), segment.port
        self.words = np.frombuffer(segment._map, "u8")
        entry = lib.gw_segment_bytes(1, 2, 0, 0) - lib.gw_segment_bytes(1, 1, 0, 0)
        areas = int(ffi.cast("char *", segment.port.areas) - ffi.cast("char *", ffi.from_buffer(segment._map)))
        slots = areas - o.capacity * SLOT_WORDS * 8
        self.header = self.words[: (slots - o.max_participants * entry) // 8]
        self.participants = self.words[len(self.header) : slots // 8].reshape(o.max_participants, entry // 8)
        self.slots = self.words[slots // 8 : areas // 8].reshape(o.capacity, SLOT_WORDS)
        self.control = self.words[: areas // 8]
        assert self.header[0] == 0x676B72777570676B


def values(dice, n):
    """Random, or near what breaks things."""
    return np.where(dice.random(n) < 0.5, dice.choice(NASTY, n) - dice.integers(0, 2, n, "u8"), dice.integers(0, 1 << 64, n, "u8"))


def samples(rng):
    """Payloads that are almost right: encoded as they should be, then with bytes changed."""
    value = rng.choice(
        [{"a": [1, (2, 3)], "b": np.arange(20)}, np.ones((3, 4)), [np.zeros(3, "M8[s]"), 1 << 70], "text", b"bytes", np.array(["a", "bc"])]
    )
    kind, meta, data, data_bytes = encode(value)
    start = -(-len(meta) // 64) * 64
    memory = bytearray(start + data_bytes)
    memory[: len(meta)] = meta
    if not hasattr(data, "write"):
        memory[start:] = data if isinstance(data, bytes) else ffi.buffer(data)
    for _ in range(rng.choice([0, 1, 1, 3])):
        memory[rng.randrange(max(len(meta), 1))] = rng.randrange(256)
    return kind, len(meta), bytes(memory)


def put_in_the_way(segment, rng, slot, generation):
    """Something under the name of a spill file: short, empty, too long, a link, a FIFO; and names that are almost right."""
    name = f"/dev/shm/gpuworker-{segment.name}.spill-{segment.nonce:x}-{rng.choice([slot, slot, 9999])}-{generation}-{rng.choice('qqr')}"
    if os.path.lexists(name):
        os.unlink(name)
    how = rng.randrange(4)
    if how == 0:
        os.symlink("/dev/zero", name)
    elif how == 1:
        os.mkfifo(name)
    else:
        with open(name, "wb") as file:
            file.write(rng.randbytes(rng.choice([0, 10, 5000])))


def offend(name, patches):
    """Holds slots, never gives one away, and writes whatever it likes into them and into its own entry."""
    segment = Segment.attach(name)
    segment.join()
    layout, port, me = Layout(segment), segment.port, segment.port.me
    rng, dice = random.Random(1), np.random.default_rng(1)
    mine = np.array([lib.gw_claim(port) & SLOT_MASK for _ in range(12)])
    done = 0
    while done < patches:
        for slot in mine:
            kind, meta, memory = samples(rng)
            segment.requests[slot][: len(memory)] = memory
            generation = int(layout.slots[slot, WORD] >> 16) + 1
            spilled = rng.random() < 0.1
            if spilled:
                put_in_the_way(segment, rng, slot, generation)
            layout.slots[slot, REQUEST] = describe(kind | (lib.GW_KIND_SPILLED if spilled else 0), meta, len(memory))
            layout.slots[slot, DEADLINE] = 0
            layout.slots[slot, ENQUEUE] = time.monotonic_ns()
            layout.slots[slot, WORD] = generation << 16 | me << 3 | 1  # CLAIMED
            lib.gw_publish(port, generation << 12 | int(slot), int(layout.slots[slot, REQUEST]), 0, 0)
        for _ in range(10):  # while the owner reads
            at = dice.integers(1, SLOT_WORDS, 40)
            layout.slots[dice.choice(mine, 40), at] = values(dice, 40)
            for slot in dice.choice(mine, 8):
                area = np.frombuffer(segment.requests[slot], "u1")
                area[dice.integers(0, 256, 20)] = dice.integers(0, 256, 20)
            layout.slots[dice.choice(mine), WORD] = int(dice.integers(0, 1 << 48)) << 16 | me << 3 | int(dice.choice([1, 2, 3, 4, 6, 7]))
            layout.participants[me - 1, 4:] = values(dice, layout.participants.shape[1] - 4)  # its statistics
            done += 40 + 160 + 1
    for slot, phase in zip(mine, [1, 2, 3, 4, 6, 7] * 2, strict=True):
        layout.slots[slot, WORD] = int(dice.integers(0, 1 << 48)) << 16 | me << 3 | phase
    layout.participants[me - 1, 0] = 0x1234567 << 2 | lib.GW_ALIVE
    layout.participants[me - 1, 1:4] = values(dice, 3)  # its identity: who then dies is anybody's guess
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def worker(name):
    with gpuworker.Worker("tests.handlers:identity", name=name, **OPTIONS) as worker:
        yield worker


def test_an_offender_hurts_nobody_else_and_leaves_nothing(worker):
    client = worker.connect()
    client.submit(0)
    owner = psutil.Process(worker.pid)
    before, over = (owner.num_fds(), owner.num_threads(), owner.memory_info().rss), threading.Event()
    counts = [0, 0]

    def right_answers(who):
        while not over.is_set():
            for request in (counts[who], f"request {who}.{counts[who]}", np.full(50, counts[who])):
                assert np.array_equal(client.submit(request), request)
            counts[who] += 1

    failures = []

    def watched(who):
        try:
            right_answers(who)
        except BaseException as error:
            failures.append(error)

    victims = [threading.Thread(target=watched, args=(who,)) for who in range(2)]
    for victim in victims:
        victim.start()
    child = in_child(lambda: offend(worker.name, PATCHES))
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, "it came to its end"
    enough = [count + 5 for count in counts]
    eventually(lambda: failures or all(count > least for count, least in zip(counts, enough, strict=True)))
    over.set()
    for victim in victims:
        victim.join(30)
        assert not victim.is_alive(), "it still waits"
    assert failures == []
    eventually(lambda: worker.stats().slots_in_use == 0)
    eventually(lambda: len(worker.stats().clients) == 1)
    eventually(lambda: {file for file in shm_files() if worker.name in file} == {f"gpuworker-{worker.name}"})
    assert owner.num_fds() <= before[0] + 1, "the pidfd of this client"
    assert owner.num_threads() == before[1]
    assert owner.memory_info().rss < before[2] + (48 << 20)
    assert worker.stats().restarts == 0


def test_the_whole_segment(worker, capsys):
    """Afterwards nothing in it is right; but the owner lives, serves again once the words are put back, and stops cleanly. Whoever reads meanwhile gets an
    error or nonsense, and no crash."""
    client = worker.connect()
    assert client.submit(1) == 1
    segment = Segment.attach(worker.name)
    layout, dice, pid = Layout(segment), np.random.default_rng(2), worker.pid
    eventually(lambda: segment.overview().in_use == 0)
    image = layout.control.copy()
    supervisor = psutil.Process(worker.supervisor_pid)
    for k in range(PATCHES // 500):
        half = dice.integers(0, layout.control.size, 250), dice.integers(0, layout.header.size, 250)
        for where in half:
            layout.control[where] = values(dice, 250)
        lib.gw_bell(segment.port)
        if k % 20 == 0:
            look(worker.name)
            capsys.readouterr()
        if k % 5 == 0:
            layout.control[:] = image
    time.sleep(0.3)  # the keeper sees some of it, too
    layout.control[:] = image
    assert psutil.pid_exists(pid)
    assert worker.pid == pid
    eventually(lambda: segment.overview().in_use == 0)
    with worker.connect() as late:
        assert [late.submit(i) for i in range(50)] == list(range(50))
    worker.stop()
    assert not supervisor.is_running()
    assert not [file for file in shm_files() if worker.name in file]


def look(name):
    """Everything that reads a segment from outside."""
    for call in (
        lambda: Stats.of(name),
        lambda: main(["stats", name]),
        lambda: main(["stats", name, "--json"]),
        lambda: main(["list"]),
        lambda: inspect.look(name),
        leftovers.leftovers,
        lambda: gpuworker.connect(name, connect_timeout_s=0).close(),
    ):
        with contextlib.suppress(gpuworker.GpuWorkerError):
            call()


@pytest.mark.parametrize(
    "info",
    [
        b"[" * 8000,
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"handler": 7, "options": [1]}',
        b'{"handler": "x", "options": {"drain_timeout_s": "soon"}}',
        b'{"options": {"drain_timeout_s": 1e400}}',
    ],
)
def test_info_that_is_no_info(in_process, gate, info, capsys):
    worker = in_process(gate.run_batch)
    segment = Segment.attach(worker.name)
    lib.gw_set_info(segment.port, info, len(info))
    assert Stats.of(worker.name).name == worker.name
    assert main(["list"]) == 0
    assert main(["stats", worker.name]) == 0
    assert worker.name in capsys.readouterr().out


def test_stop_signals_no_process_that_the_segment_only_names(in_process, gate, capsys):
    worker = in_process(gate.run_batch)
    segment = Segment.attach(worker.name)
    with subprocess.Popen(["sleep", "100"]) as stranger:
        lib.gw_set_supervisor(segment.port, *identify(stranger.pid))
        try:
            assert main(["stop", worker.name, "--timeout-s", "0"]) == 1
            assert "has nothing to do with it" in capsys.readouterr().err
            assert stranger.poll() is None, "it was not signalled"
        finally:
            stranger.kill()
            lib.gw_set_supervisor(segment.port, *identify())


def test_no_frontend_can_make_another_unpickle(in_process, gate):
    """The flag lies in the segment; what counts is what each process was told itself."""
    worker = in_process(gate.run_batch)
    client = worker.connect()
    gate.shut()
    pending = client.enqueue("x")
    gate.wait_entered()
    segment = Segment.attach(worker.name)
    lib.gw_set_policy(segment.port, 0, 0, 64, 64, 1, 16)
    late = gpuworker.connect(worker.name)
    with pytest.raises(gpuworker.UnsupportedPayload):
        late.enqueue({1, 2})
    kind, _, data, size = encode({1, 2}, allow_pickle=True)
    lib.gw_respond(segment.port, pending._ticket, kind, b"", 0, data, size)
    lib.gw_finish(segment.port, [pending._ticket, 0], 1)
    with pytest.raises(gpuworker.UnsupportedPayload, match="does not load pickles"):
        pending.result(timeout=30)
    gate.open()


def test_nor_the_owner(in_process, gate):
    worker = in_process(gate.run_batch)
    client = worker.connect(allow_pickle=True)
    client.submit(1)
    segment = Segment.attach(worker.name)
    lib.gw_set_policy(segment.port, 0, 0, 64, 64, 1, 16)
    pending = gpuworker.connect(worker.name, allow_pickle=True).enqueue({1, 2})
    with pytest.raises(gpuworker.UnsupportedPayload, match="does not load pickles"):
        pending.result(timeout=30)


def test_a_spill_file_that_changes_after_it_was_sent(in_process, gate):
    worker = in_process(gate.run_batch, max_request_bytes=64, max_batch_size=8)
    client = worker.connect()

    def name_of(pending):
        segment = client._link.segment
        return "/dev/shm" + spill._name(segment, pending._ticket, spill.REQUEST)

    def replaced(make):
        def change(path):
            os.unlink(path)
            make(path)

        return change

    changes = [
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, 99_999),
        os.unlink,
        replaced(os.mkfifo),
        replaced(os.mkdir),
        replaced(lambda path: os.symlink("/dev/zero", path)),
    ]
    gate.shut()
    first = client.enqueue("first")
    gate.wait_entered()
    hurt = [client.enqueue(bytes([i]) * 100_000) for i in range(len(changes))]
    fine = client.enqueue(b"x" * 100_000)
    for pending, change in zip(hurt, changes, strict=True):
        change(name_of(pending))
    gate.open()
    assert first.result(30) == "first"
    assert fine.result(30) == b"x" * 100_000
    for pending in hurt:
        with pytest.raises(gpuworker.SegmentError) as caught:
            pending.result(30)
        assert "/dev" not in str(caught.value), "no paths"
        assert worker.name not in str(caught.value)
        assert caught.value.__cause__ is None, "no traceback of ours either"
        path = name_of(pending)
        if os.path.isdir(path):
            os.rmdir(path)
    assert client.submit(b"y" * 100_000) == b"y" * 100_000
    eventually(lambda: worker.stats().slots_in_use == 0)


def test_a_response_file_that_changes_before_it_is_read(in_process):
    worker = in_process(lambda requests: [bytes(100_000) for _ in requests], max_response_bytes=512)
    client = worker.connect()
    pending = client.enqueue(1)
    eventually(pending.done)
    os.truncate("/dev/shm" + spill._name(client._link.segment, pending._ticket, spill.RESPONSE), 10)
    with pytest.raises(gpuworker.SegmentError, match="too short"):
        pending.result(30)
    assert client.submit(1) == bytes(100_000)
    assert [file for file in shm_files() if worker.name in file] == [f"gpuworker-{worker.name}"]
