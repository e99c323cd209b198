"""Attention over the paged cache, as transformers' models call it: one function, registered once under a name, for every family of decoders.

All tokens of a step, of all sequences, are packed on one axis, so that everything but attention sees one batch. Attention gets them with the step (see step.py),
which says whose they are. Decode rows: a kernel reads the blocks where they are (native_decode.py, and paged_kernel.py on CUDA). For what it cannot do, float16 on a
CPU say, whole blocks are copied side by side (16 tokens at a time; fetching single tokens took seven times as long), and torch's attention masks what is too much.
Chunks of prompts: one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gpuworker.generation import decode_kernels, native_decode
from gpuworker.generation.cache import LayerCache
from gpuworker.generation.step import DecodeGroup, Prefill, Step

NAME = "gpuworker_paged"
"""What this attention is called in transformers (`model.set_attn_implementation`)."""

REFUSED = {
    "softcap": "caps its attention scores (softcap)",
    "s_aux": "has attention sinks",
    "sinks": "has attention sinks",
    "position_bias": "adds a bias to its attention scores (position_bias)",
    "indices": "chooses the tokens that it attends to (sparse attention)",
    "block_indices": "chooses the tokens that it attends to (sparse attention)",
}
"""Arguments that change what attention is, and what they say of a model."""


class UnsupportedModel(ValueError):
    """The model computes something that the paged attention does not. The message says which family, and what."""


def family_of(module: Any) -> str:
    """Of a model or one of its layers, for messages: e.g. "gemma2"."""
    return str(getattr(getattr(module, "config", None), "model_type", None) or type(module).__name__)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    step: Step | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, tokens, width], key and value [1, fewer heads, tokens, width]: of the step's tokens, which are written to the cache and attended to.
    -> [1, tokens, heads, value width]. UnsupportedModel if there is more to the model's attention than this."""
    if step is None:
        raise UnsupportedModel(
            f"{family_of(module)}: no step has come to its attention; a model that PagedModel holds runs by it alone until it is closed"
        )
    for name, what in REFUSED.items():
        if others.get(name) is not None:
            raise UnsupportedModel(f"{family_of(module)} {what}, which the paged attention does not compute")
    if attention_mask is not None or is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{family_of(module)} has a mask of its own or is not causal, which the paged attention does not compute")
    index: int = module.layer_idx  # type: ignore[assignment]
    window = sliding_window or None
    step.windows[index] = window
    layer = step.cache.layer(index, key, value)
    if decode_kernels.decode_kernel(layer) is native_decode.paged_decode:  # nobody reads behind an end
        native_decode.paged_write(layer.blocks, step.slots, key[0], value[0])
    else:
        if step.fresh is not None:
            # What a block's last owner has left may be infinite or no number, and 0 times that, where a mask hides it, is no number.
            layer.blocks.index_fill_(0, step.fresh, 0)
        layer.write(step.slots, key, value)
    parts = [_decode(group, layer, query, window, scaling) for group in step.groups]
    parts += [_prefill(prefill, layer, query, key, value, window, scaling) for prefill in step.prefills]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _decode(group: DecodeGroup, layer: LayerCache, query: torch.Tensor, window: int | None, scaling: float | None) -> torch.Tensor:
    """-> [rows, heads, value width]. Queries that share a head of keys are that head's rows, so that each key is read once."""
    rows, heads = group.end - group.first, layer.blocks.shape[2]
    queries = query[0, :, group.first : group.end].transpose(0, 1)
    kernel = decode_kernels.decode_kernel(layer)
    if kernel is not None:
        return kernel(queries, layer.blocks, layer.key_width, group.table, group.lengths, scaling, window)
    blocks, mask = group.visible(window, query.dtype)
    keys, values = layer.read(blocks, rows)
    found = F.scaled_dot_product_attention(queries.reshape(rows, heads, -1, query.shape[-1]), keys, values, attn_mask=mask, scale=scaling)
    return found.reshape(rows, query.shape[1], -1)


def _prefill(
    prefill: Prefill, layer: LayerCache, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, scaling: float | None
) -> torch.Tensor:
    """-> [tokens, heads, value width]."""
    own = slice(prefill.first, prefill.end)
    is_causal, mask = prefill.is_causal(window), None
    if is_causal:
        keys, values = key[:, :, own], value[:, :, own]
    else:
        blocks, mask = prefill.visible(window, query.dtype)
        keys, values = (part[:, :, : mask.shape[-1]] for part in layer.read(blocks, 1))
    # Each head of keys is lent to its group of queries: enable_gqa would have it so, too, but where there is a mask CUDA has no fast kernel for that.
    queries = query[0, :, own].reshape(key.shape[1], -1, prefill.end - prefill.first, query.shape[-1])
    keys, values = (part[0, :, None].expand(-1, queries.shape[1], -1, -1) for part in (keys, values))
    found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=scaling)
    return found.flatten(0, 1).transpose(0, 1)


ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention)
