"""Decode steps as CUDA graphs: at small batches a step is hundreds of launches that each take the host longer than the device.

A step whose chunks are all of one token is padded to a bucket of rows, and replayed. Attention that copies blocks together does as much work as the table is wide,
so there the width is padded to a bucket, too, and a graph never meets lengths that it was not made for; the kernel of paged_kernel.py reads lengths on the device,
and its graphs have one width. A step with a longer chunk of a prompt is run as it is.
"""

from __future__ import annotations

import logging
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence as Rows
from typing import Any

import torch

from gpuworker.execution.executor import Tensors
from gpuworker.execution.failures import Failure, kind_of
from gpuworker.execution.graph_capture import Captured, Capturer, agree
from gpuworker.execution.graphed_program import free_after
from gpuworker.execution.graphs import GraphCache
from gpuworker.execution.grid import Shape
from gpuworker.generation import decode_kernels
from gpuworker.generation.model import PagedModel
from gpuworker.generation.sequence import Chunk
from gpuworker.generation.step import DecodeBatch

log = logging.getLogger("gpuworker")

NARROWEST = 8
"""Blocks of the narrowest table."""
MEMORY_SHARE = 4
"""One part in so many of the memory that is free beside weights and cache may be taken by graphs."""
NUMBERS = 5
"""Of a row, beside its table: id, position, slot, length, fresh."""


def row_buckets(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, ... and `most`."""
    return [*(rows for rows in (1, 2, 4, *range(8, most, 8)) if rows < most), most]


def width_buckets(most: int) -> list[int]:
    """8, 16, 32, ... and `most`."""
    widths, width = [], NARROWEST
    while width < most:
        widths.append(width)
        width *= 2
    return [*widths, most]


class DecodeGraphs:
    """Computes chunks as its PagedModel does (it is an engine's Model itself), decode steps as graphs where there are any. For the model's one thread.

    A bucket is captured between two steps, once its eager runs have cost what capturing does, or by `capture_next`; with rows that are all padding, so that nothing
    but block 0 is written. All share one pool of memory, and one set of inputs. A graph's first replay is compared with an eager run of the same step: a step may be
    run twice, it writes the same to the same slots. What cannot be captured is reported once, and all steps are eager from then on.
    """

    def __init__(self, model: PagedModel, *, max_rows: int, max_tokens: int, limit_bytes: int | None = None, api: Any = torch.cuda) -> None:
        """max_rows: most sequences in a step. max_tokens: of one sequence; a longer one's steps are eager. limit_bytes: of all graphs' memory; None: a quarter of
        what is free now. api: torch.cuda, or what tests put in its place."""
        self._model, self._api, self._device, self._block_tokens = model, api, model.cache.device, model.cache.block_tokens
        if self._device.type == "cuda":
            api.set_device(self._device)
        widest = -(-max_tokens // self._block_tokens)
        self._reads_lengths = decode_kernels.reads_in_place(model.cache)
        self._rows = row_buckets(max_rows)
        self._widths = [widest] if self._reads_lengths else width_buckets(widest)
        self._numbers = torch.zeros(NUMBERS * max_rows, dtype=torch.int64, device=self._device)
        self._table = torch.zeros(max_rows * widest, dtype=torch.int64, device=self._device)
        self._capturer = Capturer(self._run, list, self._device, api.Stream(device=self._device), api)
        if limit_bytes is None:
            limit_bytes = api.mem_get_info(self._device)[0] // MEMORY_SHARE
        shapes = [Shape(rows, (width,)) for rows in self._rows for width in self._widths]
        self._graphs: GraphCache[Captured] = GraphCache(shapes, limit_bytes, self._capturer.release)

    @property
    def hits(self) -> int:
        """Steps that were replays."""
        return self._graphs.hits

    @property
    def misses(self) -> int:
        """Decode steps that were eager, up to the time when graphs were given up."""
        return self._graphs.misses

    @property
    def size_bytes(self) -> int:
        """What the graphs take."""
        return self._graphs.bytes

    @property
    def reason(self) -> str | None:
        """Why there are no graphs any more."""
        return self._graphs.reason

    @property
    def count(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    def forward(self, chunks: Rows[Chunk]) -> torch.Tensor:
        """See PagedModel.forward. The logits hold until the next call."""
        shape = self._bucket(chunks)
        if shape is None:
            return self._model.forward(chunks)
        captured = self._graphs.get(shape)
        if captured is None and self._graphs.is_due(shape) and self._capture(shape, may_drop=True):
            captured = self._graphs.get(shape)
        began_ns = time.monotonic_ns()
        if captured is None:
            logits = self._model.forward(chunks)
            self._graphs.ran(shape, time.monotonic_ns() - began_ns)
            return logits
        with torch.inference_mode():
            self._fill(shape, chunks)
            if captured.is_checked:
                captured.graph.replay()
                found = captured.outputs["logits"]
                self._graphs.replayed(time.monotonic_ns() - began_ns)
            else:
                found = self._check(captured, shape)
            last = [row for row, chunk in enumerate(chunks) if chunk.is_last]
            if len(last) < len(chunks):
                return found.index_select(0, torch.tensor(last, dtype=torch.int64, device=self._device))
            return found[: len(chunks)]

    def capture_next(self) -> bool:
        """Captures a bucket, the largest first, while nothing else is to be done. -> whether there is more."""
        shape = self._graphs.next()
        if shape is not None:
            self._capture(shape, may_drop=False)
        return self._graphs.next() is not None

    def close(self) -> None:
        """Drops all graphs; steps are eager from now on. To be called before the model is closed. Safe to call again."""
        self._graphs.give_up("closed")

    def _bucket(self, chunks: Rows[Chunk]) -> Shape | None:
        """What a step is padded to; None for one that graphs have no part in."""
        if self._graphs.reason is not None or not chunks or any(chunk.count > 1 for chunk in chunks):
            return None
        row = bisect_left(self._rows, len(chunks))
        column = bisect_left(self._widths, max([chunk.start for chunk in chunks]) // self._block_tokens + 1)
        if row == len(self._rows) or column == len(self._widths):
            return None
        return Shape(self._rows[row], (self._widths[column],))

    # A bucket's inputs are the fronts of the same two pieces of memory: first each number of all rows in turn, and the table.

    def _static(self, shape: Shape) -> DecodeBatch:
        rows, (width,) = shape
        ids, positions, slots, lengths, fresh = self._numbers[: NUMBERS * rows].view(NUMBERS, rows)
        return DecodeBatch(ids, positions, slots, self._table[: rows * width].view(rows, width), lengths, fresh)

    def _pad(self, shape: Shape) -> Tensors:
        """-> the inputs, all of whose rows are padding now."""
        static = self._static(shape)
        with torch.inference_mode():
            self._numbers.zero_()
            self._table.zero_()
            static.lengths.fill_(1)
        return static._asdict()

    def _fill(self, shape: Shape, chunks: Rows[Chunk]) -> None:
        """Puts a step into the inputs, padded. Waits for nothing."""
        rows, (width,) = shape
        # What the kernel does not read need not be sent: its table is as wide as the longest sequence could be.
        columns = max([chunk.start for chunk in chunks]) // self._block_tokens + 1 if self._reads_lengths else width
        host = torch.frombuffer(_numbers_of(chunks, rows, columns, self._block_tokens), dtype=torch.int64)
        if self._device.type != "cpu":
            host = host.pin_memory()
        count = NUMBERS * rows
        self._numbers[:count].copy_(host[:count], non_blocking=True)
        self._static(shape).table[:, :columns].copy_(host[count:].view(rows, columns), non_blocking=True)

    # Graphs.

    def _run(self, inputs: Tensors) -> Tensors:
        return {"logits": self._model.decode(DecodeBatch(**inputs))}

    def _check(self, captured: Captured, shape: Shape) -> torch.Tensor:
        """Runs the step that is in the inputs both ways. -> the logits, of the replay if it is right."""
        expected = self._run(captured.inputs)
        try:
            captured.graph.replay()
            difference = agree(expected, captured.outputs, None)
        except Exception as error:
            if self._has_no_memory(error, shape):
                return expected["logits"]
            difference = f"{type(error).__name__}: {error}"
        if difference is not None:
            self._give_up(f"a replay of {_words(shape)} does not give what an eager run gives: {difference}")
            return expected["logits"]
        captured.is_checked = True
        return captured.outputs["logits"]

    def _capture(self, shape: Shape, *, may_drop: bool) -> bool:
        """-> whether there is a graph now."""
        try:
            captured, size_bytes, took_ns = self._capturer.capture(self._pad(shape))
        except Exception as error:
            if not self._has_no_memory(error, shape):
                self._give_up(f"a step of {_words(shape)} cannot be captured: {error}")
        else:
            if self._graphs.add(shape, captured, size_bytes, took_ns, may_drop=may_drop):
                return True
            if may_drop:
                log.warning("no CUDA graph of steps of %s: %s", _words(shape), self._graphs.failed[shape])
        if not len(self._graphs):
            self._capturer.forget_pool()
        return False

    def _has_no_memory(self, error: Exception, shape: Shape) -> bool:
        """Whether that was the matter; then this bucket has no graph any more. From within the `except`. Raises the error if the device is lost."""
        kind = kind_of(error, lambda: self._api.synchronize(self._device))
        if kind is Failure.DEVICE_LOST:
            raise error
        if kind is not Failure.OUT_OF_MEMORY:
            return False
        free_after(error, self._api)
        self._graphs.fail(shape, "out of memory")
        log.warning("no CUDA graph of steps of %s: there is not enough memory for it", _words(shape))
        return True

    def _give_up(self, reason: str) -> None:
        log.warning("the model runs without CUDA graphs: %s", reason)
        self._graphs.give_up(reason)


def _numbers_of(chunks: Rows[Chunk], rows: int, columns: int, block_tokens: int) -> array[int]:
    """DecodeBatch's ids, positions, slots, lengths and fresh, padded to `rows`, and then its table of `columns`."""
    padding = [0] * (rows - len(chunks))
    places = [divmod(chunk.start, block_tokens) for chunk in chunks]
    blocks = [chunk.sequence.blocks[block] for chunk, (block, _) in zip(chunks, places, strict=True)]
    flat = array("q", [chunk.sequence.tokens[chunk.start] for chunk in chunks] + padding)
    flat.extend([chunk.start for chunk in chunks] + padding)
    flat.extend([block * block_tokens + offset for block, (_, offset) in zip(blocks, places, strict=True)] + padding)
    flat.extend([chunk.start + 1 for chunk in chunks] + [1] * len(padding))
    flat.extend([0 if offset else block for block, (_, offset) in zip(blocks, places, strict=True)] + padding)
    for chunk, (block, _) in zip(chunks, places, strict=True):
        own = chunk.sequence.blocks[: block + 1]
        flat.extend(own)
        flat.extend(own[:1] * (columns - len(own)))
    flat.extend([0] * (columns * len(padding)))
    return flat


def _words(shape: Shape) -> str:
    return f"{shape.rows} rows x {shape.extents[0]} blocks"
