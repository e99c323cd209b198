"""Forecasts at enqueue, live: what would be late is not even sent."""

import threading

import pytest

import gpuworker
from tests.conftest import eventually
from tests.live_worker import LONG_MS, hold, known_costs, live_fixture, outcome  # noqa: F401


@pytest.fixture
def busy(live, tmp_path):
    """-> start(): a worker that runs a batch of, as it believes, 10 s, has two requests queued, which are the next one, and 25 s for each."""

    def start(admission="on"):
        costs = known_costs(tmp_path, 10_000, 2)
        worker, gate = live(latency_budget_ms=25_000, admission=admission, cost_file=costs, max_batch_size=2)
        client = worker.connect()
        pending = [hold(client, gate), client.enqueue("a"), client.enqueue("b")]
        return worker, gate, client, pending

    return start


def test_what_would_be_late_is_not_even_sent(busy):
    worker, gate, client, pending = busy()
    with pytest.raises(gpuworker.BudgetExceeded) as caught:
        client.enqueue("c")
    error = caught.value
    assert (error.stage, error.budget_ms, error.queue_depth) == ("enqueue", 25_000, 2)
    assert 25_000 < error.estimated_ms <= 30_000 * 1.3, "the running batch, the next one, and its own; with a margin"
    assert "the answer would be there after" in str(error)
    assert worker.stats().submitted == 3
    with pytest.raises(gpuworker.BudgetExceeded):
        client.submit("c")
    patient = client.enqueue("patient", latency_budget_ms=LONG_MS)
    gate.open()
    assert [one.result() for one in (*pending, patient)] == ["first", "a", "b", "patient"]
    eventually(lambda: worker.stats().slots_in_use == 0)
    stats = worker.stats()
    assert (stats.rejected_forecast, stats.on_time, stats.rejected_late, stats.rejected, stats.goodput) == (2, 4, 0, 0, 0.6667)


def test_a_request_that_would_be_late_may_go_elsewhere(busy):
    worker, gate, _, pending = busy()
    elsewhere = worker.connect(fallback=lambda request: f"{request} elsewhere")
    assert elsewhere.submit("c") == "c elsewhere"
    assert elsewhere.enqueue("d").result() == "d elsewhere"
    assert list(elsewhere.map(["e"])) == ["e elsewhere"]
    gate.open()
    assert [one.result() for one in pending] == ["first", "a", "b"]
    assert (worker.stats().fallbacks, worker.stats().submitted) == (3, 3)


def test_to_block_is_to_wait_until_it_fits(busy):
    worker, gate, _, pending = busy()
    patient = worker.connect(on_full="block")
    with pytest.raises(gpuworker.DeadlineExceeded) as caught:
        patient.submit("never", timeout=0.1)
    assert caught.value.stage == "claiming"
    answers = []
    caller = threading.Thread(target=lambda: answers.append(patient.submit("c", timeout=60)))
    caller.start()
    caller.join(0.1)
    assert caller.is_alive()
    assert worker.stats().submitted == 3
    gate.open()
    caller.join(60)
    assert answers == ["c"]
    assert [one.result() for one in pending] == ["first", "a", "b"]


def test_without_admission_the_owner_decides(busy):
    worker, gate, client, pending = busy(admission="off")
    pending.append(client.enqueue("c"))
    gate.open()
    outcomes = [outcome(one) for one in pending]
    assert outcomes[:3] == ["first", "a", "b"]
    assert worker.stats().rejected_forecast == 0
