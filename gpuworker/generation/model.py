"""Any decoder of transformers, run step by step over the paged cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Rows
from typing import Any

import torch

from gpuworker.generation.attention import NAME, UnsupportedModel, family_of
from gpuworker.generation.cache import KVCache
from gpuworker.generation.gate import bytes_per_token, check_config, max_tokens, probe
from gpuworker.generation.linear import PackedWeights
from gpuworker.generation.packing import pack
from gpuworker.generation.sequence import Chunk
from gpuworker.generation.step import DecodeBatch, DecodeGroup, Step

__all__ = ["BLOCK_TOKENS", "PagedModel", "UnsupportedModel", "bytes_per_token"]

log = logging.getLogger("gpuworker")

BLOCK_TOKENS = 16


class PagedModel:
    """A causal language model of transformers, which holds its keys and values in blocks until `close`. For one thread.

    blocks: of 16 tokens each, block 0 among them (see blocks.py). dtype, device: what the weights are converted and moved to; None: as they are.
    pack: on the CPU and in bfloat16, weights are laid out for its matrix units, in place of the originals (see linear.py);
    the model cannot be saved while it is held.
    UnsupportedModel, naming the family, for models whose attention cannot be paged.
    """

    def __init__(
        self, model: Any, *, blocks: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None, pack: bool = True
    ) -> None:
        check_config(model)
        self._model = model.eval()
        if dtype is not None:
            _convert(model, dtype)
        if device is not None:
            model.to(device)
        self.cache = KVCache(blocks, BLOCK_TOKENS, dtype=model.dtype, device=model.device)
        self._own_attention = model.config._attn_implementation
        self._weights = PackedWeights()
        try:
            model.set_attn_implementation(NAME)
            probe(model, self.cache)
            if pack:
                self._pack()
        except BaseException:
            self.close()
            raise

    def _pack(self) -> None:
        self._weights.pack(self._model)
        try:
            probe(self._model, self.cache)
        except Exception as error:  # without it, it has just run: e.g. a model that looks at its layers' weights itself
            self._weights.unpack()
            log.warning("%s runs with its weights as they are: packed, it fails (%s)", family_of(self._model), error)

    @property
    def max_tokens(self) -> int | None:
        """Of one sequence, prompt and answer; None: the model knows no limit. Where its rotary embedding would change for all positions once a sequence
        is long ("dynamic", "longrope"), the limit is what it does without that: cached keys would have to be computed again, and those of all who are in the
        same step."""
        return max_tokens(self._model.config)

    @torch.inference_mode()
    def forward(self, chunks: Rows[Chunk]) -> torch.Tensor:
        """Computes the chunks' tokens, and writes their keys and values to their sequences' blocks. -> logits [rows, vocabulary] of the last token of those that
        are `is_last`, in their order. Chunks of one token go faster if they come first."""
        packed = pack(chunks, self.cache)
        return self._run(packed.ids, packed.positions, packed.step, packed.keep)

    @torch.inference_mode()
    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        """One new token for each row: see DecodeBatch. -> logits [rows, vocabulary]. Never waits for the device, unless the model itself does: this is
        what CUDA graphs capture."""
        group = DecodeGroup(0, batch.ids.shape[0], batch.table, batch.lengths, self.cache.block_tokens)
        return self._run(batch.ids, batch.positions, Step(self.cache, batch.slots, batch.fresh, [group], []), 0)

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, step: Step, keep: torch.Tensor | int) -> torch.Tensor:
        output = self._model(input_ids=ids[None], position_ids=positions[None], use_cache=False, step=step, logits_to_keep=keep)
        logits: torch.Tensor = output.logits[0]
        return logits

    def close(self) -> None:
        """The model is as it was, but for dtype and device. The cache's memory is given back. Safe to call again."""
        self._model.set_attn_implementation(self._own_attention)
        self._weights.unpack()
        self.cache.layers.clear()


def _convert(model: Any, dtype: torch.dtype) -> None:
    """As loading in this dtype would have: buffers that are not saved (the frequencies of rotary embeddings) stay what they are."""
    saved = model.state_dict(keep_vars=True)
    stay = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, tensor in saved.items():
        if tensor.is_floating_point() and not any(part in name for part in stay):
            tensor.data = tensor.data.to(dtype)
