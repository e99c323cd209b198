"""Attention of decode rows on CUDA, straight from the blocks: nothing is copied together first. Imported only where there is triton.

A row's tokens are shared out, SPLIT to a program, so that a few long sequences keep a whole GPU busy (split along keys: Flash-Decoding, Dao et al., 2023); a second
kernel puts the parts together. Who computes what depends on the row alone, so that its result is the same, bit for bit, whatever its batch-mates and however wide
the table. Slots behind a row's end are not read: it does not matter what others have left there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SPLIT = 256
"""Tokens of a program."""
TILE = 64
"""Tokens of a step of its loop, at most."""
TILE_BYTES = 48 << 10
"""Of keys and values; more would not fit into the shared memory of small GPUs."""


def _attend(
    query: tl.tensor,
    blocks: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    partial: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_row: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    KEY_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    GROUP_PAD: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    WIDTH_PAD: tl.constexpr,  # noqa: N803
    VALUE: tl.constexpr,  # noqa: N803
    VALUE_PAD: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    """Program (row, head of keys, split): the queries that share the head, over the split's tokens. -> partial: per query its weighted values, then the largest
    score, then the sum of weights relative to that."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    first = tl.maximum(length - window, 0)
    begin = split * SPLIT
    if begin < length and begin + SPLIT > first:
        end = tl.minimum(begin + SPLIT, length)
        member = tl.arange(0, GROUP_PAD)
        at_key = tl.arange(0, WIDTH_PAD)
        at_value = tl.arange(0, VALUE_PAD)
        at_token = tl.arange(0, TILE)
        query_head_of = head * GROUP + member
        queries = tl.load(
            query + row * query_row + query_head_of[:, None] * query_head + at_key[None, :],
            mask=(member[:, None] < GROUP) & (at_key[None, :] < WIDTH),
            other=0.0,
        )
        best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        found = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
        start = tl.maximum(begin, first // TILE * TILE)
        for tile in range(start, end, TILE):
            token = tile + at_token
            is_seen = (token < end) & (token >= first)
            block = tl.load(table + row * table_row + token // BLOCK, mask=is_seen, other=0)
            place = blocks + block * block_stride + (token % BLOCK) * token_stride + head * head_stride
            keys = tl.load(place[:, None] + at_key[None, :], mask=is_seen[:, None] & (at_key[None, :] < WIDTH), other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            # A tile of which nothing is seen cannot be: `start` is in the tile of `first`, and `end` is behind `tile`.
            shrink = tl.exp(best - new_best)
            weights = tl.exp(scores - new_best[:, None])
            values = tl.load(place[:, None] + WIDTH + at_value[None, :], mask=is_seen[:, None] & (at_value[None, :] < VALUE), other=0.0)
            found = found * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 1)
            best = new_best
        out = partial + ((row * (KEY_HEADS * GROUP) + query_head_of) * SPLITS + split) * (VALUE + 2)
        is_real = member < GROUP
        tl.store(out[:, None] + at_value[None, :], found, mask=is_real[:, None] & (at_value[None, :] < VALUE))
        tl.store(out + VALUE, best, mask=is_real)
        tl.store(out + VALUE + 1, total, mask=is_real)


def _join(
    partial: tl.tensor,
    lengths: tl.tensor,
    output: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,  # noqa: N803
    VALUE: tl.constexpr,  # noqa: N803
    VALUE_PAD: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (row, head): puts the parts of its splits together, in their order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    at_value = tl.arange(0, VALUE_PAD)
    is_real = at_value < VALUE
    parts = partial + (row * HEADS + head) * SPLITS * (VALUE + 2)
    first = tl.maximum(length - window, 0) // SPLIT
    best = tl.load(parts + first * (VALUE + 2) + VALUE)
    total = tl.load(parts + first * (VALUE + 2) + VALUE + 1)
    found = tl.load(parts + first * (VALUE + 2) + at_value, mask=is_real, other=0.0)
    for split in range(first + 1, tl.cdiv(length, SPLIT)):
        part = parts + split * (VALUE + 2)
        other_best = tl.load(part + VALUE)
        new_best = tl.maximum(best, other_best)
        shrink = tl.exp(best - new_best)
        other_shrink = tl.exp(other_best - new_best)
        found = found * shrink + tl.load(part + at_value, mask=is_real, other=0.0) * other_shrink
        total = total * shrink + tl.load(part + VALUE + 1) * other_shrink
        best = new_best
    tl.store(output + (row * HEADS + head) * VALUE + at_value, (found / total).to(output.dtype.element_ty), mask=is_real)


_attend_kernel = triton.jit(_attend)
_join_kernel = triton.jit(_join)


def paged_decode(
    query: torch.Tensor,
    blocks: torch.Tensor,
    key_width: int,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """query: [rows, heads, key width], the last dimension contiguous. blocks: LayerCache.blocks. table [rows, width] and lengths [rows]: DecodeBatch's, int64,
    contiguous. scale: None: key width ** -0.5. window: None: everything is seen. -> [rows, heads, value width]. Waits for nothing; grids depend on shapes alone."""
    rows, heads, _ = query.shape
    _, block_tokens, key_heads, both = blocks.shape
    value_width, group = both - key_width, heads // key_heads
    splits = triton.cdiv(table.shape[1] * block_tokens, SPLIT)
    partial = torch.empty(rows, heads, splits, value_width + 2, dtype=torch.float32, device=query.device)
    output = torch.empty(rows, heads, value_width, dtype=query.dtype, device=query.device)
    seen = table.shape[1] * block_tokens if window is None else window
    tile = TILE
    while tile > 16 and tile * both * blocks.element_size() > TILE_BYTES:
        tile //= 2
    _attend_kernel[(rows, key_heads, splits)](
        query,
        blocks,
        table,
        lengths,
        partial,
        query.stride(0),
        query.stride(1),
        blocks.stride(0),
        blocks.stride(1),
        blocks.stride(2),
        table.stride(0),
        key_width**-0.5 if scale is None else scale,
        seen,
        KEY_HEADS=key_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        WIDTH=key_width,
        WIDTH_PAD=max(16, triton.next_power_of_2(key_width)),
        VALUE=value_width,
        VALUE_PAD=max(16, triton.next_power_of_2(value_width)),
        BLOCK=block_tokens,
        SPLITS=splits,
        SPLIT=SPLIT,
        TILE=tile,
    )
    _join_kernel[(rows, heads)](
        partial,
        lengths,
        output,
        seen,
        HEADS=heads,
        VALUE=value_width,
        VALUE_PAD=max(16, triton.next_power_of_2(value_width)),
        SPLITS=splits,
        SPLIT=SPLIT,
    )
    return output
