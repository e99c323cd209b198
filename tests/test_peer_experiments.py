"""Seven simple experiments in which serving systems are known to differ, each with the right answer: exact on the fake clock where time is the
question, and against a real ring and owner. Where a real wait is needed its length is a ratio to what is measured, not a bound in itself."""

import itertools
import os
import signal
import threading
import time

import pytest

import gpuworker
from gpuworker.scheduling import SizeOrTimeout
from gpuworker.testing import simulate
from tests import handlers
from tests.conftest import Gate, eventually, kill_all

MS = 1_000_000


def outcome(pending):
    try:
        return pending.result(60)
    except Exception as error:
        return error


def poison_or_ten_times(requests):
    if "poison" in requests:
        raise ValueError("poison")
    return [request * 10 for request in requests]


@pytest.fixture
def batch_of(in_process):
    """A worker, and a function that runs its arguments as exactly one batch, as they all wait behind one that is held. -> outcomes."""

    def start(handler, **options):
        gate = Gate()
        worker = in_process(lambda requests: gate.run_batch(requests) if requests == ["held"] else handler(requests), **options)
        client = worker.connect()

        def run(*requests):
            gate.shut()
            held = client.enqueue("held")
            gate.wait_entered()
            pending = [client.enqueue(request) for request in requests]
            gate.open()
            assert held.result(60) == "held"
            return [outcome(one) for one in pending]

        return worker, run

    return start


def test_a_late_arrival_behind_a_running_batch_is_done_when_its_own_wait_and_the_run_are_over():
    # Runs take 50 ms, requests wait up to 40 ms. A leaves at 40 and runs until 90; B came at 50, is due at 90, and is done at 140: 90 ms after it came.
    a, b = simulate(SizeOrTimeout(8, 40), [0, 50 * MS], lambda count, length: 50 * MS).batches
    assert (a.start_ns, b.start_ns, b.end_ns - 50 * MS) == (40 * MS, 90 * MS, 90 * MS)


def test_a_late_arrival_that_has_waited_long_enough_leaves_as_soon_as_the_device_is_free(in_process):
    wait_s, gate = 0.6, Gate(is_open=False)
    client = in_process(gate.run_batch, max_batch_size=2, max_wait_ms=wait_s * 1e3).connect()
    running = [client.enqueue("a"), client.enqueue("a")]  # a full batch: it leaves at once
    gate.wait_entered()
    came = time.monotonic()
    late = client.enqueue("b")
    time.sleep(wait_s + 0.05)  # its whole wait passes behind the running batch
    freed = time.monotonic()
    gate.open()
    assert late.result(60) == "b"
    assert freed - came >= wait_s
    assert time.monotonic() - freed < wait_s / 2, "it waited again"
    assert [one.result(60) for one in running] == ["a", "a"]
    assert gate.batches == [["a", "a"], ["b"]]


def test_an_idle_single_request_waits_max_wait_ms_and_not_at_all_when_that_is_zero():
    for max_wait_ms in (0, 40):
        (batch,) = simulate(SizeOrTimeout(8, max_wait_ms), [7 * MS], lambda count, length: 2 * MS).batches
        assert batch.end_ns == (7 + max_wait_ms + 2) * MS


def test_an_idle_single_request_does_not_wait_for_company_unless_told_to(in_process, gate):
    waits_us = []
    for max_wait_ms in (0, 300):
        worker = in_process(gate.run_batch, max_wait_ms=max_wait_ms)
        assert worker.connect().submit("x") == "x"
        stats = worker.stats()
        waits_us.append(stats.queue_wait.mean_us + stats.batch_wait.mean_us)
        assert stats.dispatch_reasons["age"] == 1
    assert waits_us[0] < 150_000
    assert waits_us[1] >= 299_000


def test_one_poison_item_of_four_fails_alone_and_as_itself(batch_of):
    _, run = batch_of(poison_or_ten_times)
    one, two, three, four = run(1, "poison", 3, 4)
    assert (one, three, four) == (10, 30, 40)
    assert (type(two), two.args) == (ValueError, ("poison",))


def test_n_minus_one_results_are_nobodys_answer(batch_of):
    calls = []
    _, run = batch_of(lambda requests: calls.append(len(requests)) or requests[1:])
    for failed in run(1, 2, 3, 4):
        assert (type(failed), failed.expected, failed.got) == (gpuworker.BatchSizeMismatch, 4, 3)
    assert calls == [4], "a handler with a wrong count is not asked again"


def test_service_goes_on_after_poison_and_after_a_wrong_number_of_results(batch_of):
    worker, run = batch_of(lambda requests: requests[1:] if "short" in requests else poison_or_ten_times(requests))
    for bad, kind in (("poison", ValueError), ("short", gpuworker.BatchSizeMismatch)) * 3:
        assert kind in map(type, run(1, bad, 3, 4))
        assert run(1, 2, 3, 4) == [10, 20, 30, 40]
    stats = worker.stats()
    assert (stats.state, stats.slots_in_use) == ("serving", 0)


@pytest.mark.parametrize(("count", "every_ms", "max_wait_ms", "sizes"), [(24, 5, 40, [8] * 3), (48, 6, 10, [2] + [8] * 5 + [6])])
def test_staggered_load_gives_full_batches(count, every_ms, max_wait_ms, sizes):
    arrivals = [i * every_ms * MS for i in range(count)]
    batches = simulate(SizeOrTimeout(8, max_wait_ms), arrivals, lambda size, length: 100 * MS).batches
    assert [len(batch.requests) for batch in batches] == sizes
    assert [request for batch in batches for request in batch.requests] == list(range(count))
    assert all(before.end_ns == after.start_ns for before, after in itertools.pairwise(batches)), "a device that has work does not wait"


def test_batches_fill_until_the_device_is_free_and_not_before(in_process):
    gate = Gate(is_open=False)
    client = in_process(gate.run_batch, max_batch_size=8, max_wait_ms=1).connect()
    pending = [client.enqueue("first")]
    gate.wait_entered()
    pending += [client.enqueue(i) for i in range(16)]  # one by one, and each has waited its 1 ms
    gate.open()
    assert [one.result(60) for one in pending] == ["first", *range(16)]
    assert gate.batches == [["first"], list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("supervisor_dies_too", [False, True])
def test_callers_of_a_model_process_killed_mid_batch_are_served_by_the_next_one_or_told_before_their_own_timeouts(
    name, tmp_path, supervisor_dies_too
):
    held = tmp_path / "held"
    held.touch()
    worker = gpuworker.Worker(handlers.hold_while_file_exists, name=name, max_batch_size=4).start()
    client, outcomes = worker.connect(connect_timeout_s=60), []

    def call():
        try:
            outcomes.append(client.submit(str(held), timeout=60))
        except gpuworker.GpuWorkerError as error:
            outcomes.append(type(error))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    eventually(lambda: worker.stats().batch_running_s > 0 and worker.stats().slots_in_use == 4)
    if supervisor_dies_too:
        kill_all(worker)
    else:
        os.kill(worker.pid, signal.SIGKILL)
        eventually(lambda: worker.stats().restarts == 1)
        held.unlink()
    for caller in callers:
        caller.join(30)
    assert outcomes == [gpuworker.WorkerDied if supervisor_dies_too else str(held)] * 4
    if supervisor_dies_too:
        worker.stop()
        worker = gpuworker.Worker(handlers.identity, name=name).start()
    assert [client.submit(str(i), timeout=60) for i in range(8)] == list(map(str, range(8)))
    worker.stop()
