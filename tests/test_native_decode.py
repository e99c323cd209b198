"""The CPU's kernel for decode rows (native/paged_decode.c): against each row by itself, for many shapes, dtypes, kinds of processors and numbers of threads."""

import random

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from gpuworker._native import lib
from gpuworker.generation import native_decode
from gpuworker.generation.cache import KVCache, LayerCache
from gpuworker.generation.native_decode import can_decode, paged_decode, paged_write
from tests.paged_kernel_cases import CASES, compare

DTYPES = [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_as_each_row_by_itself(case, dtype, tolerance, threads):
    compare(paged_decode, "cpu", dtype, tolerance, **case)


def rows_of(choice, dtype):
    """Rows in shuffled blocks, and what the kernel is told of them."""
    key_heads, group, block_tokens = choice.choice([1, 2, 3, 8]), choice.choice([1, 2, 3, 4, 5, 9]), choice.choice([16, 16, 5, 24])
    widths = choice.choice([(8, 8), (16, 16), (24, 40), (32, 32), (64, 64), (72, 72), (80, 80), (96, 64), (128, 128), (192, 128), (256, 256)])
    lengths = [choice.randint(1, 300) for _ in range(choice.randint(1, 6))]
    width = max(-(-length // block_tokens) for length in lengths)
    numbers = torch.randperm(width * len(lengths) + 3)
    table = numbers[: width * len(lengths)].view(len(lengths), width)
    blocks = torch.randn(len(numbers), block_tokens, key_heads, sum(widths)).to(dtype)
    query = torch.randn(key_heads * group, len(lengths), widths[0]).to(dtype).transpose(0, 1)
    return query, LayerCache(blocks, widths[0]), table, torch.tensor(lengths), choice.choice([None, None, 1, 7, 16, 100])


def gathered(query, layer, table, lengths, window):
    """Blocks copied together, and torch's attention in float32."""
    rows, heads, width = query.shape
    keys, values = (part.float() for part in layer.read(table.flatten(), rows))
    at = torch.arange(keys.shape[2])
    seen = (at < lengths[:, None]) & (at >= (0 if window is None else lengths[:, None] - window))
    queries = query.float().reshape(rows, keys.shape[1], -1, width)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen[:, None, None]).reshape(rows, heads, -1)


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_random_shapes_against_blocks_copied_together(seed, dtype, tolerance, lanes, monkeypatch):
    monkeypatch.setattr(native_decode, "MOST_LANES", lanes)
    torch.manual_seed(seed)
    query, layer, table, lengths, window = rows_of(random.Random(seed), dtype)
    found = paged_decode(query, layer.blocks, layer.key_width, table, lengths, None, window)
    torch.testing.assert_close(found.float(), gathered(query, layer, table, lengths, window), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("key_heads", "group", "width"), [(300, 3, 8), (2, 700, 8), (40, 5, 64), (1, 71, 64), (3, 2, 512)])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_more_heads_than_are_computed_at_once(key_heads, group, width, dtype, tolerance):
    blocks, table, lengths = torch.randn(5, 16, key_heads, 2 * width).to(dtype), torch.tensor([[1, 3, 0], [4, 2, 4]]), torch.tensor([35, 20])
    query = torch.randn(2, key_heads * group, width).to(dtype)
    found = paged_decode(query, blocks, width, table, lengths)
    torch.testing.assert_close(found.float(), gathered(query, LayerCache(blocks, width), table, lengths, None), rtol=tolerance, atol=tolerance)


def test_scores_of_any_size_and_those_that_are_no_numbers():
    """Large scores do not overflow, one that is NaN shows in its own row and head only, and an infinite one makes NaN, as torch has it."""
    torch.manual_seed(0)
    blocks = torch.randn(9, 16, 2, 64)
    blocks[..., :32] *= 300
    blocks[3, 5, 1, 7] = float("nan")
    query, table, lengths = torch.randn(3, 4, 32) * 10, torch.arange(9).view(3, 3), torch.tensor([40, 33, 48])
    found, layer = paged_decode(query, blocks, 32, table, lengths), LayerCache(blocks, 32)
    assert found.isnan().flatten(1).all(1).tolist() == [False] * 3
    assert found.isnan().all(2).nonzero().tolist() == [[1, 2], [1, 3]]
    torch.testing.assert_close(found, gathered(query, layer, table, lengths, None), equal_nan=True, rtol=1e-3, atol=1e-3)
    blocks[0, 0] = float("inf")
    assert paged_decode(query.abs(), blocks, 32, table, lengths)[0].isnan().all()


def test_bfloat16_is_rounded_to_the_nearest_even():
    blocks = torch.randn(1, 16, 1, 64).bfloat16()
    bits = torch.randint(-(2**15), 2**15, (16, 32), dtype=torch.int16)
    blocks[0, :, 0, 32:] = bits.view(torch.bfloat16).nan_to_num(0, 0, 0)
    query, one = torch.zeros(1, 1, 32, dtype=torch.bfloat16), torch.tensor([2])
    found = paged_decode(query, blocks, 32, torch.zeros(1, 1, dtype=torch.int64), one)  # the mean of two values: exact in float32
    assert torch.equal(found[0, 0], ((blocks[0, 0, 0, 32:].float() + blocks[0, 1, 0, 32:].float()) / 2).bfloat16())


def test_what_is_written_is_read_wherever_it_came_from():
    torch.manual_seed(0)
    for dtype, _ in DTYPES:
        layer = KVCache(6, dtype=dtype).layer(0, torch.zeros(1, 3, 1, 16, dtype=dtype), torch.zeros(1, 3, 1, 24, dtype=dtype))
        for key in (torch.randn(5, 3, 16).to(dtype).transpose(0, 1), torch.randn(3, 16, 5).to(dtype).transpose(1, 2)):
            value, slots = torch.randn(3, 10, 24).to(dtype)[:, ::2], torch.tensor([17, 3, 95, 0, 40])
            paged_write(layer.blocks, slots, key, value)
            assert torch.equal(layer.blocks.flatten(0, 1)[slots], torch.cat((key, value), -1).transpose(0, 1))
            assert layer.blocks.flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist() == sorted(slots.tolist())


@pytest.mark.parametrize(
    "wrong",
    [
        {"table": [[0, 4]]},
        {"table": [[-1, 0]]},
        {"table": [[1 << 40, 0]]},
        {"lengths": [0]},
        {"lengths": [33]},
        {"lengths": [-5]},
        {"lengths": [1 << 62]},
    ],
    ids=str,
)
def test_nothing_is_read_outside_of_the_cache(wrong):
    given = {key: torch.tensor(value) for key, value in ({"table": [[0, 3]], "lengths": [32]} | wrong).items()}
    with pytest.raises(IndexError, match="none of 4"):
        paged_decode(torch.zeros(1, 4, 16), torch.zeros(4, 16, 2, 32), 16, given["table"], given["lengths"])


@pytest.mark.parametrize("slot", [-1, 64, 1 << 50])
def test_nothing_is_written_outside_of_the_cache(slot):
    blocks = torch.zeros(4, 16, 2, 32)
    with pytest.raises(IndexError, match="none of 64"):
        paged_write(blocks, torch.tensor([3, slot]), torch.ones(2, 2, 16), torch.ones(2, 2, 16))
    assert not blocks.any()


@pytest.mark.parametrize(
    ("query", "table", "lengths"),
    [
        (torch.zeros(1, 3, 16), torch.zeros(1, 1).long(), torch.ones(1).long()),
        (torch.zeros(1, 4, 8), torch.zeros(1, 1).long(), torch.ones(1).long()),
        (torch.zeros(1, 4, 16).bfloat16(), torch.zeros(1, 1).long(), torch.ones(1).long()),
        (torch.zeros(1, 4, 16), torch.zeros(2, 1).long(), torch.ones(1).long()),
        (torch.zeros(1, 4, 16), torch.zeros(1, 1).int(), torch.ones(1).long()),
        (torch.zeros(2, 4, 16), torch.zeros(2, 1).long(), torch.ones(1).long()),
    ],
)
def test_what_does_not_fit_together_is_refused(query, table, lengths):
    with pytest.raises(ValueError, match="not for blocks"):
        paged_decode(query, torch.zeros(4, 16, 2, 32), 16, table, lengths)


def test_keys_that_do_not_fit_are_refused():
    blocks, slots = torch.zeros(4, 16, 2, 32), torch.zeros(1).long()
    for key, value in ((torch.zeros(3, 1, 16),) * 2, (torch.zeros(2, 1, 16), torch.zeros(2, 1, 8)), (torch.zeros(2, 2, 16),) * 2):
        with pytest.raises(ValueError, match="not for blocks"):
            paged_write(blocks, slots, key, value)


def test_what_there_is_no_kernel_for():
    assert can_decode(torch.zeros(1, 16, 1, 16), 8)
    assert not can_decode(torch.zeros(1, 16, 1, 20), 10)
    assert not can_decode(torch.zeros(1, 16, 1, 16, dtype=torch.float16), 8)
    assert not can_decode(torch.zeros(1, 16, 1, 1040), 520)
    assert not can_decode(torch.zeros(1, 16, 1, 16, device="meta"), 8)
    with pytest.raises(ValueError, match="can_decode"):
        paged_decode(torch.zeros(1, 1, 10), torch.zeros(1, 16, 1, 20), 10, torch.zeros(1, 1).long(), torch.ones(1).long())
    assert lib.gw_decode_lanes(64, 64, 2, 4) == 4
