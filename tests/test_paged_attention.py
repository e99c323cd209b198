"""Attention over blocks against attention over each sequence by itself."""

import random
from types import SimpleNamespace

import pytest
import torch

from gpuworker.generation import decode_kernels, packing
from gpuworker.generation.attention import UnsupportedModel, paged_attention
from gpuworker.generation.cache import KVCache
from gpuworker.generation.model import PagedModel
from gpuworker.generation.packing import pack
from gpuworker.generation.sequence import Chunk, Sequence
from gpuworker.generation.step import DecodeBatch
from tests.tiny_decoders import decoder

HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 6, 2, 16, 16
MODULE = SimpleNamespace(layer_idx=0, config=SimpleNamespace(model_type="toy"))


@pytest.fixture
def copied(monkeypatch):
    """As where there is no kernel: blocks are copied together."""
    monkeypatch.setattr(decode_kernels, "decode_kernel", lambda layer: None)


@pytest.fixture(params=["kernel", "copied"])
def either(request):
    if request.param == "copied":
        request.getfixturevalue("copied")


def chunk_of(start, count, blocks, is_last=True):
    """A sequence in these blocks, of which `start` tokens have been computed."""
    known = start + count + (not is_last)
    sequence = Sequence(0, range(known), max_tokens=1)
    sequence.computed, sequence.blocks = start, blocks
    return Chunk(sequence, start, count)


def scattered(spans, seed=0, blocks=400):
    """Chunks of (start, count), each in blocks of its own, which are nowhere near one another; and all that are left."""
    numbers = list(range(1, blocks))
    random.Random(seed).shuffle(numbers)
    chunks = [chunk_of(start, count, [numbers.pop() for _ in range(-(-(start + count) // 16))]) for start, count in spans]
    return chunks, numbers


def filled(width=WIDTH, value_width=VALUE_WIDTH, blocks=400, dtype=torch.float32, seed=1):
    """A cache whose layer 0 is full of random numbers."""
    torch.manual_seed(seed)
    cache = KVCache(blocks, dtype=dtype)
    token = [torch.zeros(1, KEY_HEADS, 1, each, dtype=dtype) for each in (width, value_width)]
    cache.layer(0, *token).blocks.normal_()
    return cache


def random_qkv(tokens, width=WIDTH, value_width=VALUE_WIDTH, dtype=torch.float32):
    return [
        torch.randn(1, tokens, heads, each, dtype=dtype).transpose(1, 2)
        for heads, each in ((HEADS, width), (KEY_HEADS, width), (KEY_HEADS, value_width))
    ]


def by_itself(cache, chunk, query, window=None, scaling=None):
    """query [heads, count, width] of a chunk whose keys and values have been written. -> [count, heads, value width]."""
    end = chunk.start + chunk.count
    slots = torch.tensor([chunk.sequence.blocks[at // 16] * 16 + at % 16 for at in range(end)])
    layer = cache.layers[0]
    both = layer.blocks.flatten(0, 1)[slots].double()
    keys, values = both[..., : layer.key_width], both[..., layer.key_width :]
    group = query.shape[0] // keys.shape[1]
    scores = torch.einsum("hqd,khd->hqk", query.double(), keys.repeat_interleave(group, 1)) * (scaling or query.shape[-1] ** -0.5)
    at, seen = torch.arange(chunk.start, end)[:, None], torch.arange(end)
    hidden = (seen > at) | (seen <= at - (window or 1 << 30))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))


def assert_right(found, packed, cache, chunks, query, window=None, scaling=None, tolerance=1e-5):
    """found [1, tokens, heads, value width]. Decode rows are found by their lengths: packing sorts them."""
    parts = [(group.first + row, chunk) for group in packed.step.groups for row, chunk in _rows_of(group, chunks)]
    parts += [
        (prefill.first, next(one for one in chunks if (one.start, one.count) == (prefill.start, prefill.end - prefill.first)))
        for prefill in packed.step.prefills
    ]
    assert sum(chunk.count for _, chunk in parts) == found.shape[1]
    for first, chunk in parts:
        own = slice(first, first + chunk.count)
        expected = by_itself(cache, chunk, query[0, :, own], window, scaling)
        torch.testing.assert_close(found[0, own].double(), expected, rtol=tolerance, atol=tolerance)


def _rows_of(group, chunks):
    for row, (length, blocks) in enumerate(zip(group.lengths.tolist(), group.table.tolist(), strict=True)):
        yield row, next(one for one in chunks if one.count == 1 and one.start + 1 == length and one.sequence.blocks[0] == blocks[0])


SPANS = [
    [(40, 1)],
    [(0, 1), (15, 1), (16, 1), (31, 1), (700, 1), (703, 1)],
    [(0, 50)],
    [(0, 5), (37, 33), (600, 40)],
    [(5, 1), (1000, 1), (250, 1), (0, 20), (640, 7)],
]


@pytest.mark.parametrize("window", [None, 1, 16, 24, 600])
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_as_each_by_itself(spans, window, either):
    """Windows that hide whole tiles of 512 keys among them, for which a softmax must not divide nothing by nothing."""
    cache = filled()
    chunks, _ = scattered(spans)
    packed = pack(chunks, cache)
    query, key, value = random_qkv(packed.ids.numel())
    found, _ = paged_attention(MODULE, query, key, value, None, scaling=0.3, step=packed.step, sliding_window=window)
    assert_right(found, packed, cache, chunks, query, window, 0.3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("value_width", [16, 24])
def test_dtypes_and_values_of_another_width(dtype, tolerance, value_width, either):
    cache = filled(value_width=value_width, dtype=dtype)
    chunks, _ = scattered([(30, 1), (100, 1), (0, 20), (64, 9)])
    packed = pack(chunks, cache)
    query, key, value = random_qkv(packed.ids.numel(), value_width=value_width, dtype=dtype)
    found, _ = paged_attention(MODULE, query, key, value, None, step=packed.step)
    assert found.dtype == dtype
    assert_right(found, packed, cache, chunks, query, tolerance=tolerance)


def test_it_writes_to_its_own_slots_only(copied):
    cache = filled()
    chunks, _ = scattered([(15, 1), (16, 1), (47, 1), (0, 20), (64, 16)])
    packed = pack(chunks, cache)
    _, key, value = random_qkv(packed.ids.numel())
    layer = cache.layers[0]
    before = layer.blocks.clone()
    paged_attention(MODULE, torch.randn(1, HEADS, packed.ids.numel(), WIDTH), key, value, None, step=packed.step)
    own = {chunk.sequence.blocks[at // 16] * 16 + at % 16 for chunk in chunks for at in range(chunk.start, chunk.start + chunk.count)}
    assert sorted(packed.step.slots.tolist()) == sorted(own)
    changed = (layer.blocks != before).flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist()
    begun = {chunk.sequence.blocks[(chunk.start + chunk.count - 1) // 16] for chunk in chunks}
    assert own <= set(changed)
    assert {slot // 16 for slot in changed} <= {slot // 16 for slot in own}
    assert {slot // 16 for slot in set(changed) - own} <= begun  # the rest of a block that was begun is zero
    assert not layer.blocks.flatten(0, 1)[sorted(set(changed) - own)].any()


def test_it_writes_to_its_own_slots_only_where_blocks_are_read_in_place():
    cache = filled()
    chunks, _ = scattered([(15, 1), (16, 1), (47, 1), (0, 20), (64, 16)])
    packed = pack(chunks, cache)
    query, key, value = random_qkv(packed.ids.numel())
    layer = cache.layers[0]
    before = layer.blocks.clone()
    paged_attention(MODULE, query, key, value, None, step=packed.step)
    written = layer.blocks.flatten(0, 1)[packed.step.slots]
    assert torch.equal(written, torch.cat((key[0], value[0]), -1).transpose(0, 1))
    before.flatten(0, 1)[packed.step.slots] = written
    assert torch.equal(layer.blocks, before)


def test_rows_are_grouped_by_length_and_logits_are_not(copied):
    chunks, _ = scattered([(10, 1), (500, 1), (12, 1), (490, 1), (140, 1), (3, 9)])
    packed = pack(chunks, filled())
    assert [group.table.shape for group in packed.step.groups] == [(2, 32), (1, 9), (2, 1)]
    assert packed.positions.tolist() == [500, 490, 140, 12, 10, *range(3, 12)]
    assert packed.positions[packed.keep].tolist() == [10, 500, 12, 490, 140, 11]


def test_rows_are_one_group_where_blocks_are_read_in_place():
    chunks, _ = scattered([(10, 1), (500, 1), (140, 1)])
    packed = pack(chunks, filled())
    assert [group.table.shape for group in packed.step.groups] == [(3, 32)]


def test_only_the_last_chunks_of_sequences_have_logits():
    numbers = list(range(1, 40))
    chunks = [chunk_of(40, 1, numbers[:3]), chunk_of(20, 1, numbers[3:6], is_last=False), chunk_of(0, 30, numbers[6:8], is_last=False)]
    packed = pack(chunks, filled())
    assert packed.positions[packed.keep].tolist() == [40]
    assert pack(chunks[1:], filled()).keep.tolist() == []
    assert pack(chunks[:1], filled()).keep == 0


def test_a_row_reads_no_memory_of_others(copied):
    """The table of a short row is filled up with its own first block, and what a block's last owner has left is cleared when the block is begun."""
    cache = filled()
    chunks, _ = scattered([(16, 1), (100, 1)])
    packed = pack(chunks, cache)
    assert packed.step.fresh.tolist() == [chunks[0].sequence.blocks[1]]
    chunks, _ = scattered([(17, 1), (81, 1)])
    packed = pack(chunks, cache)
    assert packed.step.fresh is None
    (group,) = packed.step.groups
    assert group.table.tolist() == [chunks[1].sequence.blocks, chunks[0].sequence.blocks + chunks[0].sequence.blocks[:1] * 4]


def batch_of(chunks, rows, width):
    """A static batch, with padding."""
    padding = rows - len(chunks)
    positions = [chunk.start for chunk in chunks]
    tables = [(chunk.sequence.blocks + chunk.sequence.blocks[:1] * width)[:width] for chunk in chunks]
    slots = [chunk.sequence.blocks[at // 16] * 16 + at % 16 for chunk, at in zip(chunks, positions, strict=True)]
    fresh = [chunk.sequence.blocks[at // 16] if at % 16 == 0 else 0 for chunk, at in zip(chunks, positions, strict=True)]
    fields = (
        [chunk.sequence.tokens[chunk.start] for chunk in chunks] + [0] * padding,
        positions + [0] * padding,
        slots + [0] * padding,
        tables + [[0] * width] * padding,
        [at + 1 for at in positions] + [1] * padding,
        fresh + [0] * padding,
    )
    return DecodeBatch(*map(torch.tensor, fields))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "cohere2"])
@pytest.mark.parametrize(("rows", "width"), [(4, 8), (8, 32)])
def test_a_padded_batch_is_its_rows(name, rows, width, copied):
    """What CUDA graphs replay: padding changes no logits, and nothing in blocks other than its own (vllm 43810, flashinfer 2883)."""
    paged = PagedModel(decoder(name), blocks=60)
    chunks, _ = scattered([(20, 1), (32, 1), (100, 1)], blocks=60)
    with torch.inference_mode():
        for layer in paged.cache.layers.values():
            layer.blocks.normal_(generator=torch.Generator().manual_seed(5))
        start = {index: layer.blocks.clone() for index, layer in paged.cache.layers.items()}
        expected = paged.forward(chunks)
        written = {index: layer.blocks.clone() for index, layer in paged.cache.layers.items()}
        for index, layer in paged.cache.layers.items():
            layer.blocks.copy_(start[index])
        found = paged.decode(batch_of(chunks, rows, width))
    assert found.shape[0] == rows
    torch.testing.assert_close(found[:3], expected, rtol=1e-4, atol=1e-4)
    for index, layer in paged.cache.layers.items():
        torch.testing.assert_close(layer.blocks[1:], written[index][1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(6)}, "sinks"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"indices": torch.zeros(1)}, "sparse"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_what_it_does_not_compute_it_refuses(given, what):
    chunks, _ = scattered([(4, 1)])
    cache = filled()
    query, key, value = random_qkv(1)
    with pytest.raises(UnsupportedModel, match=f"toy .*{what}"):
        paged_attention(MODULE, query, key, value, None, step=pack(chunks, cache).step, **given)
    with pytest.raises(UnsupportedModel, match=r"toy .*mask"):
        paged_attention(MODULE, query, key, value, torch.zeros(1), step=pack(chunks, cache).step)
    with pytest.raises(UnsupportedModel, match="toy: no step"):
        paged_attention(MODULE, query, key, value, None)


def test_a_cache_is_of_one_kind():
    cache = KVCache(4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="float32"):
        cache.layer(0, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    with pytest.raises(ValueError, match="at least 1"):
        KVCache(0, dtype=torch.float32)
    layer = cache.layer(3, torch.zeros(1, 2, 5, 8, dtype=torch.bfloat16), torch.zeros(1, 2, 5, 12, dtype=torch.bfloat16))
    assert layer.blocks.shape == (4, 16, 2, 20)
    assert cache.size_bytes == 4 * cache.token_bytes * 16 == 4 * 16 * 2 * 20 * 2


def test_groups_waste_little():
    widths = sorted((random.Random(3).randint(1, 64) for _ in range(64)), reverse=True)
    groups = packing._group(widths, 6)
    assert [row for first, end in groups for row in range(first, end)] == list(range(64))
    assert all(sum(widths[first] - width for width in widths[first:end]) <= 6 for first, end in groups)
    assert packing._group(widths, None) == [(0, 64)]
    assert packing._group([], 6) == packing._group([], None) == []
