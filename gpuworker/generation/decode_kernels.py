"""Which kernel computes decode rows straight from their blocks, if there is any."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch

from gpuworker.generation import native_decode
from gpuworker.generation.cache import KVCache, LayerCache


def decode_kernel(layer: LayerCache) -> Callable[..., torch.Tensor] | None:
    """native_decode.paged_decode, or that of paged_kernel.py, or None: then the blocks have to be copied together."""
    if layer.blocks.device.type == "cuda":
        return _cuda_kernel()
    return native_decode.paged_decode if native_decode.can_decode(layer.blocks, layer.key_width) else None


def reads_in_place(cache: KVCache) -> bool:
    """Whether that is so for all layers that have written: then what decode rows cost depends on their lengths, and not on the width of the table."""
    return bool(cache.layers) and all(decode_kernel(layer) is not None for layer in cache.layers.values())


@functools.cache
def _cuda_kernel() -> Callable[..., torch.Tensor] | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from gpuworker.generation.paged_kernel import paged_decode

    return paged_decode
