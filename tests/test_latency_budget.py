"""A latency budget, live: over real rings, with handlers that are held rather than slow."""

import random
import threading
import time
from collections import Counter

import pytest

import gpuworker
from tests.conftest import Gate, eventually
from tests.live_worker import LONG_MS, SHORT_MS, hold, known_costs, live_fixture, outcome, side_by_side  # noqa: F401


def budget_outcomes(stats):
    return stats.on_time + stats.late + stats.rejected_late + stats.rejected_forecast


# rejected by the owner


def test_a_request_that_cannot_be_in_time_any_more_is_rejected_with_numbers(live):
    worker, gate = live(latency_budget_ms=SHORT_MS, max_batch_size=4)
    client = worker.connect()
    first = hold(client, gate)
    pending = [client.enqueue(i) for i in range(3)]
    time.sleep(1.2 * SHORT_MS / 1e3)
    gate.open()
    assert first.result() == "first", "it was running: late, but not rejected"
    errors = [outcome(one) for one in pending]
    for error in errors:
        assert isinstance(error, gpuworker.BudgetExceeded)
        assert isinstance(error, gpuworker.QueueFull)
        assert (error.stage, error.budget_ms) == ("queued", SHORT_MS)
        assert error.estimated_ms >= SHORT_MS
        assert error.queue_depth >= 0
        assert error.retry_after_ms >= 1
        for part in (f"{error.estimated_ms:.1f} ms", f"{SHORT_MS} ms", "did not run"):
            assert part in str(error)
    assert gate.batches == [["first"]]
    eventually(lambda: worker.stats().slots_in_use == 0)
    stats = worker.stats()
    assert (stats.rejected_late, stats.late, stats.on_time, stats.completed, stats.rejected) == (3, 1, 0, 1, 0)
    assert client.submit("after") == "after"


def test_without_a_budget_nothing_is_shed(live):
    worker, gate = live(latency_budget_ms=None, length_buckets=(100,), max_batch_size=4)
    client = worker.connect(length=len)
    first = hold(client, gate)
    pending = [client.enqueue("x" * i) for i in range(1, 101)]
    time.sleep(0.05)
    gate.open()
    assert [one.result(60) for one in (first, *pending)] == ["first", *("x" * i for i in range(1, 101))]
    stats = worker.stats()
    assert (stats.rejected, budget_outcomes(stats), stats.goodput) == (0, 0, 0.0)


def test_a_request_may_bring_its_own_budget(live):
    worker, gate = live(max_batch_size=4)
    client = worker.connect()
    first = hold(client, gate)
    hurried = [client.enqueue(f"hurried {i}", latency_budget_ms=SHORT_MS) for i in range(2)]
    patient = client.enqueue("patient")
    time.sleep(1.2 * SHORT_MS / 1e3)
    gate.open()
    assert [first.result(), patient.result()] == ["first", "patient"]
    assert [outcome(one).budget_ms for one in hurried] == [SHORT_MS] * 2
    assert gate.batches == [["first"], ["patient"]]
    gate.shut()
    ways = [lambda: client.submit("submit", latency_budget_ms=0.001), lambda: list(client.map(["map"], latency_budget_ms=0.001))]
    first = hold(client, gate)
    raised = []

    def call(way):
        with pytest.raises(gpuworker.BudgetExceeded) as caught:
            way()
        raised.append(caught.value.budget_ms)

    callers = [threading.Thread(target=call, args=(way,)) for way in ways]
    for caller in callers:
        caller.start()
    eventually(lambda: worker.stats().slots_in_use == 3)
    gate.open()
    for caller in callers:
        caller.join(60)
    assert raised == [0.001] * 2


def test_a_longer_budget_of_its_own_outlives_the_workers(live):
    worker, gate = live(latency_budget_ms=SHORT_MS, max_batch_size=4)
    client = worker.connect()
    first = hold(client, gate)
    hurried = [client.enqueue(i) for i in range(2)]
    patient = client.enqueue("patient", latency_budget_ms=LONG_MS)
    time.sleep(1.2 * SHORT_MS / 1e3)
    gate.open()
    assert [first.result(), patient.result()] == ["first", "patient"]
    assert {type(outcome(one)) for one in hurried} == {gpuworker.BudgetExceeded}


def test_what_a_worker_does_not_do_is_an_error_at_once(live):
    plain, _ = live(latency_budget_ms=None)
    client = plain.connect()
    for call in (client.submit, client.enqueue, lambda x, **terms: list(client.map([x], **terms))):
        with pytest.raises(ValueError, match="has no latency budget; start it with the option latency_budget_ms"):
            call("x", latency_budget_ms=5)
        with pytest.raises(ValueError, match="knows none; start it with the option priorities"):
            call("x", priority=1)
    assert client.submit("x", priority=0) == "x"
    worker, _ = live(priorities=True)
    client = worker.connect()
    for budget_ms in (0, -1, float("nan"), True, 1e9):
        with pytest.raises(ValueError, match=r"latency_budget_ms=.*: give milliseconds from 0\.001 to"):
            client.submit("x", latency_budget_ms=budget_ms)
    for priority in (-1, 256, 1.5, True):
        with pytest.raises(ValueError, match=r"priority=.*: give an integer from 0"):
            client.submit("x", priority=priority)
    assert client.submit("x", latency_budget_ms=LONG_MS, priority=255) == "x"
    assert worker.stats().submitted == 1


# served late, waiting


def test_late_serve_answers_everything_and_what_is_in_time_goes_first(live):
    worker, gate = live(latency_budget_ms=SHORT_MS, late="serve", max_batch_size=4)
    client = worker.connect()
    first = hold(client, gate)
    late = [client.enqueue(f"late {i}") for i in range(6)]
    time.sleep(1.2 * SHORT_MS / 1e3)
    urgent = client.enqueue("in time", latency_budget_ms=LONG_MS)
    gate.open()
    assert [one.result(60) for one in (first, *late, urgent)] == ["first", *(f"late {i}" for i in range(6)), "in time"]
    assert gate.batches[:2] == [["first"], ["in time"]]
    assert [request for batch in gate.batches[2:] for request in batch] == [f"late {i}" for i in range(6)]
    eventually(lambda: worker.stats().completed == 8)
    stats = worker.stats()
    assert (stats.on_time, stats.late, stats.rejected_late, stats.dispatch_reasons["late"] > 0) == (1, 7, 0, True)
    assert stats.goodput == 0.125


@pytest.mark.parametrize("wait", ["auto", "until_deadline"])
def test_waiting_until_the_deadline_is_a_choice(live, tmp_path, wait):
    worker, gate = live(latency_budget_ms=1500, wait=wait, cost_file=known_costs(tmp_path, 100, 8, full_ms=800), max_batch_size=8)
    client = worker.connect()
    a = client.enqueue("a")
    if wait == "auto":
        gate.wait_entered()  # nothing says that another will come
    b = client.enqueue("b")
    assert [a.result(), b.result()] == ["a", "b"]
    assert gate.batches == ([["a"], ["b"]] if wait == "auto" else [["a", "b"]])
    eventually(lambda: worker.stats().batches == len(gate.batches))
    assert worker.stats().dispatch_reasons["value" if wait == "auto" else "budget"] == len(gate.batches)


def test_max_wait_ms_caps_the_wait(live, tmp_path):
    worker, _ = live(wait="until_deadline", max_wait_ms=5, cost_file=known_costs(tmp_path, 1, 8), max_batch_size=8)
    assert worker.connect().submit("a", timeout=30) == "a", "and not after the budget of a minute"
    eventually(lambda: worker.stats().dispatch_reasons["age"] == 1)


def test_a_caller_may_be_less_patient_than_the_budget(live):
    worker, gate = live()
    client = worker.connect()
    first = hold(client, gate)
    with pytest.raises(gpuworker.DeadlineExceeded) as caught:
        client.submit("x", timeout=0.05)
    assert caught.value.stage == "queued"
    gate.open()
    first.result()
    assert client.submit("y") == "y"
    assert gate.batches == [["first"], ["y"]]
    assert (worker.stats().expired, worker.stats().rejected_late) == (1, 0)


# accounts


@pytest.mark.parametrize("late", ["reject", "serve"])
def test_the_statistics_add_up(live, late):
    worker, gate = live(Gate(answer=lambda request: time.sleep(0.0005) or request), latency_budget_ms=20, late=late, admission="on", max_batch_size=4)
    outcomes = Counter()

    def calls(seed):
        drawn, client = random.Random(seed), worker.connect()
        for _ in range(20):
            sent = []
            for i in range(drawn.randint(1, 12)):
                try:
                    sent.append((i, client.enqueue(i, latency_budget_ms=drawn.choice([None, 0.001, 2, 1000]))))
                except gpuworker.BudgetExceeded as error:
                    outcomes[error.stage] += 1
            for i, pending in sent:
                found = outcome(pending)
                assert found == i or found.stage == "queued"
                outcomes["answered" if found == i else "queued"] += 1
        client.close()

    side_by_side(calls, range(4))
    eventually(lambda: worker.stats().slots_in_use == 0)
    stats = worker.stats()
    assert stats.on_time + stats.late == stats.completed == outcomes["answered"]
    assert (stats.rejected_late, stats.rejected_forecast) == (outcomes["queued"], outcomes["enqueue"])
    assert budget_outcomes(stats) == outcomes.total()
    assert stats.goodput == round(stats.on_time / outcomes.total(), 4)
    assert sum(stats.dispatch_reasons.values()) == stats.batches == len(gate.batches)
    assert (outcomes["queued"] + outcomes["enqueue"] > 0) == (late == "reject")
