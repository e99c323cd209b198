"""Decode steps as graphs on a real device, against the same steps without. Skipped without CUDA. What graphs gain is measured by bench/gpu_generation.py."""

import logging

import pytest
import torch

from gpuworker.generation import decode_kernels
from gpuworker.generation.graphs import DecodeGraphs, row_buckets
from gpuworker.generation.handler import GenerationHandler
from gpuworker.generation.model import PagedModel
from gpuworker.worker.options import WorkerOptions
from tests.simulated_decode import BLOCKS, ROWS, TOKENS, drive, make_scheduler, traffic, waits
from tests.test_generation_families import generate
from tests.test_generation_families import make_scheduler as scheduler_for
from tests.test_paged_attention import scattered
from tests.tiny_decoders import answers, decoder, requests
from tests.tiny_llama import save

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing in tests/gpu can run")]


@pytest.fixture(params=[True, False], ids=["kernel", "gather"])
def has_kernel(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(decode_kernels, "decode_kernel", lambda layer: None)
    else:
        pytest.importorskip("triton")
    return request.param


@pytest.fixture
def make():
    made = []

    def make(name, dtype=None, **options):
        paged = PagedModel(decoder(name), blocks=BLOCKS, device="cuda", dtype=dtype)
        made.append((DecodeGraphs(paged, **{"max_rows": ROWS, "max_tokens": TOKENS, **options}), paged))
        return made[-1]

    yield make
    for graphs, paged in made:
        graphs.close()
        paged.close()


def copied(forward):
    """The logits of a step hold until the next."""
    return lambda chunks: forward(chunks).clone()


def capture_all(graphs):
    while graphs.capture_next():
        pass


@pytest.mark.parametrize("name", ["llama", "mistral-window", "cohere2", "gpt2", "deepseek_v3"])
def test_families_as_on_the_cpu(make, name, has_kernel):
    """A family that cannot be captured is as right, and only slower."""
    graphs, _ = make(name)
    capture_all(graphs)
    assert generate(graphs, scheduler_for(13), requests()) == answers(name)
    if name in ("llama", "mistral-window", "cohere2", "gpt2"):
        assert graphs.reason is None
        assert graphs.hits > 0 == graphs.misses


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_as_without_graphs(make, name, has_kernel, captured):
    graphs, paged = make(name)
    if captured:
        capture_all(graphs)
        assert graphs.count == len(row_buckets(ROWS)) * (1 if has_kernel else 3)
    expected = drive(copied(paged.forward), make_scheduler(), *traffic())
    found = drive(copied(graphs.forward), make_scheduler(), *traffic())
    assert found[:2] == expected[:2]
    for one, other in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert graphs.reason is None
    assert graphs.hits + graphs.misses == len(found[0])
    assert graphs.hits > 0
    assert not captured or graphs.misses == 0


def test_bfloat16_runs_and_repeats_itself(make, has_kernel):
    graphs, _ = make("llama", torch.bfloat16)
    capture_all(graphs)
    first = drive(copied(graphs.forward), make_scheduler(), *traffic())
    second = drive(copied(graphs.forward), make_scheduler(), *traffic())
    assert first[:2] == second[:2]
    assert all(torch.equal(one, other) for one, other in zip(first[2], second[2], strict=True))
    assert graphs.reason is None


def test_padding_and_captures_write_to_nobodys_blocks(make, has_kernel):
    graphs, paged = make("llama")
    layers = [layer.blocks for layer in paged.cache.layers.values()]
    with torch.inference_mode():
        for blocks in layers:
            blocks.normal_()
    before = [blocks.clone() for blocks in layers]
    capture_all(graphs)
    for one, other in zip(layers, before, strict=True):
        assert torch.equal(one[1:], other[1:])
    chunks, _ = scattered([(20, 1), (32, 1), (100, 1)], blocks=BLOCKS)
    found = graphs.forward(chunks).clone()
    found_again = graphs.forward(chunks).clone()
    assert graphs.hits == 2
    torch.testing.assert_close(found, paged.forward(chunks), rtol=1e-3, atol=1e-3)
    assert torch.equal(found, found_again)
    own = [chunk.sequence.blocks[chunk.start // 16] for chunk in chunks]
    others = [block for block in range(1, BLOCKS) if block not in own]
    for one, other in zip(layers, before, strict=True):
        assert torch.equal(one[others], other[others])
        for chunk, block in zip(chunks, own, strict=True):
            rest = [offset for offset in range(16) if offset != chunk.start % 16]
            assert torch.equal(one[block, rest], other[block, rest]) or (chunk.start % 16 == 0 and not one[block, rest].any())


def test_a_replay_waits_for_nothing(make, has_kernel):
    graphs, _ = make("llama")
    chunks, _ = scattered([(20, 1), (32, 1), (100, 1)], blocks=BLOCKS)
    capture_all(graphs)
    expected = graphs.forward(chunks).clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = graphs.forward(chunks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


def test_what_cannot_be_captured_is_eager_for_good_and_said_once(make, caplog):
    caplog.set_level(logging.WARNING, logger="gpuworker")
    graphs, paged = make("llama")
    expected = drive(copied(paged.forward), make_scheduler(), *traffic())
    decode = paged.decode

    def waits_for_it(batch):
        return waits(decode(batch))

    paged.decode = waits_for_it
    capture_all(graphs)
    assert "cannot be captured" in graphs.reason
    assert drive(copied(graphs.forward), make_scheduler(), *traffic())[:2] == expected[:2]
    assert graphs.hits == graphs.count == 0
    assert len([record for record in caplog.records if "without CUDA graphs" in record.getMessage()]) == 1


@pytest.mark.parametrize(("given", "option", "has_graphs"), [(True, None, True), (True, False, False), (False, None, False), (False, True, True)])
def test_the_handler_has_graphs_unless_told_otherwise(tmp_path, given, option, has_graphs):
    handler = GenerationHandler(save(tmp_path), cuda_graphs=given, device="cuda", kv_cache_bytes=1 << 22)
    handler.configure(WorkerOptions(cuda_graphs=option))
    handler.load()
    handler.prepare()
    assert (handler._graphs is not None) == has_graphs
    if has_graphs:
        assert handler._graphs.reason is None
        assert handler._graphs.count == 1
    handler.close()
