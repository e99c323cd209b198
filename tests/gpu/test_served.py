"""TensorHandlers on a real device, through a worker."""

import numpy as np
import pytest
import torch

import gpuworker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing in tests/gpu can run")]

TOKENS = {"x": gpuworker.TensorSpec("float32", ("tokens",), mask="mask")}


class Sum(gpuworker.TensorHandler):
    inputs = TOKENS
    outputs = {"total": gpuworker.TensorSpec("float32", ()), "twice": gpuworker.TensorSpec("float32", ("tokens",))}
    max_extents = {"tokens": 64}
    device = "cuda"

    def forward(self, batch):
        return {"total": (batch["x"] * batch["mask"]).sum(1), "twice": batch["x"] * 2}


class NeedsMuchMemory(Sum):
    """More than the device has, for batches of more than eight rows."""

    largest = 0

    def forward(self, batch):
        rows = batch["x"].shape[0]
        if rows > 8:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        type(self).largest = max(type(self).largest, rows)
        return super().forward(batch)


def check_all(client, count=200):
    generator = np.random.default_rng(0)
    requests = [{"x": generator.standard_normal(generator.integers(1, 65)).astype(np.float32)} for _ in range(count)]
    pending = [client.enqueue(request) for request in requests]
    for request, waiting in zip(requests, pending, strict=True):
        answer = waiting.result(60)
        np.testing.assert_allclose(answer["total"], request["x"].sum(), rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(answer["twice"], request["x"] * 2)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("graphs", [False, True])
def test_answers_are_right_at_every_depth(in_process, depth, graphs):
    class Handler(Sum):
        pipeline_depth, cuda_graphs = depth, graphs

    worker = in_process(Handler, max_batch_size=16, max_wait_ms=1, capacity=256, client_quota=256)
    with gpuworker.connect(worker.name) as client:
        for _ in range(3):
            check_all(client)


def test_a_batch_that_does_not_fit_is_halved(in_process):
    worker = in_process(NeedsMuchMemory, max_batch_size=16, max_wait_ms=20, capacity=256, client_quota=256)
    with gpuworker.connect(worker.name) as client:
        check_all(client, 64)
        check_all(client, 64)
    assert 1 <= NeedsMuchMemory.largest <= 8


def test_bfloat16_stays_inside(in_process):
    class Half(gpuworker.TensorHandler):
        inputs = gpuworker.TensorSpec("float32", (8,))
        outputs = gpuworker.TensorSpec("float32", (8,))
        device, dtype = "cuda", "bfloat16"

        def forward(self, batch):
            assert batch.dtype is torch.bfloat16
            return batch * 2

    worker = in_process(Half, max_batch_size=8, max_wait_ms=1)
    with gpuworker.connect(worker.name) as client:
        for k in range(50):
            request = np.full(8, k, np.float32)
            answer = client.submit(request)
            assert answer.dtype == np.float32
            np.testing.assert_allclose(answer, request * 2, rtol=1e-2)


def test_a_handler_that_syncs_is_served_eagerly(in_process):
    class Syncs(Sum):
        def forward(self, batch):
            batch["x"].max().item()
            return super().forward(batch)

    worker = in_process(Syncs, max_batch_size=16, max_wait_ms=1, capacity=256, client_quota=256)
    with gpuworker.connect(worker.name) as client:
        for _ in range(3):
            check_all(client)
