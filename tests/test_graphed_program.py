"""That a program that is run as graphs does what it does without, on a simulated CUDA (tests/fake_cuda.py). tests/gpu has the same on a real one."""

import logging

import numpy as np
import pytest
import torch

from gpuworker.execution.cuda import CudaExecutor
from gpuworker.execution.graphs import RUNS_PER_CAPTURE
from gpuworker.execution.grid import Shape
from gpuworker.execution.program import batch_arrays, make_program
from tests.fake_cuda import DEVICE, GRAPH_BYTES, FakeCuda
from tests.test_cuda_executor import ARRAYS, DIMS, SHAPES, WIDTH, assert_same, batch, capture_all, eagerly, many, pooled, run, run_all


@pytest.fixture(params=[None, 1, 2])
def api(request, monkeypatch):
    api = FakeCuda(seed=request.param)
    api.time(monkeypatch)
    return api


@pytest.fixture
def make(api):
    executors = []

    def make(program, shapes=SHAPES, **options):
        options = {"device": DEVICE, "api": api, "graph_memory_bytes": 1 << 20} | options
        executors.append(CudaExecutor(program, ARRAYS, DIMS, shapes, **options))
        return executors[-1]

    yield make
    for executor in executors:
        executor.close()


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="gpuworker")
    return lambda: [record.getMessage() for record in caplog.records]


EIGHT, TWO = Shape(8, (5,)), Shape(2, (5,))
X = "x"


def test_idle_captures_one_shape_a_call(make, api):
    executor = make(pooled)
    for count in range(1, len(SHAPES)):
        assert executor.idle()
        assert api.captures == executor.usage().graphs == count
    assert not executor.idle()
    assert not executor.idle()
    assert executor.usage().graphs == len(SHAPES)
    assert executor.usage().graph_bytes >= GRAPH_BYTES * len(SHAPES)


def test_padding_of_an_earlier_batch_is_not_seen_by_a_smaller_one(make):
    """Canaries: what a large batch leaves in the static buffers must not reach a small one's answers."""
    executor = make(pooled, [EIGHT, TWO])
    capture_all(executor)
    for number, shape in enumerate([EIGHT, TWO, EIGHT, TWO, TWO, EIGHT] * 2):
        inputs = batch(shape, number)
        if shape is EIGHT:
            inputs[X][2:] = 1e30
        assert_same(run(executor, shape, inputs, number % 2), eagerly(pooled, inputs))
    assert executor.usage().graph_hits == 12


def test_a_load_gets_its_graph_without_idle_time(make, api):
    executor = make(pooled, [])
    batches = [(EIGHT, batch(EIGHT, k)) for k in range(50)]
    for (_, inputs), found in zip(batches, run_all(executor, batches), strict=True):
        assert_same(found, eagerly(pooled, inputs))
    assert executor.usage().graphs == 1
    assert executor.usage().graph_hits > 20


def randomly(inputs):
    return {"out": torch.rand_like(inputs[X]).sum((1, 2)) + inputs[X][:, 0, 0]}


def test_random_numbers_are_those_of_an_eager_run(make, api):
    """The same seed gives the same answers, whether and whenever graphs were captured."""
    answers = []
    for graphs, early in ((False, False), (True, False), (True, True)):
        executor = make(randomly, [EIGHT, TWO], graphs=graphs)
        api.seed, api.offset = 7, 0
        if early:
            capture_all(executor)
        answers.append([run(executor, shape, batch(shape, k), k % 2)["out"] for k, shape in enumerate([EIGHT, TWO] * 12)])
        assert (executor.usage().graph_hits > 0) == graphs
        assert executor.eager_because is None
    for eager, late, early in zip(*answers, strict=True):
        np.testing.assert_array_equal(eager, late)
        np.testing.assert_array_equal(eager, early)
    assert len({float(answer[0]) for answer in answers[0]}) == 24


def test_the_host_s_random_numbers_are_left_alone(make):
    def program(inputs):
        torch.rand(3)
        return pooled(inputs)

    executor = make(program)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    capture_all(executor)
    assert torch.equal(torch.rand(4), expected)


def counting(api):
    """A program with a buffer that counts its rows, and its state."""
    count = api.put(torch.zeros(1))

    def program(inputs):
        count.add_(inputs[X].shape[0])
        return {"out": inputs[X].sum((1, 2)) + count}

    return program, lambda: [count]


def test_state_in_place_counts_every_batch_once(make, api):
    program, state = counting(api)
    executor = make(program, [EIGHT, TWO], state=state)
    capture_all(executor)
    seen = 0
    for k, shape in enumerate([EIGHT, TWO, TWO, EIGHT] * 3):
        inputs = batch(shape, k)
        seen += shape.rows
        np.testing.assert_allclose(run(executor, shape, inputs, k % 2)["out"], inputs[X].sum((1, 2)) + seen, rtol=1e-5)
    assert executor.eager_because is None
    assert executor.usage().graph_hits == 12


def test_state_is_untouched_by_captures_under_load(make, api):
    program, state = counting(api)
    executor = make(program, [], state=state)
    for k in range(30):
        inputs = batch(TWO, k)
        np.testing.assert_allclose(run(executor, TWO, inputs)["out"], inputs[X].sum((1, 2)) + 2 * (k + 1), rtol=1e-5)
    assert executor.usage().graphs == 1


def test_state_is_untouched_by_a_capture_that_fails(make, api):
    count, is_bad = api.put(torch.zeros(1)), [True]

    def program(inputs):
        count.add_(1)
        if is_bad[0]:
            raise ValueError("not this one")
        return {"out": inputs[X][:, 0, 0] * 0 + count}

    executor = make(program, [TWO], state=lambda: [count])
    assert not executor.idle()
    api.synchronize()
    is_bad[0] = False
    assert [run(executor, TWO, batch(TWO, k))["out"][0] for k in range(3)] == [1, 2, 3]


def test_state_that_is_bound_anew_runs_eagerly(make, api, warnings):
    class Module:
        count = api.put(torch.zeros(1))

    def program(inputs):
        Module.count = Module.count + 1 + 0 * inputs[X][0, 0, :1]
        return {"out": inputs[X][:, 0, 0] * 0 + Module.count}

    executor = make(program, [TWO], state=lambda: [Module.count])
    capture_all(executor)
    assert [run(executor, TWO, batch(TWO, k))["out"][0] for k in range(3)] == [1, 2, 3]
    assert "in the place of its buffers" in executor.eager_because
    assert len(warnings()) == 1


def test_inputs_that_the_program_changes_are_fresh_in_every_batch(make):
    def program(inputs):
        inputs[X].mul_(2).add_(1)
        return {"out": inputs[X].sum((1, 2))}

    executor = make(program, [TWO])
    capture_all(executor)
    for k in range(4):
        inputs = batch(TWO, k)
        np.testing.assert_allclose(run(executor, TWO, inputs, k % 2)["out"], (inputs[X] * 2 + 1).sum((1, 2)), rtol=1e-5)
    assert executor.usage().graph_hits == 4
    assert executor.eager_because is None


def test_nan_equals_nan(make):
    executor = make(lambda inputs: {"out": inputs[X].sum((1, 2)) / 0 * 0}, [TWO])
    capture_all(executor)
    assert np.isnan(run(executor, TWO, batch(TWO, 0))["out"]).all()
    assert executor.eager_because is None


def test_what_is_decided_on_the_host_without_a_sync_is_found_by_the_first_replay(make, warnings):
    calls = []

    def program(inputs):
        calls.append(1)
        return {"out": inputs[X].sum((1, 2)) * len(calls)}

    executor = make(program, [TWO, EIGHT])
    capture_all(executor)
    assert executor.usage().graphs == 2
    for k in range(3):
        inputs = batch(TWO, k)
        found = run(executor, TWO, inputs, k % 2)["out"]
        np.testing.assert_allclose(found, inputs[X].sum((1, 2)) * len(calls), rtol=1e-5)
    assert executor.usage().graphs == 0
    (warning,) = warnings()
    assert "a replay of 2 rows x 5 does not give what an eager run gives: out differs" in warning
    assert not executor.idle()


def test_a_difference_in_state_is_found_too(make, api):
    count, calls = api.put(torch.zeros(1)), []

    def program(inputs):
        calls.append(1)
        count.copy_(inputs[X][0, 0, :1] * 0 + len(calls))
        return {"out": inputs[X][:, 0, 0] * 1}

    executor = make(program, [TWO], state=lambda: [count])
    capture_all(executor)
    run(executor, TWO, batch(TWO, 0))
    assert "buffer 0 differs" in executor.eager_because
    assert count.item() == len(calls)


def test_rounding_is_no_difference_unless_the_tolerance_says_so(make):
    calls = []

    def program(inputs):
        calls.append(1)
        return {"out": inputs[X].sum((1, 2)) * (1 + len(calls) * 1e-5)}

    generous, strict = make(program, [TWO]), make(program, [TWO], tolerance=1e-7)
    for executor in (generous, strict):
        capture_all(executor)
        run(executor, TWO, batch(TWO, 0))
    assert generous.eager_because is None
    assert strict.eager_because is not None


@pytest.mark.parametrize("when", ["in the background", "under load"])
def test_a_program_that_waits_for_the_device_runs_eagerly_and_says_why(make, api, warnings, when):
    def program(inputs):
        largest = inputs[X].max().item()
        return {"out": torch.rand_like(inputs[X]).sum((1, 2)) * 0 + largest}

    executor = make(program, [TWO, EIGHT] if when == "in the background" else [])
    if when == "in the background":
        assert not executor.idle()
    before = api.current_stream()
    for k in range(10):
        shape = (TWO, EIGHT)[k % 2]
        inputs = batch(shape, k)
        np.testing.assert_allclose(run(executor, shape, inputs, k % 2)["out"], inputs[X].max())
    assert api.current_stream() is before
    (warning,) = warnings()
    assert "runs without CUDA graphs: it cannot be captured (" in warning
    assert "operation not permitted when stream is capturing" in warning
    assert api.failed_captures == 1
    assert executor.usage().graphs == 0


def test_an_error_only_in_the_capture_is_reported_with_its_reason(make, api, warnings):
    def program(inputs):
        if api.current_stream().graph is not None:
            raise NotImplementedError("no kernel for that\nand more")
        return pooled(inputs)

    executor = make(program)
    assert not executor.idle()
    for (_, inputs), found in zip(many(), run_all(executor, many()), strict=True):
        assert_same(found, eagerly(pooled, inputs))
    (warning,) = warnings()
    assert warning.endswith("NotImplementedError: no kernel for that")


def test_a_program_that_cannot_run_the_example_is_captured_with_a_real_batch(make, warnings):
    def program(inputs):
        if inputs["mask"].sum().item() == 0:
            raise ValueError("an empty batch")
        return pooled(inputs)

    # Syncs, so it is not captured in the end; what matters here is when and with what it was tried.
    executor = make(program, [TWO])
    assert not executor.idle()
    assert executor.eager_because is None
    inputs = batch(TWO, 0)
    inputs["mask"][:] = 1
    for _ in range(20):
        assert_same(run(executor, TWO, inputs), eagerly(pooled, inputs))
    assert "it cannot be captured" in executor.eager_because
    assert len(warnings()) == 1


def test_an_example_is_what_the_background_captures_with(make):
    shown = []

    def example(shape, arrays):
        shown.append(shape)
        assert not arrays[X].any()
        arrays["mask"][:] = 1

    def program(inputs):
        return {"out": inputs[X].sum((1, 2)) / inputs["mask"].sum(1)}

    executor = make(program, [TWO, EIGHT], example=example)
    capture_all(executor)
    assert shown == [EIGHT, TWO]


def test_an_error_of_a_request_is_its_own_while_a_graph_is_due(make):
    def program(inputs):
        if bad[0]:
            raise ValueError("bad request")
        return pooled(inputs)

    bad = [False]
    executor = make(program, [])
    for k in range(40):
        bad[0] = k >= RUNS_PER_CAPTURE - 2 and k % 2 == 0
        if bad[0] and executor.usage().graphs == 0:
            executor.inputs(0, TWO)
            with pytest.raises(ValueError, match="bad request"):
                executor.launch(0, TWO)
        else:
            bad[0] = False
            assert_same(run(executor, TWO, batch(TWO, k)), eagerly(pooled, batch(TWO, k)))
    assert executor.eager_because is None


def test_too_little_memory_for_a_capture_loses_that_shape_only(make, api, warnings):
    def program(inputs):
        if api.current_stream().graph is not None and inputs[X].shape[0] == 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return pooled(inputs)

    executor = make(program, [EIGHT, TWO])
    capture_all(executor)
    assert executor.usage().graphs == 1
    for k, shape in enumerate([EIGHT, TWO] * 10):
        assert_same(run(executor, shape, batch(shape, k)), eagerly(pooled, batch(shape, k)))
    assert executor.usage().graphs == 1
    assert len(warnings()) == 1
    assert executor.eager_because is None


def test_after_an_error_of_memory_nothing_of_the_run_is_held(make, api):
    def program(inputs):
        large = inputs[X].expand(100, *inputs[X].shape).clone()
        if api.current_stream().graph is not None or inputs[X].shape[0] == 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return {"out": large.sum((0, 2, 3))}

    executor = make(program, [TWO])
    run(executor, TWO, batch(TWO, 0))
    before = executor.usage().memory_bytes
    capture_all(executor)
    api.synchronize()
    assert executor.usage().memory_bytes == before
    executor.inputs(0, EIGHT)
    before = executor.usage().memory_bytes
    with pytest.raises(torch.OutOfMemoryError) as caught:  # whoever keeps the error keeps its frames
        executor.launch(0, EIGHT)
    assert executor.usage().memory_bytes == before
    del caught


def test_too_little_memory_to_compare_loses_that_shape_only(make, api, warnings, monkeypatch):
    def agree(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    program, state = counting(api)
    executor = make(program, [EIGHT, TWO], state=state)
    capture_all(executor)
    run(executor, TWO, batch(TWO, 0))
    monkeypatch.setattr("gpuworker.execution.graphed_program.agree", agree)
    for k in range(3):
        inputs = batch(EIGHT, k)
        np.testing.assert_allclose(run(executor, EIGHT, inputs)["out"], inputs[X].sum((1, 2)) + 2 + 8 * (k + 1), rtol=1e-5)
    assert executor.usage().graphs == 1
    assert executor.eager_because is None
    assert len(warnings()) == 1


def test_a_memory_cap_drops_the_least_recently_used_graph(make, api):
    executor = make(pooled, [], graph_memory_bytes=int(GRAPH_BYTES * 3.5))
    shapes = [Shape(rows, (2,)) for rows in range(1, 8)]
    for shape in shapes:
        for k in range(40):
            assert_same(run(executor, shape, batch(shape, k)), eagerly(pooled, batch(shape, k)))
    usage = executor.usage()
    assert 1 <= usage.graphs <= 3
    assert usage.graph_bytes <= GRAPH_BYTES * 3.5
    assert api.living_graphs == usage.graphs
    assert api.captures == len(shapes)


def test_larger_shapes_than_before_leave_earlier_graphs_working(make):
    executor = make(pooled, [])
    shapes = [Shape(2, (2,)), Shape(16, (9,)), Shape(40, (12,))]
    for shape in shapes * 2:
        batches = [(shape, batch(shape, k)) for k in range(30)]
        for (_, inputs), found in zip(batches, run_all(executor, batches), strict=True):
            assert_same(found, eagerly(pooled, inputs))
    assert executor.usage().graphs == 3


def test_a_lost_device_is_not_taken_for_a_program_that_cannot_be_captured(make, api, warnings):
    table = torch.ones(1, WIDTH)

    def example(shape, arrays):
        arrays["mask"][:] = 9

    executor = make(lambda inputs: {"out": table[inputs["mask"]]}, [TWO], example=example)
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        executor.idle()
    assert not warnings()


def test_an_encoder_of_transformers_is_captured_and_is_the_same(api, tmp_path, monkeypatch):
    """transformers looks into the mask, which waits for the device, unless a capture is on."""
    pytest.importorskip("transformers")
    from gpuworker.execution.encoder import HFEncoder
    from tests.tiny_encoder import save_encoder

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: api.current_stream().graph is not None)
    encoder = HFEncoder(save_encoder(tmp_path), device="cpu")
    encoder.load()
    signature, shapes = encoder.signature, [Shape(2, (8,)), Shape(4, (16,))]
    program, arrays = make_program(encoder.forward, signature), batch_arrays(signature)
    executor = CudaExecutor(program, arrays, signature.dims, shapes, device=DEVICE, api=api, state=encoder.state)
    capture_all(executor)
    for k, shape in enumerate(shapes * 3):
        generator = np.random.default_rng(k)
        ids = generator.integers(5, 40, (shape.rows, *shape.extents))
        mask = np.arange(shape.extents[0]) < generator.integers(1, shape.extents[0] + 1, (shape.rows, 1))
        inputs = {"input_ids": ids, "attention_mask": mask.astype(np.int64)}
        (expected,) = eagerly(program, inputs).values()
        (found,) = run(executor, shape, inputs, k % 2).values()
        np.testing.assert_allclose(found, expected, atol=1e-6)
    assert executor.eager_because is None
    assert executor.usage().graph_hits == 6
    executor.close()
