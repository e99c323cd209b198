"""Batches that are prepared while another one runs."""

import threading

import numpy as np
import pytest
import torch

import gpuworker
from gpuworker import TensorHandler, TensorSpec
from tests.conftest import eventually
from tests.tensor_handlers import Held, Summed
from tests.test_tensor_handler import check, some


def number(value):
    return np.int64(value).reshape(())


@pytest.fixture
def held(in_process):
    """-> (handler, worker, client); gates are opened before the worker is stopped."""
    handlers = []

    def start(**options):
        handlers.append(Held())
        worker = in_process(handlers[-1], **{"pipeline_depth": 2, "max_batch_size": 4} | options)
        return handlers[-1], worker, gpuworker.connect(worker.name)

    yield start
    for handler in handlers:
        handler.gate.set()


@pytest.mark.parametrize("options", [{}, {"length_buckets": (60, 300)}, {"latency_budget_ms": 60_000, "cost_file": "off"}], ids=str)
def test_depth_1_and_2_give_the_same_answers(in_process, options):
    rng = np.random.default_rng(1)
    requests = [some(rng, int(n)) for n in rng.integers(1, 301, 300)]
    answers = []
    for depth in (1, 2, 8):
        worker = in_process(Summed(), pipeline_depth=depth, max_batch_size=8, **options)
        answers.append(list(gpuworker.connect(worker.name).map(requests)))
        for request, answer in zip(requests, answers[-1], strict=True):
            check(request, answer)
        assert worker.stats().completed == 300
    for one, other in zip(answers[0], answers[1], strict=True):
        assert one["y"].tobytes() == other["y"].tobytes()


def test_a_full_batch_is_prepared_while_another_one_runs(held):
    handler, worker, client = held()
    handler.gate.clear()
    first = client.enqueue(number(0))
    handler.wait_entered()
    rest = [client.enqueue(number(k)) for k in range(1, 5)]
    eventually(lambda: worker.stats().queue_wait.count == 0 and worker._session.owner._dispatched == 2)
    handler.gate.set()
    assert [pending.result(60).item() for pending in [first, *rest]] == [1, 2, 3, 4, 5]
    assert handler.batches == [[0], [1, 2, 3, 4]]


def test_a_batch_that_is_not_full_stays_open_while_another_one_runs(held):
    handler, worker, client = held(max_batch_size=8)
    for _ in range(5):  # so that run times are known
        client.submit(number(0))
    pace = worker._session.owner._pace
    pace._run_ns = dict.fromkeys(pace._run_ns, 10**12)  # the batch will take long
    handler.batches.clear()
    handler.gate.clear()
    while handler.entered.acquire(blocking=False):
        pass
    pending = [client.enqueue(number(0))]
    handler.wait_entered()
    for k in range(1, 4):
        pending.append(client.enqueue(number(k)))
        eventually(lambda: worker.stats().slots_in_use == len(pending))
    handler.gate.set()
    assert [one.result(60).item() for one in pending] == [1, 2, 3, 4]
    assert [batch[:3] for batch in handler.batches] == [[0], [1, 2, 3]]


def test_cancelled_and_expired_requests_do_not_shift_the_others(held):
    handler, worker, client = held(max_batch_size=2)
    handler.gate.clear()
    pending = [client.enqueue(number(k), timeout=0.05 if k in (3, 7) else None) for k in range(10)]
    handler.wait_entered()
    eventually(lambda: worker._session.owner._dispatched == 2)
    for k in (0, 2, 5):  # one that runs, one that is prepared, one that is queued
        assert pending[k].cancel()
    for k in (3, 7):
        with pytest.raises(gpuworker.DeadlineExceeded):
            pending[k].result(60)
    handler.gate.set()
    assert {k: pending[k].result(60).item() for k in (1, 4, 6, 8, 9)} == {1: 2, 4: 5, 6: 7, 8: 9, 9: 10}
    eventually(lambda: worker.stats().slots_in_use == 0)


def test_draining_finishes_both_batches_on_their_way(held):
    handler, worker, client = held(max_batch_size=1)
    handler.gate.clear()
    pending = [client.enqueue(number(k)) for k in range(3)]
    handler.wait_entered()
    eventually(lambda: worker._session.owner._dispatched == 2)
    stopper = threading.Thread(target=worker.stop)
    stopper.start()
    handler.gate.set()
    stopper.join(60)
    assert [one.result(60).item() for one in pending] == [1, 2, 3]


def test_an_idle_pipeline_answers_a_lone_request(held, monkeypatch):
    """The end of its run wakes the owner: nothing else happens."""
    monkeypatch.setattr("gpuworker.worker.owner.TICK_NS", 10**15)
    handler, _, client = held()
    for k in range(200):
        assert client.submit(number(k), timeout=60).item() == k + 1
    assert handler.batches == [[k] for k in range(200)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_forward_may_return_the_same_tensor_each_time(in_process, depth):
    class Kept(TensorHandler):
        inputs = TensorSpec("int64", (256,))
        outputs = TensorSpec("int64", (256,))

        def load(self):
            self.out = torch.zeros(64, 256, dtype=torch.int64)

        def forward(self, x):
            return torch.add(x, 1, out=self.out[: len(x)].detach())

    client = gpuworker.connect(in_process(Kept, pipeline_depth=depth, max_batch_size=4).name)
    requests = [np.full(256, k) for k in range(2000)]
    assert all((answer == k + 1).all() for k, answer in enumerate(client.map(requests)))


def test_run_times_are_those_of_a_batch_alone(held):
    _, worker, client = held(max_batch_size=1, latency_budget_ms=60_000, cost_file="off")
    list(client.map([number(k) for k in range(100)]))
    stats = worker.stats()
    assert stats.predicted_batches > 0
    assert stats.run.count == 100
    eventually(lambda: worker.stats().batch_running_s == 0)
