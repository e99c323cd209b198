"""Attention of decode rows on a CPU, straight from the blocks, and what puts keys and values there: native/paged_decode.c for torch's tensors.

It runs on torch's own threads: OpenMP's runtime is asked for them as torch asks it, in the library that torch has loaded. Where there is none, one thread computes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from gpuworker._native import ffi, lib

MOST_LANES = 16
"""What a kernel computes at once, in floats: 16 (AVX-512), 8 (AVX2) or 4 (any processor), or less where the processor has no more or the widths do not divide."""


def can_decode(blocks: torch.Tensor, key_width: int) -> bool:
    """Whether there is a kernel for such blocks (LayerCache.blocks): on a CPU, float32 or bfloat16, keys and values of 8, 16, 24 ... 512 numbers."""
    is_plain = blocks.device.type == "cpu" and blocks.dtype in (torch.float32, torch.bfloat16) and blocks.is_contiguous()
    return is_plain and lib.gw_decode_lanes(key_width, blocks.shape[3] - key_width, blocks.element_size(), MOST_LANES) > 0


def paged_decode(
    query: torch.Tensor,
    blocks: torch.Tensor,
    key_width: int,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """query: [rows, heads, key width], any strides but in the last dimension. blocks: LayerCache.blocks, of the same dtype, for which `can_decode`. table [rows,
    width] and lengths [rows]: DecodeBatch's, int64. scale: None: key width ** -0.5. window: None: everything is seen. -> [rows, heads, value width], contiguous.
    ValueError for shapes or dtypes that do not fit together; IndexError for a block that there is not, or a length beyond the table's width."""
    rows, heads, width = query.shape
    key_heads = blocks.shape[2]
    fits = width == key_width and query.dtype == blocks.dtype and heads % key_heads == 0 and table.dtype == lengths.dtype == torch.int64
    if not fits or table.shape[0] != rows or lengths.shape != (rows,):
        shapes = f"query {list(query.shape)} of {query.dtype}, table {list(table.shape)}, lengths {list(lengths.shape)}"
        raise ValueError(f"{shapes}: not for blocks {list(blocks.shape)} of {blocks.dtype} with keys of {key_width}")
    query = query if query.stride(2) == 1 else query.contiguous()
    table, lengths = table.contiguous(), lengths.contiguous()
    output = query.new_empty(rows, heads, blocks.shape[3] - key_width)
    what = _describe(blocks, key_width)
    what.query, what.output = _at(query), _at(output)
    what.rows, what.heads, what.query_row, what.query_head = rows, heads, query.stride(0), query.stride(1)
    what.table, what.lengths, what.table_width = _numbers(table), _numbers(lengths), table.shape[1]
    what.window = window or 0
    what.scale = key_width**-0.5 if scale is None else scale
    what.threads, what.parallel, what.most_lanes = torch.get_num_threads(), _parallel(), MOST_LANES
    result = lib.gw_paged_decode(what)
    if result == -1:
        raise IndexError(f"a block that is none of {blocks.shape[0]}, or a length that is none of 1 to {table.shape[1] * blocks.shape[1]}")
    if result:
        raise ValueError(f"no kernel for blocks {list(blocks.shape)} of {blocks.dtype} with keys of {key_width}: ask can_decode first")
    return output


def paged_write(blocks: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Puts keys and values [heads, tokens, width], of the blocks' dtype, into slots [tokens] (int64): slot s is in block s // block_tokens. IndexError for a slot
    that there is not, before any is written; ValueError for shapes or dtypes that do not fit together."""
    heads, tokens, _ = key.shape
    fits = value.shape[:2] == key.shape[:2] and heads == blocks.shape[2] and key.shape[2] + value.shape[2] == blocks.shape[3]
    if not fits or not key.dtype == value.dtype == blocks.dtype or slots.dtype != torch.int64 or slots.shape != (tokens,):
        raise ValueError(
            f"keys {list(key.shape)} and values {list(value.shape)} of {key.dtype}: not for blocks {list(blocks.shape)} of {blocks.dtype}"
        )
    key, value = (part if part.stride(2) == 1 else part.contiguous() for part in (key, value))
    slots = slots.contiguous()
    what = _describe(blocks, key.shape[2])
    what.key, what.key_head, what.key_token = _at(key), key.stride(0), key.stride(1)
    what.value, what.value_head, what.value_token = _at(value), value.stride(0), value.stride(1)
    what.slots, what.tokens = _numbers(slots), tokens
    if lib.gw_paged_write(what):
        raise IndexError(f"a slot that is none of {blocks.shape[0] * blocks.shape[1]}")


def _describe(blocks: torch.Tensor, key_width: int) -> Any:
    what = ffi.new("gw_decode *")
    what.blocks = _at(blocks)
    what.block_count, what.block_tokens, what.key_heads, both = blocks.shape
    what.key_width, what.value_width, what.element_bytes = key_width, both - key_width, blocks.element_size()
    return what


def _at(tensor: torch.Tensor) -> Any:
    return ffi.cast("void *", tensor.data_ptr())


def _numbers(tensor: torch.Tensor) -> Any:
    return ffi.cast("int64_t *", tensor.data_ptr())


@functools.cache
def _parallel() -> Any:
    found = getattr(ctypes.CDLL(None), "GOMP_parallel", None)  # what torch has loaded, it has loaded for all to see
    return ffi.NULL if found is None else ffi.cast("gw_parallel *", ctypes.cast(found, ctypes.c_void_p).value)
