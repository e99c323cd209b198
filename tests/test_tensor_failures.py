"""What goes wrong in a TensorHandler, and who is told."""

import numpy as np
import psutil
import pytest
import torch

import gpuworker
from gpuworker import TensorHandler, TensorSpec
from tests.conftest import eventually
from tests.tensor_handlers import Doubled, Fails, LosesItsDevice, Sticks


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def serve(in_process, request):
    """-> (worker, client) of a handler, whose batches are full or wait for long."""

    def start(handler, **options):
        worker = in_process(handler, pipeline_depth=request.param, **{"max_wait_ms": 60_000} | options)
        return worker, gpuworker.connect(worker.name)

    return start


def one(value):
    return np.float32([value])


def outcomes(client, values):
    """Of a batch."""
    found = []
    for pending in [client.enqueue(one(value)) for value in values]:
        try:
            found.append(pending.result(60).item())
        except Exception as error:
            found.append(error)
    return found


def test_one_bad_request_of_eight_fails_alone(serve, caplog):
    handler = Fails()
    _, client = serve(handler, max_batch_size=8)
    handler.rows.clear()
    found = outcomes(client, [1, 2, 3, -4, 5, 6, 7, 8])
    assert isinstance(found[3], ValueError)
    assert found[:3] + found[4:] == [2, 3, 4, 6, 7, 8, 9]
    assert len(handler.rows) <= 1 + 2 * 3
    assert "failed on a batch of 8" in caplog.text


def test_without_isolation_all_of_the_batch_fail(serve):
    _, client = serve(Fails(), max_batch_size=4, isolate_errors=False)
    assert [type(outcome) for outcome in outcomes(client, [1, -2, 3, 4])] == [ValueError] * 4
    assert outcomes(client, [1, 2, 3, 4]) == [2, 3, 4, 5]


def test_a_mistake_in_the_handler_is_not_looked_for_among_the_requests(serve):
    class Narrow(Fails):
        def forward(self, x):
            self.rows.append(len(x))
            return x[:, :0]

    handler = Narrow()
    _, client = serve(handler, max_batch_size=8)
    handler.rows.clear()
    for outcome in outcomes(client, range(8)):
        assert isinstance(outcome, gpuworker.RemoteError)
        assert "outputs declares (8, 1)" in str(outcome)
    assert handler.rows == [8]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda x: None, "returned a NoneType"),
        (lambda x: {"z": x}, "returned a dict with \\['z'\\]; outputs declares 'output'"),
        (lambda x: (x, x), "returned a tuple"),
        (lambda x: [[1.0]] * len(x), "returned a list"),
        (lambda x: x[1:], "rows first"),
    ],
)
def test_what_forward_may_not_return(returned, words):
    class Wrong(Doubled):
        def forward(self, x):
            return returned(x)

    with pytest.raises(ValueError, match=words):
        Wrong().run_batch([np.ones(4, np.float32)] * 2)


def test_nan_is_an_answer_like_others(serve):
    class Root(Doubled):
        inputs = TensorSpec("float32", (1,))
        outputs = TensorSpec("float32", (1,))

        def forward(self, x):
            return x.sqrt()

    _, client = serve(Root, max_batch_size=4)
    found = outcomes(client, [4, -1, 9, 16])
    assert np.isnan(found[1])
    assert found[:1] + found[2:] == [2, 3, 4]


def test_out_of_memory_runs_the_batch_in_parts_and_lowers_the_limit(serve, caplog):
    handler = Fails(most=4)
    worker, client = serve(handler, max_batch_size=8)
    handler.rows.clear()
    assert outcomes(client, range(8)) == list(range(1, 9))
    assert "out of memory with a batch of 8: it was run in parts, and none is larger than 4 for a while" in caplog.text
    assert sum(rows > 4 for rows in handler.rows) == 1
    assert outcomes(client, range(16)) == list(range(1, 17))
    assert sum(rows > 4 for rows in handler.rows) == 1
    eventually(lambda: (found := worker.stats().execution) and found.out_of_memory == 1)
    assert worker.stats().failed == 0


def test_after_a_while_larger_batches_are_tried_again_and_after_that_more_rarely(serve, monkeypatch):
    monkeypatch.setattr("gpuworker.execution.runner.BATCHES_UNTIL_RAISED", 4)
    handler = Fails(most=4)
    worker, client = serve(handler, max_batch_size=8, max_wait_ms=100)  # the rest of the eight, when the limit has just been raised, is no full batch
    runs = []
    for _ in range(25):
        handler.rows.clear()
        assert outcomes(client, range(8)) == list(range(1, 9))
        runs.append(max(handler.rows))
    assert runs[0] == 8
    assert 1 < runs.count(8) < 6
    handler.most = 8
    for _ in range(40):
        assert outcomes(client, range(8)) == list(range(1, 9))
    assert worker._session.owner._runner.size_limit == 8


def test_a_request_that_is_too_large_even_alone_does_not_cost_the_others_their_batches(serve):
    class Poisoned(Fails):
        def forward(self, x):
            if (x > 100).any():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    worker, client = serve(Poisoned(), max_batch_size=8)
    for _ in range(3):
        found = outcomes(client, [1, 2, 3, 101, 5, 6, 7, 8])
        assert isinstance(found[3], gpuworker.RemoteError)
        assert found[:3] + found[4:] == [2, 3, 4, 6, 7, 8, 9]
    assert worker._session.owner._runner.size_limit == 8


def test_out_of_memory_under_a_latency_budget(in_process):
    handler = Fails(most=4)
    worker = in_process(handler, max_batch_size=8, latency_budget_ms=60_000, cost_file="off")
    client = gpuworker.connect(worker.name)
    handler.rows.clear()
    for _ in range(3):
        assert outcomes(client, range(40)) == list(range(1, 41))
    assert sum(rows > 4 for rows in handler.rows) <= 1


def test_out_of_memory_with_one_request_is_its_callers(serve):
    _, client = serve(Fails(most=0), max_batch_size=2, max_wait_ms=0)
    with pytest.raises(gpuworker.RemoteError, match="out of memory"):
        client.submit(one(1))


def test_out_of_memory_in_a_half_as_well(serve):
    handler = Fails(most=1)
    _, client = serve(handler, max_batch_size=4)
    for _ in range(3):
        assert outcomes(client, range(4)) == list(range(1, 5))


def test_a_bad_request_in_a_batch_that_is_out_of_memory_fails_alone(serve):
    _, client = serve(Fails(most=4), max_batch_size=8)
    found = outcomes(client, [1, 2, 3, 4, 5, -6, 7, 8])
    assert isinstance(found[5], ValueError)
    assert found[:5] + found[6:] == [2, 3, 4, 5, 6, 8, 9]


def test_system_exit_ends_the_owner_and_its_callers_are_told(name):
    class Leaves(Fails):
        def warmup(self):
            return None

        def forward(self, x):
            raise SystemExit(3)

    with gpuworker.Worker(Leaves(), name=name, in_process=True) as worker:
        client = gpuworker.connect(name)
        with pytest.raises(gpuworker.GpuWorkerError):
            client.submit(one(1), timeout=30)
        eventually(lambda: worker.pid is None)


def test_a_lost_device_ends_the_owner_and_the_next_one_runs_the_request(start, tmp_path, monkeypatch):
    lose = tmp_path / "lose"
    lose.touch()
    monkeypatch.setenv("GPUWORKER_TEST_LOSE", str(lose))
    worker = start(LosesItsDevice)
    client = gpuworker.connect(worker.name)
    assert client.submit(one(1), timeout=60).tolist() == [2]
    stats = worker.stats()
    assert (stats.restarts, stats.failed, lose.exists()) == (1, 0, False)
    assert "illegal memory access" in stats.note


def test_a_device_that_is_lost_with_every_owner_fails_the_request_and_not_the_others(start, tmp_path, monkeypatch):
    lose = tmp_path / "lose"
    lose.write_text("always")
    monkeypatch.setenv("GPUWORKER_TEST_LOSE", str(lose))
    worker = start(LosesItsDevice, max_attempts=2)
    client = gpuworker.connect(worker.name)
    with pytest.raises(gpuworker.WorkerDied):
        client.submit(one(1), timeout=60)
    lose.unlink()
    assert client.submit(one(1), timeout=60).tolist() == [2]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_that_waits_behind_a_stuck_one_is_run_by_the_next_owner(start, tmp_path, monkeypatch, depth):
    held = tmp_path / "held"
    held.touch()
    monkeypatch.setenv("GPUWORKER_TEST_HELD", str(held))
    worker = start(Sticks, max_batch_size=2, max_wait_ms=0, pipeline_depth=depth, run_timeout_s=1.0)
    client = gpuworker.connect(worker.name)
    pending = [client.enqueue(one(-1))]
    eventually(lambda: worker.stats().batch_running_s > 0)
    pending += [client.enqueue(one(value)) for value in (1, 2, 3, 4)]
    with pytest.raises(gpuworker.WorkerDied):
        pending[0].result(60)
    assert [each.result(60).item() for each in pending[1:]] == [2, 3, 4, 5]


def test_without_a_supervisor_a_lost_device_is_the_end(name):
    class Lost(Fails):
        def warmup(self):
            return None

        def forward(self, x):
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    with gpuworker.Worker(Lost(), name=name, in_process=True) as worker:
        with pytest.raises(gpuworker.GpuWorkerError):
            gpuworker.connect(name).submit(one(1), timeout=30)
        eventually(lambda: worker.pid is None)


class Forks(TensorHandler):
    inputs = TensorSpec("float32", (1,))
    outputs = TensorSpec("float32", (1,))

    def warmup(self):
        return None

    def forward(self, x):
        import os

        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        return x + 1  # in both


class ForksWhenAlone(Fails):
    """So only when a batch is run again."""

    def forward(self, x):
        if len(x) == 1:
            Forks.forward(self, x)
        return super().forward(x)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_handler_that_forks_while_errors_are_isolated(start, depth):
    worker = start(ForksWhenAlone, max_wait_ms=60_000, max_batch_size=4, pipeline_depth=depth)
    client = gpuworker.connect(worker.name)
    for _ in range(3):
        found = outcomes(client, [1, 2, -3, 4])
        assert found[:2] + found[3:] == [2, 3, 5]
    assert worker.stats().restarts == 0
    assert not psutil.Process(worker.pid).children()


def test_a_handler_that_forks_and_returns_in_both_processes(start):
    worker = start(Forks)
    client = gpuworker.connect(worker.name)
    for k in range(3):
        assert client.submit(one(k), timeout=60).tolist() == [k + 1]
    assert worker.stats().restarts == 0
