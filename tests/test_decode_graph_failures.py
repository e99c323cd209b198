"""Decode steps as graphs on a simulated CUDA, where something goes wrong: a capture, a replay, memory, the device."""

import re

import pytest
import torch

from gpuworker.execution.failures import Failure, kind_of
from gpuworker.generation.handler import GenerationHandler
from gpuworker.worker.options import WorkerOptions
from tests.simulated_decode import (  # noqa: F401 (fixtures)
    BLOCKS,
    SOME,
    assert_same,
    changed,
    drive,
    eagerly,
    fails,
    make_fixture,
    make_scheduler,
    traffic,
    waits,
    warnings_fixture,
    without_kernel_fixture,
)  # fmt: skip
from tests.test_paged_attention import scattered
from tests.tiny_llama import save


def counts():
    """Adds the number of the call: a graph has one baked in."""
    calls = []

    def count(logits):
        calls.append(1)
        return logits + len(calls)

    return count


@pytest.mark.parametrize(
    ("change", "said"),
    [(waits, "cannot be captured: .*capturing"), (fails, "cannot be captured: not such"), (counts(), "does not give what an eager")],
)
@pytest.mark.parametrize("when", ["before", "between"])
def test_what_cannot_be_captured_is_eager_for_good_and_said_once(make, warnings, change, said, when):
    simulated = make()
    expected = eagerly("llama", SOME)
    changed(simulated, change)
    if when == "before":
        simulated.capture(1)
    found = drive(simulated.forward, make_scheduler(), *traffic(SOME))
    if change in (waits, fails):
        assert_same(found, expected)
    assert found[0][0] == expected[0][0]
    (warning,) = warnings()
    assert warning.startswith("the model runs without CUDA graphs: ")
    assert re.search(said, warning)
    assert warning.endswith(simulated.graphs.reason)
    assert simulated.graphs.count == simulated.api.living_graphs == 0
    replays = simulated.api.replays
    assert replays <= 1
    drive(simulated.forward, make_scheduler(), *traffic(SOME))
    assert simulated.api.replays == replays
    assert len(warnings()) == 1


def test_a_bucket_without_memory_is_eager_and_others_are_not(make, warnings):
    simulated = make()
    simulated.api.largest_bytes = 100
    simulated.capture(1)
    simulated.api.largest_bytes = 1 << 30
    assert simulated.graphs.count == 0
    assert any("not enough memory" in warning for warning in warnings())
    refused = len(warnings())
    assert_same(drive(simulated.forward, make_scheduler(), *traffic(SOME)), eagerly("llama", SOME))
    assert len(warnings()) == refused
    assert simulated.graphs.reason is None


def test_a_lost_device_is_not_taken_for_a_capture_that_fails(make, warnings):
    simulated = make()
    simulated.api.lost = RuntimeError("gone")
    with pytest.raises(torch.AcceleratorError) as caught:
        simulated.capture()
    assert kind_of(caught.value) is Failure.DEVICE_LOST
    assert not warnings()


def test_closed_graphs_are_gone_and_steps_eager(make):
    simulated = make()
    simulated.capture(3)
    assert simulated.api.living_graphs == 3
    simulated.graphs.close()
    simulated.graphs.close()
    assert simulated.api.living_graphs == simulated.graphs.count == simulated.graphs.size_bytes == 0
    chunks, _ = scattered([(5, 1)], blocks=BLOCKS)
    assert simulated.forward(chunks).shape == (1, 256)
    assert simulated.api.replays == 0


# The handler.


def test_a_worker_may_ask_for_none_and_the_cpu_has_none(tmp_path):
    for given, option in ((True, None), (True, True), (True, False), (False, None)):
        handler = GenerationHandler(save(tmp_path), cuda_graphs=given, device="cpu", kv_cache_bytes=1 << 20)
        handler.configure(WorkerOptions(cuda_graphs=option))
        handler.load()
        handler.prepare()
        assert handler._graphs is None
        handler.close()
