"""What one pass of the model needs to know, beside its tokens: worked out once, and read by every layer's attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpuworker.generation.cache import KVCache


class DecodeBatch(NamedTuple):
    """One new token for each row, as tensors on the model's device (all int64). What CUDA graphs are captured with: nothing that is done with it depends on
    its contents in a way that the host would have to know, only on `rows` and `width`. So a graph can be captured once for each (rows, width) (with the kernel of
    paged_kernel.py for each `rows`: its time depends on lengths, not on `width`), and be replayed after these tensors have been overwritten in place.

    A row that is padding: id 0, position 0, slot 0, a table of zeros, length 1, fresh 0. It writes to block 0 (blocks.TRASH_BLOCK), which no other row reads.
    """

    ids: torch.Tensor
    """[rows]: the token."""
    positions: torch.Tensor
    """[rows]: where it stands in its sequence: length - 1."""
    slots: torch.Tensor
    """[rows]: where its key and value are written: block number * block_tokens + position % block_tokens."""
    table: torch.Tensor
    """[rows, width]: numbers of the sequence's blocks. The rest of a shorter row repeats its own first block, so that no row ever reads another's memory."""
    lengths: torch.Tensor
    """[rows]: tokens, the new one included; at least 1, at most width * block_tokens."""
    fresh: torch.Tensor
    """[any number]: blocks that this step begins to fill; or 0, for none."""


class Visible(NamedTuple):
    """What the rows of a group may see."""

    blocks: torch.Tensor
    """[rows * blocks of a row]: numbers of their blocks."""
    mask: torch.Tensor
    """[rows, 1, 1, tokens]: added to scores; 0, or -inf where a row has no such token, or no longer looks at it."""


class DecodeGroup:
    """Rows of about the same length, which are computed together. first, end: where they are among the step's tokens. table, lengths: see DecodeBatch."""

    def __init__(self, first: int, end: int, table: torch.Tensor, lengths: torch.Tensor, block_tokens: int) -> None:
        self.first, self.end, self.table, self.lengths = first, end, table, lengths
        self._block_tokens = block_tokens
        self._visible: dict[int | None, Visible] = {}

    def visible(self, window: int | None, dtype: torch.dtype) -> Visible:
        """What is visible to layers of this sliding window (None: everything before). Of the blocks, only as many as a window may touch."""
        found = self._visible.get(window)
        if found is None:
            found = self._visible[window] = self._see(window, dtype)
        return found

    def _see(self, window: int | None, dtype: torch.dtype) -> Visible:
        size, width, ends = self._block_tokens, self.table.shape[1], self.lengths[:, None]
        touched = width if window is None else (window + size - 2) // size + 1
        if touched < width:
            columns = (ends - (window or 0)).clamp_(min=0) // size + torch.arange(touched, device=ends.device)
            blocks = self.table.gather(1, columns.clamp(max=width - 1))
            positions = (columns[:, :, None] * size + torch.arange(size, device=ends.device)).flatten(1)
        else:
            blocks, positions = self.table, torch.arange(width * size, device=ends.device)[None]
        hidden = positions >= ends
        if window is not None:
            hidden = hidden | (positions < ends - window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=ends.device).masked_fill_(hidden, float("-inf"))
        return Visible(blocks.flatten(), mask[:, None, None])


class Prefill:
    """Several tokens of one sequence. first, end: where they are among the step's tokens. start: the position of the first one. blocks: [blocks], up to the end."""

    def __init__(self, first: int, end: int, start: int, blocks: torch.Tensor, block_tokens: int) -> None:
        self.first, self.end, self.start, self._blocks, self._block_tokens = first, end, start, blocks, block_tokens
        self._visible: dict[int | None, Visible] = {}

    def is_causal(self, window: int | None) -> bool:
        """Whether it sees nothing but itself, each token all before it: then the cache need not be read, and there is no mask."""
        return self.start == 0 and (window is None or self.end - self.first <= window)

    @property
    def tokens(self) -> int:
        """Of the sequence, up to the last one here."""
        return self.start + self.end - self.first

    def visible(self, window: int | None, dtype: torch.dtype) -> Visible:
        """blocks: of the keys that any of its tokens sees, a range that ends at the last block. mask: [1, 1, tokens, keys], the causal one, aligned at the
        last token; without the slots behind the last one's."""
        found = self._visible.get(window)
        if found is None:
            skipped = 0 if window is None else max(0, self.start - window + 1) // self._block_tokens
            device = self._blocks.device
            keys = torch.arange(skipped * self._block_tokens, self.tokens, device=device)
            queries = torch.arange(self.start, self.tokens, device=device)[:, None]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
            found = self._visible[window] = Visible(self._blocks[skipped:], mask[None, None])
        return found


class Step:
    """Everything that the layers' attention needs. slots: [tokens], as in DecodeBatch. fresh: as there, or None for none."""

    def __init__(self, cache: KVCache, slots: torch.Tensor, fresh: torch.Tensor | None, groups: list[DecodeGroup], prefills: list[Prefill]) -> None:
        self.cache, self.slots, self.fresh, self.groups, self.prefills = cache, slots, fresh, groups, prefills
        self.windows: dict[int, int | None] = {}
        """The sliding window that each layer has asked for."""
