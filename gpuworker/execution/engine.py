"""A handler's signature, program, grid and device, put together: from requests to rows of a padded batch, and back."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from gpuworker._native import ffi, lib
from gpuworker.execution.buffers import MOST_VIEWS
from gpuworker.execution.cpu import CpuExecutor
from gpuworker.execution.cuda import CudaExecutor
from gpuworker.execution.executor import Array, Executor, Program, Tensors
from gpuworker.execution.failures import Failure, kind_of
from gpuworker.execution.grid import Grid, Shape
from gpuworker.execution.program import batch_arrays
from gpuworker.execution.rows import Aimed, Fields, place
from gpuworker.tensors import Signature

log = logging.getLogger("gpuworker")

WARM_LIMIT_S = 10.0
_UNMARKED = contextlib.nullcontext()


class Engine:
    """Runs batches of one handler on one device. For one thread."""

    def __init__(
        self,
        program: Program,
        signature: Signature,
        grid: Grid,
        device: torch.device,
        *,
        depth: int | None = None,
        graphs: bool = True,
        graph_memory_bytes: int | None = None,
        state: Callable[[], list[torch.Tensor]] = list,
        tolerance: float | None = None,
    ) -> None:
        """For the parameters after `device` see TensorHandler; tolerance: see CudaExecutor.

        Raises RuntimeError and ValueError for a device, a grid or a signature that cannot be.
        """
        self.signature, self.grid, self.device = signature, grid, device
        program = _not_in_children(program)
        dims = signature.dims
        self._inputs = Fields(signature.inputs, not signature.single_input, dims, signature.max_extents)
        self._outputs = Fields(signature.outputs, not signature.single_output, dims, {})
        arrays = batch_arrays(signature)
        self.executor: Executor
        if device.type == "cuda":
            self.executor = CudaExecutor(
                program, arrays, dims, grid.shapes(), device=device, depth=depth or 2, graphs=graphs, graph_memory_bytes=graph_memory_bytes, state=state,
                example=self._fill, tolerance=tolerance,
            )  # fmt: skip
        else:
            self.executor = CpuExecutor(program, arrays, dims, depth or 1)
        self.depth = self.executor.depth
        self._is_profiled = device.type == "cuda"
        self._gathers: list[dict[Shape, Aimed]] = [{} for _ in range(self.depth)]
        self._scatters: list[dict[Shape, Aimed]] = [{} for _ in range(self.depth)]

    def reader(self) -> Any:
        """A gw_rows for gw_read_rows."""
        return self._inputs.describe()

    def gather(self, lane: int, shape: Shape, rows: Any, n: int) -> int:
        """Fills the lane's inputs with a gw_row[n] and padding. -> bytes filled."""
        arrays = self.executor.inputs(lane, shape)
        aimed = _aimed(self._gathers[lane], self._inputs, shape, arrays)
        lib.gw_gather(aimed.rows, rows, n)
        return aimed.size_bytes

    def results(self, lane: int, shape: Shape) -> tuple[Aimed, Mapping[str, Array]]:
        """Waits for the lane's batch. -> its outputs, to be scattered, and as they are. Raises what the run raised."""
        outputs = self.executor.wait(lane)
        return _aimed(self._scatters[lane], self._outputs, shape, outputs), outputs

    def row(self, outputs: Mapping[str, Array], i: int, extents: Sequence[int]) -> Any:
        """The answer to request i of a batch, as a copy: an array, or a dict of arrays."""
        dims, answer = self.signature.dims, {}
        for name, spec in self.signature.outputs.items():
            own = tuple(slice(extents[dims.index(extent)]) if isinstance(extent, str) else slice(None) for extent in spec.shape)
            answer[name] = np.array(outputs[name][i][own])
        return answer["output"] if self.signature.single_output else answer

    def run(self, requests: Sequence[Any]) -> list[Any]:
        """Answers to requests from anywhere, on lane 0, which nothing may be on. Raises InvalidRequest, and what the program raises."""
        answers: list[Any] = []
        for start in range(0, len(requests), self.grid.largest):
            part = requests[start : start + self.grid.largest]
            rows, kept, found = ffi.new("gw_row[]", len(part)), [], []
            for i, request in enumerate(part):
                canonical, extents = self.signature.check(request)
                kept.append(self.place(rows[i], canonical, extents))
                found.append(extents)
            outputs = self.run_rows(rows, len(part), self.grid.shape(len(part), [max(column) for column in zip(*found, strict=True)]))
            answers += [self.row(outputs, i, extents) for i, extents in enumerate(found)]
            del kept
        return answers

    def run_rows(self, rows: Any, n: int, shape: Shape) -> Mapping[str, Array]:
        """Outputs [rows, ...] of a gw_row[n], on lane 0, which nothing may be on."""
        self.gather(0, shape, rows, n)
        self.executor.launch(0, shape)
        return self.executor.wait(0)

    def place(self, row: Any, canonical: Any, extents: Sequence[int]) -> Any:
        """Makes a gw_row of a checked request. -> what has to be kept as long as that is used."""
        values = {"input": canonical} if self.signature.single_input else canonical
        return place(row, self.signature.inputs, values, extents)

    def warm(self) -> None:
        """Runs every shape of the grid once, the largest first, as far as WARM_LIMIT_S goes: what is slow the first time has been slow before anybody waits.

        Raises RuntimeError where the device's memory is too small for the largest, and what the program raises for rows of padding.
        """
        end_s = time.monotonic() + WARM_LIMIT_S
        rows = ffi.new("gw_row[]", 1)
        for shape in self.grid.shapes():
            if time.monotonic() > end_s:
                log.info("not every shape of batches was tried at the start: that takes more than %g s", WARM_LIMIT_S)
                return
            try:
                self.run_rows(rows, 0, shape)
            except Exception as error:
                if kind_of(error) is not Failure.OUT_OF_MEMORY:
                    raise
                raise RuntimeError(
                    f"too little memory on {self.device} for a batch of {shape.rows} rows"
                    + "".join(f" x {extent}" for extent in shape.extents)
                    + ": lower max_batch_size, max_extents or length_buckets"
                ) from error

    def _fill(self, shape: Shape, arrays: dict[str, Array]) -> None:
        """A batch of padding rows, in any arrays of a batch of this shape."""
        lib.gw_gather(self._inputs.aimed(shape, arrays).rows, ffi.new("gw_row[]", 1), 0)

    def example_bytes(self, extents: Sequence[int]) -> int:
        """Size of a request with these extents."""
        dims = self.signature.dims
        return sum(
            spec.numpy_dtype.itemsize * prod(extents[dims.index(one)] if isinstance(one, str) else one for one in spec.shape)
            for spec in self.signature.inputs.values()
        )

    def example(self, extents: Sequence[int]) -> Any:
        """A request of padding."""
        dims, arrays = self.signature.dims, {}
        for name, spec in self.signature.inputs.items():
            shape = tuple(extents[dims.index(extent)] if isinstance(extent, str) else extent for extent in spec.shape)
            arrays[name] = np.full(shape, spec.pad_value, spec.numpy_dtype)
        return arrays["input"] if self.signature.single_input else arrays

    def marked(self, words: str) -> Any:
        """A context that shows up under these words in the device's profiler."""
        return torch.cuda.nvtx.range(words) if self._is_profiled else _UNMARKED

    def close(self) -> None:
        """Nothing runs, and nothing will."""
        self.executor.close()


def _not_in_children(program: Program) -> Program:
    """A handler that forks, and returns in its child too, must not go on there as a second owner."""

    def guarded(inputs: Tensors) -> Tensors:
        pid = os.getpid()
        try:
            return program(inputs)
        finally:
            if os.getpid() != pid:
                os._exit(os.EX_SOFTWARE)

    return guarded


def _aimed(known: dict[Shape, Aimed], fields: Fields, shape: Shape, arrays: Mapping[str, Array]) -> Aimed:
    found = known.get(shape)
    if found is None:
        if len(known) >= MOST_VIEWS:
            known.clear()
        found = known[shape] = fields.aimed(shape, arrays)
    else:
        found.aim(arrays)
    return found
