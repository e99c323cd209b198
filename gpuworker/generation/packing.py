"""From chunks to the tensors of one step: in one piece of host memory, and to the device in one copy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from gpuworker.generation import decode_kernels
from gpuworker.generation.cache import KVCache
from gpuworker.generation.sequence import Chunk
from gpuworker.generation.step import DecodeGroup, Prefill, Step

WASTED_BLOCKS = 6
"""Where a CPU has to copy blocks together, decode rows are computed together until so many of those that are fetched are padding: about what one more call in each
layer costs."""


class Packed(NamedTuple):
    """A step, ready to be run. ids, positions: int64 [tokens]. keep: which of them logits are wanted for, int64 [rows]; or 0, for all, in their order."""

    ids: torch.Tensor
    positions: torch.Tensor
    step: Step
    keep: torch.Tensor | int


def pack(chunks: Rows[Chunk], cache: KVCache) -> Packed:
    """Chunks of one token at the beginning of `chunks` become decode rows, the longest first; all others prefills. `keep` is in the order of the chunks."""
    size, device = cache.block_tokens, cache.device
    singles = next((index for index, chunk in enumerate(chunks) if chunk.count > 1), len(chunks))
    order = sorted(range(singles), key=lambda index: chunks[index].start, reverse=True)
    decodes, longs = [chunks[index] for index in order], chunks[singles:]
    ids, positions, slots, fresh, tables, lists, ends = (array("q") for _ in range(7))
    for chunk in decodes:
        at, blocks = chunk.start, chunk.sequence.blocks
        block, offset = divmod(at, size)
        ids.append(chunk.sequence.tokens[at])
        positions.append(at)
        slots.append(blocks[block] * size + offset)
        if not offset:
            fresh.append(blocks[block])
    has_to_copy = device.type == "cpu" and not decode_kernels.reads_in_place(cache)
    groups = _group([chunk.start // size + 1 for chunk in decodes], WASTED_BLOCKS if has_to_copy else None)
    for first, end in groups:
        width = decodes[first].start // size + 1
        for chunk in decodes[first:end]:
            own = chunk.sequence.blocks[: chunk.start // size + 1]
            tables.extend(own)
            tables.extend(own[:1] * (width - len(own)))
    for chunk in longs:
        start, end, blocks = chunk.start, chunk.start + chunk.count, chunk.sequence.blocks
        ids.extend(chunk.sequence.tokens[start:end])
        positions.extend(range(start, end))
        slots.extend([blocks[at // size] * size + at % size for at in range(start, end)])
        if end % size and end - end % size >= start:
            fresh.append(blocks[end // size])
        lists.extend(blocks[: -(-end // size)])
        ends.append(len(ids))
    place = {index: row for row, index in enumerate(order)}
    last = array("q", [place[index] if index < singles else ends[index - singles] - 1 for index, chunk in enumerate(chunks) if chunk.is_last])
    parts = [ids, positions, slots, array("q", [at + 1 for at in positions[:singles]]), fresh, last, tables, lists]
    on_device = _send(parts, device)
    lengths, table, lists_there = on_device[3], on_device[6], on_device[7]
    made = []
    for first, end in groups:
        width = decodes[first].start // size + 1
        cells, table = table[: (end - first) * width], table[(end - first) * width :]
        made.append(DecodeGroup(first, end, cells.view(-1, width), lengths[first:end], size))
    prefills = []
    for chunk, end in zip(longs, ends, strict=True):
        count = -(-(chunk.start + chunk.count) // size)
        prefills.append(Prefill(end - chunk.count, end, chunk.start, lists_there[:count], size))
        lists_there = lists_there[count:]
    step = Step(cache, on_device[2], on_device[4] if fresh else None, made, prefills)
    return Packed(on_device[0], on_device[1], step, 0 if list(last) == list(range(len(ids))) else on_device[5])


def _group(widths: list[int], allowed: int | None) -> list[tuple[int, int]]:
    """widths: blocks of each row, the most first. allowed: how many a group may fetch in vain; None: any number. -> first and end of each group."""
    groups, first, wasted = [], 0, 0
    for row, width in enumerate(widths):
        wasted += widths[first] - width
        if allowed is not None and wasted > allowed:
            groups.append((first, row))
            first, wasted = row, 0
    return [*groups, (first, len(widths))] if widths else []


def _send(parts: list[array[int]], device: torch.device) -> list[torch.Tensor]:
    """The parts' numbers, on the device."""
    flat = array("q")
    for part in parts:
        flat.extend(part)
    host = torch.frombuffer(flat, dtype=torch.int64)  # keeps `flat` alive
    if device.type != "cpu":
        host = host.pin_memory()
    return list(torch.split(host.to(device, non_blocking=True), [len(part) for part in parts]))
