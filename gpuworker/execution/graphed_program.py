"""A program that is run as a CUDA graph where it has one for a batch's shape, and as it is where not."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpuworker.execution.buffers import Buffers, copy_all
from gpuworker.execution.executor import Array, Program, Tensors
from gpuworker.execution.failures import Failure, causes, kind_of
from gpuworker.execution.graph_capture import Captured, CaptureError, Capturer, agree
from gpuworker.execution.graph_state import Snapshot, State
from gpuworker.execution.graphs import GraphCache
from gpuworker.execution.grid import Shape

Example = Callable[[Shape, dict[str, Array]], None]
"""Fills host arrays (of zeros) with a batch of that shape that the program can run."""


class GraphedProgram:
    """All for one thread, and within the stream that the program is to run on. What a graph replaces is never run beside it: captures happen between batches."""

    def __init__(
        self,
        program: Program,
        state: State,
        shapes: Sequence[Shape],
        static: Buffers,
        capturer: Capturer,
        limit_bytes: int,
        example: Example | None,
        tolerance: float | None,
        log: logging.Logger,
    ) -> None:
        """See CudaExecutor."""
        self._program, self._state, self._static, self._capturer = program, state, static, capturer
        self._example, self._tolerance, self._log = example, tolerance, log
        self._api, self._device = capturer.api, capturer.device
        self.cache: GraphCache[Captured] = GraphCache(shapes, limit_bytes, capturer.release)

    def capture_next(self) -> bool:
        """Captures what is next in the background. -> whether there is more."""
        shape = self.cache.next()
        if shape is None:
            return False
        inputs = self._static.of(shape)
        self._fill(shape, inputs)
        self._capture(shape, inputs, may_drop=False)
        return self.cache.next() is not None

    def give_up(self) -> None:
        """No graphs any more; not to be reported."""
        self.cache.give_up("")

    def run(self, inputs: Tensors, shape: Shape) -> Tensors:
        """On the compute stream. -> outputs that the next run may overwrite."""
        if self.cache.reason is not None:
            return self._program(inputs)
        captured = self.cache.get(shape)
        if captured is None and self.cache.is_due(shape):
            with torch.inference_mode():
                static = copy_all(self._static.of(shape), inputs)
            captured = self._capture(shape, static, may_drop=True)
        began_ns = time.monotonic_ns()
        if captured is None:
            outputs = self._program(inputs)
            self.cache.ran(shape, time.monotonic_ns() - began_ns)
        elif captured.is_checked:
            outputs = self._replay(captured, inputs)
            self.cache.replayed(time.monotonic_ns() - began_ns)
        else:
            outputs = self._check(captured, inputs, shape)
        return outputs

    @staticmethod
    def _replay(captured: Captured, inputs: Tensors) -> Tensors:
        with torch.inference_mode():
            copy_all(captured.inputs, inputs)
        captured.graph.replay()
        return captured.outputs

    def _check(self, captured: Captured, inputs: Tensors, shape: Shape) -> Tensors:
        """Runs the batch both ways, from the same state. What an eager run decides on the host is baked into a graph, and shows in no other way."""
        with torch.inference_mode():
            kept = {name: value.clone() for name, value in inputs.items()}  # the program may change its inputs
        before = Snapshot(self._state, self._device, self._api)
        outputs = self._program(inputs)
        with torch.inference_mode():
            expected = {name: value.clone() for name, value in outputs.items()}
        after = Snapshot(self._state, self._device, self._api)
        before.restore()
        try:
            found = self._replay(captured, kept)
            with torch.inference_mode():
                now = Snapshot(self._state, self._device, self._api)
                difference = agree(expected, found, self._tolerance) or agree(after.values, now.values, self._tolerance)
        except Exception as error:
            kind = kind_of(error, self._synchronize)
            if kind is Failure.DEVICE_LOST:
                raise
            after.restore()
            if kind is Failure.OUT_OF_MEMORY:
                free_after(error, self._api)
                self._no_memory(shape)
                return expected
            difference = f"{type(error).__name__}: {error}"
        if difference is None:
            captured.is_checked = True
            return found
        after.restore()
        self._report(f"a replay of {words(shape)} does not give what an eager run gives: {difference}")
        return expected

    def _capture(self, shape: Shape, inputs: Tensors, *, may_drop: bool) -> Captured | None:
        """On the compute stream. -> the graph, if it is there and kept."""
        try:
            captured, size_bytes, took_ns = self._capturer.capture(inputs)
        except Exception as error:
            kind = kind_of(error, self._synchronize)
            if kind is Failure.DEVICE_LOST:
                raise
            if kind is Failure.OUT_OF_MEMORY:
                free_after(error, self._api)
                self._no_memory(shape)
            elif isinstance(error, CaptureError):
                self._report(f"it cannot be captured ({words(shape)}): {error}")
            else:  # it does not run on this batch: an example that does not suit it, or a bad request, which an eager run will tell its caller
                self.cache.leave_out(shape)
                self._log.debug("no CUDA graph of %s yet: warming up failed", words(shape), exc_info=error)
        else:
            if self.cache.add(shape, captured, size_bytes, took_ns, may_drop=may_drop):
                return captured
            if may_drop:
                self._log.warning("no CUDA graph of %s: %s", words(shape), self.cache.failed[shape])
        if not len(self.cache):
            self._capturer.forget_pool()
        return None

    def _no_memory(self, shape: Shape) -> None:
        self.cache.fail(shape, "out of memory")
        self._log.warning("no CUDA graph of %s: there is not enough memory for it", words(shape))

    def _report(self, reason: str) -> None:
        self._log.warning("the handler runs without CUDA graphs: %s", reason)
        self.cache.give_up(reason)

    def _fill(self, shape: Shape, inputs: Tensors) -> None:
        """An example batch, on the device."""
        host = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in inputs.items()}
        if self._example is not None:
            self._example(shape, {name: value.numpy() for name, value in host.items()})
        with torch.inference_mode():
            copy_all(inputs, host)  # not pinned, so the host's side is read before this returns

    def _synchronize(self) -> None:
        self._api.synchronize(self._device)


def free_after(error: BaseException, api: Any) -> None:
    """Gives memory back after an error that was for want of it. From within its `except`."""
    for cause in causes(error):
        traceback.clear_frames(cause.__traceback__)  # they hold what the program had made so far
    with contextlib.suppress(Exception):
        api.empty_cache()


def words(shape: Shape) -> str:
    """For people."""
    return f"{shape.rows} rows" + "".join(f" x {extent}" for extent in shape.extents)
