"""CUDA's executor against a CUDA that is simulated (tests/fake_cuda.py). tests/gpu has the same on a real one."""

import logging
import threading

import numpy as np
import pytest
import torch

from gpuworker.execution.cuda import CudaExecutor
from gpuworker.execution.executor import BatchArray
from gpuworker.execution.failures import Failure, kind_of
from gpuworker.execution.grid import Shape
from tests.fake_cuda import DEVICE, FakeCuda

WIDTH = 3
ARRAYS = [BatchArray("x", np.dtype(np.float32), ("tokens", WIDTH)), BatchArray("mask", np.dtype(np.int64), ("tokens",))]
DIMS = ("tokens",)
SHAPES = [Shape(rows, (tokens,)) for rows in (1, 4, 8) for tokens in (2, 5)]
SEEDS = [None, 1, 2, 3, 4]


def pooled(inputs):
    """Two outputs, of several steps."""
    mask = inputs["mask"].to(torch.float32).unsqueeze(-1)
    total = (inputs["x"] * mask).sum(1)
    return {"pooled": total * 2 + 1, "tokens": inputs["mask"].sum(1).contiguous()}


def batch(shape, number):
    """Inputs of a batch, different for every number."""
    generator = np.random.default_rng(number)
    (tokens,) = shape.extents
    return {
        "x": generator.standard_normal((shape.rows, tokens, WIDTH)).astype(np.float32),
        "mask": generator.integers(0, 2, (shape.rows, tokens)),
    }


def eagerly(program, inputs):
    return {name: value.numpy() for name, value in program({name: torch.from_numpy(value) for name, value in inputs.items()}).items()}


def run_all(executor, batches):
    """Pipelines [(shape, inputs)]. -> a copy of each one's outputs."""
    answers = []
    for k, (shape, inputs) in enumerate(batches):
        lane = k % executor.depth
        if k >= executor.depth:
            answers.append(copied(executor.wait(lane)))
        fill(executor.inputs(lane, shape), inputs)
        executor.launch(lane, shape)
    for k in range(max(len(batches) - executor.depth, 0), len(batches)):
        answers.append(copied(executor.wait(k % executor.depth)))
    return answers


def run(executor, shape, inputs, lane=0):
    fill(executor.inputs(lane, shape), inputs)
    executor.launch(lane, shape)
    return copied(executor.wait(lane))


def fill(arrays, inputs):
    for name, array in arrays.items():
        array[...] = inputs[name]


def copied(outputs):
    return {name: value.copy() for name, value in outputs.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.fixture(params=SEEDS)
def api(request, monkeypatch):
    api = FakeCuda(seed=request.param)
    api.time(monkeypatch)
    return api


@pytest.fixture
def make(api):
    executors = []

    def make(program=pooled, shapes=SHAPES, **options):
        options = {"device": DEVICE, "api": api, "graph_memory_bytes": 1 << 20} | options
        executors.append(CudaExecutor(program, ARRAYS, DIMS, shapes, **options))
        return executors[-1]

    yield make
    for executor in executors:
        executor.close()


def capture_all(executor):
    while executor.idle():
        pass


def many(count=40):
    return [(SHAPES[(k * 7) % len(SHAPES)], batch(SHAPES[(k * 7) % len(SHAPES)], k)) for k in range(count)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("graphs", ["none", "captured", "on demand"])
def test_a_pipeline_gives_what_the_program_gives(make, api, depth, graphs):
    executor = make(depth=depth, graphs=graphs != "none")
    if graphs == "captured":
        capture_all(executor)
    for (_, inputs), found in zip(many(), run_all(executor, many()), strict=True):
        assert_same(found, eagerly(pooled, inputs))
    usage = executor.usage()
    assert (usage.graph_hits > 0) == (graphs != "none")
    assert (usage.graphs == len(SHAPES)) == (graphs == "captured") or graphs == "on demand"
    assert executor.eager_because is None


def test_every_lane_has_memory_of_its_own_and_one_buffer_for_all_shapes(make):
    executor = make(depth=2)
    first, second = (executor.inputs(lane, SHAPES[-1]) for lane in (0, 1))
    assert not any(np.shares_memory(first[name], second[name]) for name in first)
    small = executor.inputs(0, SHAPES[0])
    for name, array in small.items():
        assert array.flags.c_contiguous
        assert array.ctypes.data == first[name].ctypes.data


def test_shapes_outside_the_grid_grow_the_buffers(make):
    executor = make(depth=2)
    shapes = [Shape(3, (4,)), Shape(30, (9,)), Shape(2, (2,)), Shape(64, (40,)), Shape(3, (4,))]
    batches = [(shape, batch(shape, k)) for k, shape in enumerate(shapes * 6)]
    for (_, inputs), found in zip(batches, run_all(executor, batches), strict=True):
        assert_same(found, eagerly(pooled, inputs))


def test_an_output_that_is_a_buffer_may_be_changed_by_the_next_batch(make, api):
    state = api.put(torch.zeros(1, WIDTH))

    def program(inputs):
        state.copy_(inputs["x"][:, 0])
        return {"out": state}

    executor = make(program, [], graphs=False, depth=3)
    for stream in api.streams:
        stream.speed = 1 if stream is executor._copy_out else 1000
    batches = [(Shape(1, (2,)), batch(Shape(1, (2,)), k)) for k in range(12)]
    for (_, inputs), found in zip(batches, run_all(executor, batches), strict=True):
        np.testing.assert_array_equal(found["out"], inputs["x"][:, 0])


def test_a_lane_is_launched_and_waited_for_in_turn(make):
    executor = make()
    executor.inputs(0, SHAPES[0])
    with pytest.raises(RuntimeError, match="not launched"):
        executor.wait(0)
    executor.launch(0, SHAPES[0])
    with pytest.raises(RuntimeError, match="not waited for"):
        executor.launch(0, SHAPES[0])
    executor.wait(0)


def test_is_done_tells_without_waiting(make):
    executor = make(graphs=False)
    executor.inputs(0, SHAPES[0])
    executor.launch(0, SHAPES[0])
    asked = 0
    while not executor.is_done(0):
        asked += 1
        assert asked < 1000
    executor.wait(0)


def test_a_launch_queues_and_does_not_run():
    api = FakeCuda()
    executor = CudaExecutor(pooled, ARRAYS, DIMS, [], device=DEVICE, graphs=False, api=api)
    executor.inputs(0, SHAPES[0])
    before = api.ticks
    executor.launch(0, SHAPES[0])
    assert api.ticks == before
    executor.wait(0)
    assert api.ticks > before


def test_usage_counts_bytes_and_times(make):
    executor = make(graphs=False)
    shape = SHAPES[-1]
    executor.timeline = []
    run(executor, shape, batch(shape, 0))
    usage = executor.usage()
    assert usage.to_device_bytes == 8 * 5 * (WIDTH * 4 + 8)
    assert usage.from_device_bytes == 8 * (WIDTH * 4 + 8)
    assert usage.device_ns > 0
    assert usage.to_device_ns > 0
    assert usage.from_device_ns > 0
    assert usage.memory_total_bytes == 1 << 30
    assert usage.memory_bytes > 0
    assert usage.graph_misses == 0
    (span,) = executor.timeline
    assert span.to_device[0] < span.to_device[1] < span.program[0] < span.program[1] < span.from_device[0] < span.from_device[1]


def test_the_end_of_every_batch_is_told(make):
    executor = make()
    told = threading.Semaphore(0)
    executor.notify(told.release)
    for k in range(6):
        fill(executor.inputs(0, SHAPES[k]), batch(SHAPES[k], k))
        executor.launch(0, SHAPES[k])
        assert told.acquire(timeout=60)
        assert executor.is_done(0)
        assert_same(copied(executor.wait(0)), eagerly(pooled, batch(SHAPES[k], k)))
    with pytest.raises(RuntimeError, match="already"):
        executor.notify(told.release)


def test_after_an_error_of_the_program_the_lane_works_again(make, api):
    def program(inputs):
        if inputs["x"].shape[0] == 4:
            raise ValueError("four rows")
        return pooled(inputs)

    executor = make(program, depth=2)
    for k, shape in enumerate(SHAPES * 3):
        fill(executor.inputs(k % 2, shape), batch(shape, k))
        if shape.rows == 4:
            with pytest.raises(ValueError, match="four rows"):
                executor.launch(k % 2, shape)
            assert not any(stream.items for stream in api.streams)  # nothing of it is on its way
        else:
            executor.launch(k % 2, shape)
            assert_same(copied(executor.wait(k % 2)), eagerly(pooled, batch(shape, k)))


def test_too_little_memory_for_a_batch_is_told_apart_and_leaves_a_working_executor(make, api):
    executor = make(lambda inputs: {"out": (inputs["x"].repeat(1, 100, 1).sum(1) * 1).contiguous()}, [])
    api.largest_bytes = 4 * 5 * 100 * WIDTH * 4
    executor.inputs(0, SHAPES[-1])
    with pytest.raises(torch.OutOfMemoryError) as caught:
        executor.launch(0, SHAPES[-1])
    assert kind_of(caught.value) is Failure.OUT_OF_MEMORY
    half = Shape(4, (5,))
    inputs = batch(half, 0)
    np.testing.assert_allclose(run(executor, half, inputs)["out"], inputs["x"].sum(1) * 100, rtol=1e-4)


def test_a_lost_device_is_told_by_wait(make, api):
    table = torch.ones(2, 2)
    executor = make(lambda inputs: {"out": table[inputs["mask"][:, 0]]}, [], graphs=False)
    shape = SHAPES[0]
    fill(executor.inputs(0, shape), {"x": 0, "mask": 7})
    with pytest.raises(torch.AcceleratorError) as caught:  # at once with a stream that is quick, else by wait
        executor.launch(0, shape)
        executor.wait(0)
    assert kind_of(caught.value) is Failure.DEVICE_LOST
    assert executor.is_done(0)


def test_close_may_be_called_twice(make):
    executor = make()
    executor.notify(lambda: None)
    capture_all(executor)
    executor.close()
    executor.close()
    assert executor.usage().graphs == 0


def test_a_grid_that_does_not_fit_is_refused(api):
    api.total_bytes = 10_000
    with pytest.raises(RuntimeError, match=r"too little memory on .*MiB.*lower max_batch_size or max_extents or pipeline_depth or cuda_graphs"):
        CudaExecutor(pooled, ARRAYS, DIMS, [Shape(64, (512,))], device=DEVICE, api=api)


def test_a_callback_that_fails_is_logged_and_the_next_are_called(make, caplog):
    executor = make(graphs=False)
    calls = threading.Semaphore(0)

    def callback():
        calls.release()
        raise ValueError("callback")

    executor.notify(callback)
    with caplog.at_level(logging.ERROR, logger="gpuworker"):
        for _ in range(2):
            executor.inputs(0, SHAPES[0])
            executor.launch(0, SHAPES[0])
            assert calls.acquire(timeout=60)
            executor.wait(0)
    executor.close()
    assert "callback" in caplog.text
