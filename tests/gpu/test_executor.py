"""CUDA's executor on a real device, against eager runs on the same. Skipped without CUDA: `pytest tests/gpu` is the one command for a machine with a GPU."""

import logging
from itertools import pairwise

import numpy as np
import pytest
import torch

from gpuworker.execution.cuda import CudaExecutor
from gpuworker.execution.executor import BatchArray
from gpuworker.execution.failures import Failure, check_device, kind_of
from gpuworker.execution.grid import Shape
from tests.test_cuda_executor import ARRAYS, DIMS, SHAPES, batch, capture_all, copied, fill, many, pooled, run, run_all

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing in tests/gpu can run")]

EIGHT, TWO = Shape(8, (5,)), Shape(2, (5,))
X = "x"


@pytest.fixture
def make():
    executors = []

    def make(program=pooled, shapes=SHAPES, **options):
        executors.append(CudaExecutor(program, ARRAYS, DIMS, shapes, device="cuda:0", **options))
        return executors[-1]

    yield make
    for executor in executors:
        executor.close()


@pytest.fixture
def eager(make):
    """Runs a program on the device, without graphs, one batch after the other."""

    def eager(program, batches):
        return run_all(make(program, [], graphs=False, depth=1), batches)

    return eager


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="gpuworker")
    return lambda: [record.getMessage() for record in caplog.records]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in other:
            assert one[name].dtype == other[name].dtype
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("graphs", [False, True])
def test_outputs_are_those_of_eager_runs(make, eager, depth, graphs):
    executor = make(depth=depth, graphs=graphs)
    if graphs:
        capture_all(executor)
        assert executor.usage().graphs == len(SHAPES)
    assert_close(run_all(executor, many(200)), eager(pooled, many(200)))
    assert executor.eager_because is None
    assert executor.usage().graph_hits == (200 if graphs else 0)


def test_attention_is_the_same_as_a_graph(make, eager):
    generator = torch.Generator("cuda").manual_seed(0)
    into, out = (torch.randn(shape, device="cuda", generator=generator) for shape in ((3, 3 * 96), (96, 7)))

    def program(inputs):
        rows, tokens, _ = inputs[X].shape
        query, key, value = (inputs[X] @ into).view(rows, tokens, 3, 4, 24).permute(2, 0, 3, 1, 4)
        mask = torch.where(inputs["mask"] == 0, -1e4, 0.0)[:, None, None, :]
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
        return {"out": torch.nn.functional.gelu(found.transpose(1, 2).reshape(rows, tokens, 96)) @ out}

    executor = make(program)
    capture_all(executor)
    for expected, found in zip(eager(program, many(60)), run_all(executor, many(60)), strict=True):
        np.testing.assert_allclose(found["out"], expected["out"], rtol=1e-3, atol=1e-3)
    assert executor.eager_because is None
    assert executor.usage().graph_hits == 60


def test_canaries_of_a_large_batch_do_not_reach_a_small_one(make, eager):
    executor = make(shapes=[EIGHT, TWO])
    capture_all(executor)
    batches = []
    for number, shape in enumerate([EIGHT, TWO, EIGHT] * 10):
        inputs = batch(shape, number)
        if shape is EIGHT:
            inputs[X][2:] = 1e30
        batches.append((shape, inputs))
    assert_close(run_all(executor, batches), eager(pooled, batches))


@pytest.mark.parametrize("depth", [1, 2])
def test_random_numbers_are_those_of_eager_runs(make, eager, depth):
    def program(inputs):
        return {"out": torch.nn.functional.dropout(inputs[X], 0.5).sum((1, 2)) + torch.rand_like(inputs[X]).sum((1, 2))}

    batches = [(shape, batch(shape, k)) for k, shape in enumerate([EIGHT, TWO, TWO] * 20)]
    torch.cuda.manual_seed(5)
    expected = eager(program, batches)
    executor = make(program, [EIGHT, TWO], depth=depth)
    torch.cuda.manual_seed(5)
    capture_all(executor)
    assert_close(run_all(executor, batches), expected)
    assert executor.usage().graph_hits == len(batches)
    torch.cuda.manual_seed(5)  # and captured in between
    assert_close(run_all(make(program, [], depth=depth), batches), expected)


def test_state_in_place_counts_every_batch_once(make):
    count = torch.zeros(1, device="cuda")

    def program(inputs):
        count.add_(inputs[X].shape[0])
        return {"out": inputs[X][:, 0, 0] * 0 + count}

    executor = make(program, [EIGHT, TWO], state=lambda: [count])
    capture_all(executor)
    seen = 0
    for k, shape in enumerate([EIGHT, TWO, TWO] * 10):
        seen += shape.rows
        assert (run(executor, shape, batch(shape, k), k % 2)["out"] == seen).all()
    assert executor.eager_because is None
    assert count.item() == seen


def test_batch_norm_in_training_keeps_its_running_statistics(make):
    norms = [torch.nn.BatchNorm1d(3).cuda() for _ in range(2)]

    def of(norm):
        def program(inputs):
            with torch.no_grad():
                return {"out": norm(inputs[X][:, 0]).contiguous()}

        return program, lambda: list(norm.buffers())

    batches = [(EIGHT, batch(EIGHT, k)) for k in range(20)]
    answers = []
    for norm, graphs in zip(norms, (False, True), strict=True):
        program, state = of(norm)
        executor = make(program, [EIGHT], graphs=graphs, state=state)
        capture_all(executor)
        answers.append(run_all(executor, batches))
    assert_close(*answers)
    for one, other in zip(norms[0].buffers(), norms[1].buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_program_that_syncs_runs_eagerly_and_the_device_is_well(make, warnings):
    def program(inputs):
        largest = inputs[X].max().item()
        return {"out": torch.rand_like(inputs[X]).sum((1, 2)) * 0 + largest}

    executor = make(program, [EIGHT, TWO])
    before = torch.cuda.current_stream()
    assert not executor.idle()
    assert torch.cuda.current_stream() == before
    for k in range(10):
        shape = (EIGHT, TWO)[k % 2]
        inputs = batch(shape, k)
        np.testing.assert_allclose(run(executor, shape, inputs, k % 2)["out"], inputs[X].max(), rtol=1e-6)
    (warning,) = warnings()
    assert "cannot be captured" in warning
    assert torch.rand(3, device="cuda").shape == (3,)
    other = make()
    capture_all(other)
    assert other.usage().graphs == len(SHAPES)
    run_all(other, many())
    assert other.eager_because is None


def test_what_the_host_decides_without_a_sync_is_found(make, warnings):
    calls = []

    def program(inputs):
        calls.append(1)
        return {"out": inputs[X].sum((1, 2)) * len(calls)}

    executor = make(program, [TWO])
    capture_all(executor)
    inputs = batch(TWO, 0)
    for _ in range(3):
        np.testing.assert_allclose(run(executor, TWO, inputs)["out"], inputs[X].sum((1, 2)) * len(calls), rtol=1e-4)
    assert "does not give what an eager run gives" in warnings()[0]


def test_a_memory_cap_is_kept(make, eager):
    """32 MiB of intermediates a row: not all shapes' graphs fit."""

    def program(inputs):
        wide = inputs[X].sum((1, 2)).view(-1, 1).expand(-1, 8 << 20).contiguous()
        return {"out": (wide * 2)[:, :3].contiguous(), "kept": wide[:, : 4 << 20].contiguous()}

    limit_bytes = 400 << 20
    executor = make(program, [], graph_memory_bytes=limit_bytes)
    shapes = [Shape(rows, (2,)) for rows in (1, 2, 3, 1, 2, 3)]
    for shape in shapes:
        for k in range(30):
            inputs = batch(shape, k)
            found = run(executor, shape, inputs)
            np.testing.assert_allclose(found["out"][:, 0], inputs[X].sum((1, 2)) * 2, rtol=1e-4, atol=1e-5)
            assert executor.usage().graph_bytes <= limit_bytes
    assert executor.eager_because is None


def test_out_of_memory_is_told_apart_and_the_next_batch_runs(make):
    def program(inputs):
        if inputs[X].shape[0] == 8:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return pooled(inputs)

    executor = make(program)
    capture_all(executor)
    executor.inputs(0, EIGHT)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        executor.launch(0, EIGHT)
    assert kind_of(caught.value, torch.cuda.synchronize) is Failure.OUT_OF_MEMORY
    run(executor, TWO, batch(TWO, 0))


def test_copies_run_beside_programs(make):
    """The second batch's inputs are on the device before the first one's program ends."""
    arrays = [BatchArray("x", np.dtype(np.float32), (1 << 20,))]
    weights = torch.randn(4096, 4096, device="cuda")

    def program(inputs):
        product = weights
        for _ in range(40):
            product = product @ weights / 4096
        return {"out": inputs[X][:, :4] + product[0, 0]}

    executor = CudaExecutor(program, arrays, (), [Shape(8)], device="cuda:0", depth=2, graphs=False)
    try:
        executor.timeline = []
        for k in range(8):
            if k >= 2:
                executor.wait(k % 2)
            executor.inputs(k % 2, Shape(8))
            executor.launch(k % 2, Shape(8))
        executor.wait(0)
        executor.wait(1)
        spans = executor.timeline
        beside = [after.to_device[1] < before.program[1] for before, after in pairwise(spans)]
        assert all(beside), spans
        assert executor.usage().to_device_bytes == 8 * 8 * (4 << 20)
    finally:
        executor.close()


def test_host_arrays_are_pinned_and_answers_last_until_the_next_launch(make):
    executor = make()
    lane = executor._lanes[0]
    fill(executor.inputs(0, EIGHT), batch(EIGHT, 0))
    executor.launch(0, EIGHT)
    first = executor.wait(0)
    kept = copied(first)
    assert all(value.is_pinned() for value in (*lane.views(EIGHT).host.values(), *lane.results.values()))
    executor.inputs(0, EIGHT)
    for name, value in first.items():
        np.testing.assert_array_equal(value, kept[name])


def test_devices_of_this_machine():
    count = torch.cuda.device_count()
    assert check_device(None) == torch.device("cuda:0")
    assert check_device(f"cuda:{count - 1}") == torch.device("cuda", count - 1)
    with pytest.raises(RuntimeError, match="no such device"):
        check_device(f"cuda:{count}")
