"""Payloads that do not fit a slot."""

import contextlib
import os
import threading

import numpy as np
import pytest

import gpuworker
from gpuworker.segment import Geometry, Segment, spill
from gpuworker.segment.wire import SLOT_BITS
from tests.conftest import Gate, eventually, shm_files


def spills(worker):
    return [name for name in shm_files() if name.startswith(f"gpuworker-{worker.name}.spill-")]


@pytest.fixture
def small(in_process):
    def start(handler, **options):
        return in_process(handler, **{"max_request_bytes": 4096, "max_response_bytes": 4096, "max_payload_bytes": 1 << 20, **options})

    return start


def test_exactly_a_slot_fits_and_one_byte_more_travels_beside_it(small, gate):
    worker = small(gate.run_batch)
    client = worker.connect()
    for size in (4095, 4096, 4097, 100_000, 1 << 20):
        payload = os.urandom(size)
        assert client.submit(payload) == payload
    eventually(lambda: spills(worker) == [])  # a request's file goes just after its answer


def test_larger_than_max_payload_is_refused_with_nothing_enqueued(small, gate):
    worker = small(gate.run_batch)
    client = worker.connect()
    with pytest.raises(gpuworker.PayloadTooLarge) as caught:
        client.submit(bytes((1 << 20) + 1))
    assert (caught.value.size, caught.value.limit) == ((1 << 20) + 1, 1 << 20)
    assert worker.stats().submitted == 0
    assert worker.stats().slots_in_use == 0


def test_a_response_larger_than_max_payload_is_that_requests_error(small):
    client = small(lambda requests: [bytes(request) for request in requests]).connect()
    with pytest.raises(gpuworker.PayloadTooLarge, match="response"):
        client.submit((1 << 20) + 1)
    assert client.submit(5) == bytes(5)


def test_without_room_for_spilling_the_slot_is_the_limit(small, gate):
    client = small(gate.run_batch, max_payload_bytes=0).connect()
    assert client.submit(bytes(4096)) == bytes(4096)
    with pytest.raises(gpuworker.PayloadTooLarge):
        client.submit(bytes(4097))


def test_arrays_and_trees_of_arrays_spill(small, gate):
    worker = small(gate.run_batch)
    client = worker.connect()
    big = np.arange(60_000, dtype="i8").reshape(300, 200)
    np.testing.assert_array_equal(client.submit(big), big)
    np.testing.assert_array_equal(client.submit(big.T[::2]), big.T[::2])
    answer = client.submit({"ids": big, "mask": big > 7})
    np.testing.assert_array_equal(answer["ids"], big)
    np.testing.assert_array_equal(answer["mask"], big > 7)
    eventually(lambda: spills(worker) == [])  # a request's file goes just after its answer


def test_a_cancelled_spilled_request_leaves_no_file(small):
    gate = Gate(is_open=False)
    worker = small(gate.run_batch)
    client = worker.connect()
    running = client.enqueue(bytes(10_000))
    gate.wait_entered()
    queued = client.enqueue(bytes(20_000))
    assert len(spills(worker)) == 2
    assert queued.cancel()
    assert len(spills(worker)) == 1
    assert running.cancel()
    gate.open()
    eventually(lambda: spills(worker) == [])


def test_a_spill_that_finds_no_memory_is_that_requests_error(small, gate):
    worker = small(gate.run_batch, max_payload_bytes=1 << 35)
    client = worker.connect()
    with pytest.raises(gpuworker.SegmentError, match="free in /dev/shm"), client.reserve((1 << 35) - 64, "u1", timeout=5):
        pass
    with pytest.raises(gpuworker.PayloadTooLarge), client.reserve(1 << 36, "u1"):
        pass
    assert worker.stats().slots_in_use == 0
    assert client.submit("small") == "small"
    eventually(lambda: spills(worker) == [])  # a request's file goes just after its answer


def test_an_answer_that_is_read_after_a_restart_is_never_somebody_elses(name):
    """Slots and generations begin again in a new segment; spill files do not."""
    options = {"name": name, "in_process": True, "max_request_bytes": 64, "max_response_bytes": 512}
    with gpuworker.Worker(lambda requests: requests, **options) as worker:
        early, late = worker.connect(), worker.connect()
        pending = early.enqueue(b"1" * 10_000)
        eventually(pending.done)
    with gpuworker.Worker(lambda requests: requests, **options):
        other = late.enqueue(b"2" * 10_000)
        eventually(other.done)
        with contextlib.suppress(gpuworker.GpuWorkerError):  # gone with the old segment: an error, but not another's answer
            assert pending.result() == b"1" * 10_000
        assert other.result() == b"2" * 10_000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_a_response_that_a_dead_owner_had_half_written_is_written_again(name):
    segment = Segment.own(name, Geometry(4, 4096, 4096, 4, 1 << 20))
    ticket = 1 << SLOT_BITS
    for byte in (b"-", b"+"):  # nobody removed the first one: its owner was killed before it had answered
        spill.write(segment, ticket, spill.RESPONSE, [memoryview(byte * 10_000)])
    assert bytes(spill.read(segment, ticket, spill.RESPONSE, 10_000)) == b"+" * 10_000
    spill.remove(segment, ticket, spill.RESPONSE)
    segment.retire()


def test_another_users_files_beside_the_segment_stop_nothing(small, gate):
    worker = small(gate.run_batch)
    foreign = [f"/dev/shm/gpuworker-{worker.name}.{end}" for end in ("spill-1-0-1-q", "spill-zz", "new-999999", "spill-1-0-1-r")]
    for path in foreign:
        os.mkdir(path)  # cannot be unlinked, as another user's file in a sticky folder cannot
    try:
        client = worker.connect()
        assert client.submit(bytes(100_000)) == bytes(100_000)
        worker.stop()
        assert os.path.exists(foreign[0])
    finally:
        for path in foreign:
            os.rmdir(path)


def test_a_request_beside_its_slot_survives_a_look_at_its_length(name):
    """The owner measures a queued request by handler.length; the batches that leave before it must not take its file along."""
    seen = []

    class Handler:
        def length(self, request):
            return len(request)

        def run_batch(self, requests):
            seen.append(len(requests))
            gate.wait()
            return [len(request) for request in requests]

    gate = threading.Event()
    options = {"max_batch_size": 1, "length_buckets": [1 << 20], "max_request_bytes": 64, "capacity": 8}
    with gpuworker.Worker(Handler(), name=name, in_process=True, **options) as worker:
        client = worker.connect()
        pending = [client.enqueue(b"x" * size) for size in (10, 100_000, 200_000, 20, 300_000)]
        eventually(lambda: seen)
        gate.set()
        assert [one.result() for one in pending] == [10, 100_000, 200_000, 20, 300_000]
