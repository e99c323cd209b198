"""Decode steps as graphs on a CUDA that is simulated (tests/fake_cuda.py), with models of transformers, against the same steps without graphs."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from gpuworker.generation import decode_kernels
from gpuworker.generation.graphs import row_buckets, width_buckets
from gpuworker.generation.model import PagedModel
from tests.simulated_decode import (  # noqa: F401 (fixtures)
    BLOCKS,
    ROWS,
    SOME,
    assert_same,
    drive,
    eagerly,
    make_fixture,
    make_scheduler,
    put,
    seed_fixture,
    traffic,
    warnings_fixture,
    without_kernel_fixture,
)  # fmt: skip
from tests.test_paged_attention import chunk_of, scattered
from tests.tiny_decoders import decoder

LIMIT_BYTES = 700_000


def paged_kernel(query, blocks, key_width, table, lengths, scale=None, window=None):
    """What paged_kernel.py computes: what is not seen is not read."""
    rows, heads, _ = query.shape
    both = blocks[table].flatten(1, 2).transpose(1, 2)
    at, ends = torch.arange(both.shape[2])[None], lengths[:, None]
    is_seen = at < ends
    if window is not None:
        is_seen = is_seen & (at >= ends - window)
    both = both.masked_fill(~is_seen[:, None, :, None], 0)
    mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, float("-inf"))[:, None, None]
    queries = query.reshape(rows, both.shape[1], -1, query.shape[-1])
    found = F.scaled_dot_product_attention(queries, both[..., :key_width], both[..., key_width:], attn_mask=mask, scale=scale)
    return found.reshape(rows, heads, -1)


@pytest.fixture
def with_kernel(monkeypatch):
    monkeypatch.setattr(decode_kernels, "decode_kernel", lambda layer: paged_kernel)


def test_buckets():
    assert row_buckets(1) == [1]
    assert row_buckets(6) == [1, 2, 4, 6]
    assert row_buckets(8) == [1, 2, 4, 8]
    assert row_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert row_buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert width_buckets(5) == [5]
    assert width_buckets(8) == [8]
    assert width_buckets(9) == [8, 9]
    assert width_buckets(64) == [8, 16, 32, 64]


def test_the_traffic_has_batches_of_every_size_and_crosses_every_bucket():
    scheduler = make_scheduler()
    shapes, generated, _ = drive(PagedModel(decoder("llama", num_hidden_layers=1), blocks=BLOCKS).forward, scheduler, *traffic())
    assert scheduler.stats().preemptions > 0
    assert {rows for rows, _ in shapes} >= set(range(1, ROWS + 1))
    assert {(width > 8) + (width > 16) for _, width in shapes} == {0, 1, 2}
    assert len({token for one in generated for token in one}) > 30, "such answers prove nothing"


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_as_without_graphs(make, name, seed, warnings):
    """Joins, leaves, preemptions, and lengths that grow past each bucket (vllm 13418, aprender PR 2030)."""
    simulated = make(name, seed)
    simulated.capture()
    assert simulated.graphs.count == len(row_buckets(ROWS)) * 3
    found = drive(simulated.forward, make_scheduler(), *traffic())
    assert_same(found, eagerly(name))
    assert (simulated.graphs.hits, simulated.graphs.misses) == (len(found[0]), 0)
    assert simulated.api.captures == simulated.graphs.count
    assert simulated.graphs.reason is None
    assert not warnings()


def test_as_without_graphs_where_a_kernel_reads_lengths(make, seed, with_kernel):
    """One width for all; behind a row's end the table holds what another step has left."""
    simulated = make("mistral-window", seed)
    simulated.capture()
    assert simulated.graphs.count == len(row_buckets(ROWS))
    found = drive(simulated.forward, make_scheduler(), *traffic())
    assert_same(found, eagerly("mistral-window"))
    assert (simulated.graphs.hits, simulated.graphs.misses) == (len(found[0]), 0)


def test_captured_between_steps(make, seed):
    simulated = make("llama", seed)
    found = drive(simulated.forward, make_scheduler(), *traffic())
    assert_same(found, eagerly("llama"))
    assert simulated.graphs.hits > 5
    assert simulated.graphs.misses > 5
    assert simulated.graphs.hits + simulated.graphs.misses == len(found[0])
    assert simulated.api.captures == simulated.graphs.count > 1


def test_the_same_bits_again(make):
    first, second = (drive(make(seed=seed).forward, make_scheduler(), *traffic(SOME)) for seed in (1, 2))
    assert first[:2] == second[:2]
    assert all(torch.equal(one, other) for one, other in zip(first[2], second[2], strict=True))


def test_graphs_make_room_for_others(make):
    simulated = make(limit_bytes=LIMIT_BYTES)
    assert_same(drive(simulated.forward, make_scheduler(), *traffic(SOME)), eagerly("llama", SOME))
    assert 0 < simulated.graphs.count < simulated.api.captures
    assert 0 < simulated.graphs.size_bytes <= LIMIT_BYTES


@pytest.mark.parametrize("has_kernel", [False, True])
def test_padding_and_captures_write_to_nobodys_blocks(make, seed, has_kernel, monkeypatch):
    """vllm 43810, xllm PR 1939, sglang PR 24743, flashinfer 2883."""
    if has_kernel:
        monkeypatch.setattr(decode_kernels, "decode_kernel", lambda layer: paged_kernel)
    simulated = make(seed=seed)
    before = simulated.noise()
    simulated.capture()
    for one, other in zip(simulated.copy(), before, strict=True):
        assert torch.equal(one[1:], other[1:])
    chunks, _ = scattered([(20, 1), (32, 1), (100, 1)], blocks=BLOCKS)
    expected = PagedModel(decoder("llama", num_hidden_layers=1), blocks=BLOCKS)
    put(before, expected)
    torch.testing.assert_close(simulated.forward(chunks), expected.forward(chunks), rtol=1e-4, atol=1e-4)
    assert simulated.graphs.hits == 1
    written = [(chunk.sequence.blocks[chunk.start // 16], chunk.start % 16) for chunk in chunks]
    fresh = chunks[1].sequence.blocks[2]
    for one, other, wanted in zip(simulated.copy(), before, expected.cache.layers.values(), strict=True):
        for block, offset in written:
            torch.testing.assert_close(one[block, offset], wanted.blocks[block, offset], rtol=1e-4, atol=1e-4)
            other[block, offset] = one[block, offset]
        assert not one[fresh, 1:].any()
        other[fresh] = one[fresh]
        assert torch.equal(one[1:], other[1:])


def test_a_capture_does_not_run_the_step_that_was_there_before(make):
    simulated = make()
    simulated.capture(8)
    chunks, _ = scattered([(200, 1), (32, 1), (100, 1)], blocks=BLOCKS)
    simulated.forward(chunks)
    assert simulated.graphs.hits == 1
    before = simulated.noise()
    simulated.capture()
    assert simulated.graphs.count == 15
    for one, other in zip(simulated.copy(), before, strict=True):
        assert torch.equal(one[1:], other[1:])


@pytest.mark.parametrize("left", [float("nan"), float("inf")])
def test_what_others_have_left_harms_nobody(make, left):
    """In blocks that are nobody's, in the one that padding writes to, and in those of the step before, whose numbers are still in the table."""
    simulated = make()
    simulated.capture()
    with torch.inference_mode():
        for blocks in simulated.layers:
            blocks.fill_(left)
    assert_same(drive(simulated.forward, make_scheduler(), *traffic()), eagerly("llama"))


def test_the_table_of_the_step_before_is_not_read(make):
    simulated = make()
    simulated.capture()
    long, left = scattered([(100, 1)], blocks=BLOCKS)
    simulated.forward(long)
    noise = simulated.noise()
    for values in noise:
        values[long[0].sequence.blocks] = float("nan")
    put(noise, simulated.paged)
    short = [chunk_of(20, 1, left[:2])]
    found = simulated.forward(short)
    assert simulated.graphs.hits == 2
    paged = PagedModel(decoder("llama", num_hidden_layers=1), blocks=BLOCKS)
    put(noise, paged)
    torch.testing.assert_close(found, paged.forward(short), rtol=1e-4, atol=1e-4)


def test_rows_that_get_no_logits(make):
    """A prompt of which only one token fits into a step."""
    simulated = make()
    noise = simulated.noise()
    simulated.capture()
    paged = PagedModel(decoder("llama", num_hidden_layers=1), blocks=BLOCKS)
    put(noise, paged)
    for flags in ([True, False, True], [False, True, True], [False, False, False]):
        chunks = [chunk_of(start, 1, [first, first + 1], is_last) for start, first, is_last in zip((20, 31, 16), (5, 9, 13), flags, strict=True)]
        expected = paged.forward(chunks)
        found = simulated.forward(chunks)
        assert found.shape == expected.shape == (sum(flags), 256)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert simulated.graphs.hits == 3


def test_steps_that_no_bucket_holds_are_eager(make):
    simulated = make(max_rows=2, max_tokens=64)
    simulated.capture()
    many, _ = scattered([(5, 1), (6, 1), (7, 1)], blocks=BLOCKS)
    long, _ = scattered([(64, 1)], blocks=BLOCKS)
    prompt, _ = scattered([(5, 1), (0, 6)], blocks=BLOCKS)
    for chunks in (many, long, prompt):
        assert len(simulated.forward(chunks)) == len(chunks)
    assert simulated.graphs.hits == simulated.graphs.misses == 0
