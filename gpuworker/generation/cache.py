"""Where keys and values are kept: blocks of 16 tokens, for each layer of the model. Whose they are is blocks.py's business."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LayerCache(NamedTuple):
    """Keys and values of one layer."""

    blocks: torch.Tensor
    """[blocks, block_tokens, heads, key width + value width]. A token's key and value lie side by side, so that one copy of contiguous memory fetches a block."""
    key_width: int

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Puts keys and values [1, heads, tokens, width] into slots [tokens] (int64): slot s is in block s // block_tokens."""
        both = torch.cat((key[0], value[0]), -1).transpose(0, 1)
        self.blocks.view(-1, *self.blocks.shape[2:]).index_copy_(0, slots, both)

    def read(self, table: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole blocks. table: the numbers of every row's blocks in turn, one dimension. -> two tensors [rows, heads, tokens, width]."""
        heads, width = self.blocks.shape[2:]
        both = self.blocks.view(self.blocks.shape[0], -1).index_select(0, table).view(rows, -1, heads, width).transpose(1, 2)
        return both[..., : self.key_width], both[..., self.key_width :]


class KVCache:
    """`blocks` blocks for each layer. A layer's memory is allocated when it first writes, by the shapes that it then has: no two families of models say in the same
    words what these will be, and keys and values need not be of one width.

    dtype: of what the layers write. device: where they do.
    """

    def __init__(self, blocks: int, block_tokens: int = 16, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError(f"blocks={blocks}, block_tokens={block_tokens}: give at least 1")
        self.blocks, self.block_tokens, self.dtype, self.device = blocks, block_tokens, dtype, torch.device(device)
        self._layers: dict[int, LayerCache] = {}

    @property
    def size_bytes(self) -> int:
        """Of all layers that have written."""
        return sum(layer.blocks.nbytes for layer in self._layers.values())

    @property
    def token_bytes(self) -> int:
        """What one token takes in all layers that have written."""
        return self.size_bytes // (self.blocks * self.block_tokens)

    @property
    def layers(self) -> dict[int, LayerCache]:
        """By their numbers in the model; those that have written."""
        return self._layers

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> LayerCache:
        """The layer that now has such keys and values [1, heads, tokens, width] to write. ValueError for a dtype that the cache is not made for, or fewer values
        than keys."""
        layer = self._layers.get(index)
        if layer is None:
            if key.shape[:3] != value.shape[:3] or key.dtype != self.dtype or value.dtype != self.dtype:
                kinds = f"keys {key.dtype} {list(key.shape)} and values {value.dtype} {list(value.shape)}"
                raise ValueError(f"layer {index} has {kinds}, and the cache is for {self.dtype}, as many of the one as of the other")
            shape = (self.blocks, self.block_tokens, key.shape[1], key.shape[3] + value.shape[3])
            layer = self._layers[index] = LayerCache(torch.zeros(shape, dtype=self.dtype, device=self.device), key.shape[3])
        return layer
