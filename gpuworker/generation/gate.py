"""Which models can be paged: what can be told from their configuration, and what only a run tells."""

from __future__ import annotations

from typing import Any

import torch

from gpuworker.generation.attention import NAME, UnsupportedModel, family_of
from gpuworker.generation.cache import KVCache
from gpuworker.generation.step import DecodeGroup, Step

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_config(model: Any) -> None:
    """UnsupportedModel, naming the family, for a model that cannot be paged, as far as that can be told without running it."""
    family, config = family_of(model), model.config.get_text_config()
    if not model._supports_attention_backend:
        raise UnsupportedModel(f"{family}: transformers does not let its attention be replaced")
    if getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
        raise UnsupportedModel(f"{family} is no decoder that generates text from text alone")
    others = sorted({*(getattr(config, "layer_types", None) or ())} - LAYER_TYPES)
    if others:
        raise UnsupportedModel(f"{family} has layers of {', '.join(others)}; only {' and '.join(sorted(LAYER_TYPES))} can be paged")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel(f"{family} keeps a state beside keys and values")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{family} has layers that use the keys and values of others")


@torch.inference_mode()
def probe(model: Any, cache: KVCache) -> None:
    """Runs one token through a model whose attention is paged, into block 0: every layer's cache is allocated by it. UnsupportedModel if a layer asks for what
    cannot be done, or does not ask for what its configuration says, or asks for nothing at all."""
    zero, one = (torch.full((1,), value, dtype=torch.int64, device=cache.device) for value in (0, 1))
    step = Step(cache, zero, zero, [DecodeGroup(0, 1, zero[None], one, cache.block_tokens)], [])
    model(input_ids=zero[None], position_ids=zero[None], use_cache=False, step=step, logits_to_keep=0)
    family, config = family_of(model), model.config.get_text_config()
    if len(step.windows) != config.num_hidden_layers:
        raise UnsupportedModel(f"{family} has {config.num_hidden_layers} layers, of which {len(step.windows)} have asked for attention")
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if (step.windows.get(index) is not None) != (kind == "sliding_attention"):
            raise UnsupportedModel(f"{family}: layer {index} is of {kind} and has asked for a window of {step.windows.get(index)}")


@torch.inference_mode()
def bytes_per_token(model: Any) -> int:
    """What keys and values of one token take, in all layers together: measured with one token, since no two families say it in the same words. UnsupportedModel as
    PagedModel."""
    check_config(model)
    cache = KVCache(1, dtype=model.dtype, device=model.device)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
        probe(model, cache)
    finally:
        model.set_attn_implementation(before)
    return cache.token_bytes


def max_tokens(config: Any) -> int | None:
    """See PagedModel.max_tokens."""
    config = config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None)]
    parameters = getattr(config, "rope_parameters", None) or {}
    for entry in (parameters, *parameters.values()):
        if isinstance(entry, dict) and entry.get("rope_type") in ("dynamic", "longrope"):
            limits.append(entry.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit), default=None)
