"""The kernel for decode rows, on a real device, against each row by itself; and the model with it against the model without. Skipped without CUDA."""

import pytest
import torch

from gpuworker.generation import decode_kernels
from gpuworker.generation.model import PagedModel
from tests.paged_kernel_cases import CASES, compare
from tests.test_generation_families import generate, make_scheduler
from tests.test_paged_attention import batch_of, scattered
from tests.tiny_decoders import answers, decoder, requests

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing in tests/gpu can run")]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
def test_as_each_row_by_itself(case, dtype, tolerance):
    compare(pytest.importorskip("gpuworker.generation.paged_kernel").paged_decode, "cuda", dtype, tolerance, **case)


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "cohere2", "gpt2", "deepseek_v3"])
def test_families_as_on_the_cpu(name, has_kernel, monkeypatch):
    if not has_kernel:
        monkeypatch.setattr(decode_kernels, "decode_kernel", lambda layer: None)
    paged = PagedModel(decoder(name), blocks=13, device="cuda")
    assert generate(paged, make_scheduler(13), requests()) == answers(name)


@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_decode_step_waits_for_nothing(has_kernel, monkeypatch):
    if not has_kernel:
        monkeypatch.setattr(decode_kernels, "decode_kernel", lambda layer: None)
    paged = PagedModel(decoder("llama"), blocks=60, device="cuda")
    chunks, _ = scattered([(20, 1), (32, 1), (100, 1)], blocks=60)
    batch = batch_of(chunks, 4, 8)
    batch = type(batch)(*(field.cuda() for field in batch))
    expected = paged.decode(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = paged.decode(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found, expected)
