"""What people found wrong with serving systems, as behaviours of this one: the wait clock, errors in a batch, cancellation, overload, right numbers."""

import contextlib
import inspect
import random
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import gpuworker
from gpuworker import errors
from gpuworker.scheduling import SizeOrTimeout
from gpuworker.segment import Segment
from gpuworker.segment.names import worker_names
from gpuworker.testing import simulate
from tests import handlers
from tests.conftest import Gate, eventually

MS, SECOND = 1_000_000, 1_000_000_000


@pytest.fixture
def held_gate():
    """A gate that is shut: its first batch holds the device."""
    return Gate(is_open=False)


# the wait clock


def test_after_an_idle_while_two_requests_leave_together():
    policy = SizeOrTimeout(8, 20)
    arrivals = [0, SECOND, SECOND + 2 * MS]  # the second comes long after the first batch has ended
    first, second = simulate(policy, arrivals, lambda count, length: 5 * MS).batches
    assert (first.requests, second.requests) == ((0,), (1, 2))
    assert second.end_ns == SECOND + 20 * MS + 5 * MS


def test_after_an_idle_while_a_real_owner_waits_for_company_too(in_process, gate):
    client = in_process(gate.run_batch, max_batch_size=8, max_wait_ms=250).connect()
    client.submit("first")
    time.sleep(0.3)  # longer than the wait: a clock that ran on from the batch before would be over
    pending = [client.enqueue("a"), client.enqueue("b")]
    assert [one.result() for one in pending] == ["a", "b"]
    assert gate.batches == [["first"], ["a", "b"]]


def test_a_hundred_that_are_queued_leave_as_ten_tens_in_order(in_process, held_gate):
    client = in_process(held_gate.run_batch, max_batch_size=10).connect()
    pending = [client.enqueue("first")]
    held_gate.wait_entered()
    pending += [client.enqueue(i) for i in range(100)]
    held_gate.open()
    for one in pending:
        one.result()
    assert held_gate.batches == [["first"], *(list(range(i, i + 10)) for i in range(0, 100, 10))]


def test_max_wait_of_zero_is_zero(in_process, gate):
    worker = in_process(gate.run_batch, max_wait_ms=0)
    client = worker.connect()
    for i in range(200):
        client.submit(i)
    assert worker.stats().batch_wait.p50_us < 5000, "a hidden default is ten milliseconds elsewhere"


def test_the_statistics_say_why_each_batch_left(name, gate):
    with gpuworker.Worker(gate.run_batch, name=name, in_process=True, max_batch_size=4, max_wait_ms=400) as worker:
        client, segment = worker.connect(), Segment.attach(name, read_only=True)
        list(client.map(range(4)))
        client.submit("alone")
        gate.shut()
        pending = [client.enqueue(i) for i in range(4)]
        for _ in range(3):
            gate.wait_entered()
        pending.append(client.enqueue("left over"))
        worker._session.owner.stop()
        gate.open()
        for one in pending:
            one.result()
    stats = gpuworker.Stats.read(segment)
    assert {reason: n for reason, n in stats.dispatch_reasons.items() if n} == {"full": 2, "age": 1, "drain": 1}
    assert stats.batch_sizes == {"1": 2, "4": 2}


def test_sixty_four_clients_under_saturation_fill_the_batches(in_process):
    def run_batch(requests):
        time.sleep(0.002)  # the model's run
        return requests

    worker = in_process(run_batch, max_batch_size=8)
    clients = [worker.connect() for _ in range(64)]

    def calls(client):
        for i in range(6):
            assert client.submit(i) == i

    threads = [threading.Thread(target=calls, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = worker.stats()
    assert stats.completed == 64 * 6
    assert len(stats.clients) == 64
    assert stats.mean_batch_size >= 0.8 * 8, stats.dispatch_reasons


# errors in a batch


def test_one_array_of_another_shape_fails_alone(in_process, held_gate):
    def run_batch(requests):
        return held_gate.run_batch(requests) if len(requests) == 1 and requests[0].size == 0 else np.stack(requests) @ np.ones(3)

    client = in_process(run_batch).connect()
    held = client.enqueue(np.zeros(0))
    held_gate.wait_entered()
    pending = [client.enqueue(np.ones(shape)) for shape in (3, 3, 4, 3)]
    held_gate.open()
    held.result()
    assert [pending[i].result() for i in (0, 1, 3)] == [3.0, 3.0, 3.0]
    with pytest.raises(ValueError, match="mismatch"):
        pending[2].result()


def test_batch_mates_of_different_lengths_arrive_as_they_are(in_process, held_gate):
    client = in_process(held_gate.run_batch).connect()
    held = client.enqueue("held")
    held_gate.wait_entered()
    lengths = (270, 252, 0, 1, 16_000)
    pending = [client.enqueue(np.full(length, length, "i4")) for length in lengths]
    held_gate.open()
    held.result()
    for length, one in zip(lengths, pending, strict=True):
        np.testing.assert_array_equal(one.result(), np.full(length, length, "i4"))
    assert len(held_gate.batches) == 2


def test_nothing_of_an_earlier_answer_appears_in_a_smaller_one_in_the_same_slot(in_process):
    def grow(requests):
        return [np.full(n, n, "i2") if n % 2 else bytes([n]) * n for n in requests]

    client = in_process(grow, capacity=1).connect()
    for n in (8, 2, 8, 255, 3, 255, 1, 160, 0, 7):
        answer = client.submit(n)
        expected = np.full(n, n, "i2") if n % 2 else bytes([n]) * n
        assert type(answer) is type(expected)
        assert bytes(answer) == bytes(expected)


# cancellation, deadlines, starting


def test_cancelling_at_random_times_leaves_no_slot_behind_and_nothing_stuck(name):
    with gpuworker.Worker(handlers.double, name=name, capacity=16, max_batch_size=4) as worker:
        client, cancelled, answered = worker.connect(), [], []

        def canceller(seed):
            chance = random.Random(seed)
            for i in range(125):
                pending = client.enqueue(i)
                for _ in range(chance.choice((0, 100, 1000, 5000))):
                    pass
                if pending.cancel():
                    cancelled.append(i)
                else:
                    assert pending.result() == 2 * i, "the answer was there first"
                    answered.append(i)

        threads = [threading.Thread(target=canceller, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(cancelled) + len(answered) == 500
        assert [client.submit(i, timeout=60) for i in range(100)] == [2 * i for i in range(100)]
        eventually(lambda: worker.stats().slots_in_use == 0)
        assert worker.stats().cancelled == len(cancelled) > 0


def test_a_slow_start_is_bounded_by_its_own_limit_and_no_other(name, tmp_path):
    weights = tmp_path / "not there yet"
    weights.touch()
    with pytest.raises(gpuworker.WorkerStartupError, match=r"startup_timeout_s=0\.1"):
        gpuworker.Worker(handlers.SlowToLoad(weights), name=name, startup_timeout_s=0.1).start()
    assert name not in worker_names()

    def arrive():
        eventually(lambda: name in worker_names())
        time.sleep(0.4)
        weights.unlink()

    threading.Thread(target=arrive).start()
    with gpuworker.Worker(handlers.SlowToLoad(weights), name=name, drain_timeout_s=0.1) as worker:
        assert worker.connect().submit("x", timeout=60) == "x"


# overload


def test_too_large_is_refused_at_once_even_where_a_full_ring_would_wait(in_process, held_gate):
    worker = in_process(held_gate.run_batch, capacity=1, max_payload_bytes=100_000, on_full="block")
    client = worker.connect()
    held = client.enqueue("held")
    held_gate.wait_entered()
    for too_large in (bytes(100_001), "x" * 100_001, np.zeros((400, 400))[:, ::2], [np.zeros(20_000)]):
        with pytest.raises(gpuworker.PayloadTooLarge, match="100,000"):
            client.submit(too_large)
    assert worker.stats().submitted == 1
    held_gate.open()
    assert held.result() == "held"


def test_offers_that_are_rejected_take_no_memory(in_process, held_gate):
    worker = in_process(held_gate.run_batch, capacity=4)
    client = worker.connect()
    accepted = [client.enqueue(bytes(60_000)) for _ in range(4)]
    held_gate.wait_entered()
    before = psutil.Process().memory_info().rss
    for _ in range(3000):
        with contextlib.suppress(gpuworker.QueueFull):
            client.submit(bytes(60_000))
    assert psutil.Process().memory_info().rss - before < 32 << 20, "of 180 MB offered"
    assert worker.stats().rejected == 3000
    held_gate.open()
    for one in accepted:
        one.result()


# what the documentation owes


def test_every_error_is_in_the_table_of_errors_and_submit_names_those_it_raises():
    for error in errors.__all__:
        assert error in errors.__doc__
    for error in ("DeadlineExceeded", "QueueFull", "WorkerNotFound", "WorkerDied", "WorkerDraining", "PayloadTooLarge", "UnsupportedPayload"):
        assert error in inspect.getdoc(gpuworker.Client.submit)
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    for promise in ("`timeout` passes", "QueueFull(retry_after_ms", "WorkerDied", "WorkerDraining", "BatchSizeMismatch"):
        assert promise in readme, "what a caller gets when it goes wrong"
