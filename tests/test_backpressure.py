"""A full ring: reject, block, fall back; and what one process may hold."""

import os
import threading

import pytest

import gpuworker
from tests.conftest import Gate, eventually


@pytest.fixture
def full(in_process):
    """A worker whose four slots are all in use: one runs, three wait."""
    gate = Gate(is_open=False)
    worker = in_process(gate.run_batch, capacity=4)
    client = worker.connect()
    pending = [client.enqueue(0)]
    gate.wait_entered()
    pending += [client.enqueue(i) for i in range(1, 4)]
    yield worker, client, gate, pending
    gate.open()


def test_reject_says_when_to_try_again(full):
    worker, client, _, _ = full
    with pytest.raises(gpuworker.QueueFull, match="all 4 slots") as caught:
        client.submit("too many")
    assert caught.value.retry_after_ms >= 1
    assert worker.stats().rejected == 1


def test_offered_beyond_capacity_exactly_the_remainder_is_rejected(in_process):
    gate = Gate(is_open=False)
    worker = in_process(gate.run_batch, capacity=64, max_batch_size=1)
    client = worker.connect()
    accepted, rejected = [], 0
    for i in range(1000):
        try:
            accepted.append(client.enqueue(i))
        except gpuworker.QueueFull:
            rejected += 1
        assert worker.stats().slots_in_use <= 64
    assert (len(accepted), rejected) == (64, 936)
    gate.open()
    assert [one.result() for one in accepted] == list(range(64))


def test_block_waits_for_a_slot(full):
    worker, _, gate, pending = full
    blocking, answers = worker.connect(on_full="block"), []
    callers = [threading.Thread(target=lambda i=i: answers.append(blocking.submit(i))) for i in (10, 11, 12)]
    for caller in callers:
        caller.start()
    gate.open()
    assert [one.result() for one in pending] == [0, 1, 2, 3]
    for caller in callers:
        caller.join(30)
    assert sorted(answers) == [10, 11, 12]


def test_block_ends_at_the_callers_timeout(full):
    worker, _, _, _ = full
    with pytest.raises(gpuworker.DeadlineExceeded) as caught:
        worker.connect(on_full="block").submit("x", timeout=0.05)
    assert caught.value.stage == "claiming"
    assert worker.stats().slots_in_use == 4


def test_block_as_the_workers_own_choice(in_process):
    gate = Gate(is_open=False)
    worker = in_process(gate.run_batch, capacity=1, on_full="block")
    client = worker.connect()
    first = client.enqueue(1)
    gate.wait_entered()
    with pytest.raises(gpuworker.DeadlineExceeded):
        client.submit(2, timeout=0.02)
    with pytest.raises(gpuworker.QueueFull):
        worker.connect(on_full="reject").submit(2)
    gate.open()
    assert first.result() == 1


def test_fallback_runs_here_and_now(full):
    worker, _, _, _ = full
    local = worker.connect(fallback=lambda request: ("computed by", os.getpid(), request))
    assert local.submit("x") == ("computed by", os.getpid(), "x")
    assert local.enqueue("y").result()[2] == "y"
    assert worker.stats().fallbacks == 2


def test_an_error_of_the_fallback_is_the_callers(full):
    worker, _, _, _ = full

    def broken(request):
        raise ZeroDivisionError("fallback")

    with pytest.raises(ZeroDivisionError):
        worker.connect(fallback=broken).submit("x")


def test_fallback_is_not_used_while_there_is_room(in_process, gate):
    client = in_process(gate.run_batch).connect(fallback=lambda request: "fallback")
    assert client.submit("x") == "x"


def test_one_client_cannot_take_every_slot_while_another_is_there(in_process):
    gate = Gate(is_open=False)
    worker = in_process(gate.run_batch, capacity=16)
    greedy, other = worker.connect(), worker.connect()
    pending = [other.enqueue("first")]
    gate.wait_entered()
    with pytest.raises(gpuworker.QueueFull, match="client_quota"):
        for i in range(17):
            pending.append(greedy.enqueue(i))
    assert len(pending) == 1 + 14
    pending.append(other.enqueue("there is room"))
    gate.open()
    assert pending[-1].result() == "there is room"


def test_an_explicit_quota(in_process):
    gate = Gate(is_open=False)
    worker = in_process(gate.run_batch, capacity=16, client_quota=2)
    client = worker.connect()
    pending = [client.enqueue(1), client.enqueue(2)]
    with pytest.raises(gpuworker.QueueFull):
        client.enqueue(3)
    gate.open()
    assert [one.result() for one in pending] == [1, 2]
    assert client.submit(3) == 3


def test_capacity_comes_back_after_rejections_and_timeouts(full):
    worker, client, gate, pending = full
    for _ in range(50):
        with pytest.raises(gpuworker.QueueFull):
            client.submit("x")
    gate.open()
    for one in pending:
        one.result()
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert [client.submit(i) for i in range(20)] == list(range(20))
