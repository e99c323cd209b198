"""Memory for the inputs of batches: one flat buffer per input, of which each shape's array is the front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch

from gpuworker.execution.executor import Array, BatchArray, Tensors
from gpuworker.execution.grid import Shape
from gpuworker.payload.arrays import LINE

MOST_VIEWS = 1024
"""Shapes whose views are kept."""

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""allocate(count, dtype) -> flat tensor."""


class Buffers:
    """Buffers only grow. Whoever asks for another shape's views has seen to it that nothing uses the memory any more."""

    def __init__(self, arrays: Sequence[BatchArray], dims: tuple[str, ...], allocate: Allocate, *, keeps_old: bool = False) -> None:
        """keeps_old: somebody else (a graph) goes on using a buffer that was too small; the next one is half as large again, so that this is soon over."""
        self._arrays, self._dims, self._allocate, self._keeps_old = list(arrays), dims, allocate, keeps_old
        self._flat: Tensors = {}
        self._views: dict[Shape, Tensors] = {}

    def reserve(self, shape: Shape) -> None:
        """Makes room for a shape."""
        for array in self._arrays:
            count = prod(array.shape(shape, self._dims))
            held = self._flat.get(array.name)
            if held is None or held.numel() < count:
                if held is not None and self._keeps_old:
                    count += count // 2
                del held
                self._views.clear()
                self._flat.pop(array.name, None)  # not both at a time
                self._flat[array.name] = self._allocate(count, torch_dtype(array))

    def of(self, shape: Shape) -> Tensors:
        """[rows, ...] by input. The same dict for the same shape, as long as no buffer has grown."""
        found = self._views.get(shape)
        if found is None:
            self.reserve(shape)
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            found = self._views[shape] = {array.name: self._view(array, shape) for array in self._arrays}
        return found

    def _view(self, array: BatchArray, shape: Shape) -> torch.Tensor:
        extents = array.shape(shape, self._dims)
        return self._flat[array.name][: prod(extents)].view(extents)


def on_host(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on a cache line, not pinned."""
    size = count * dtype.itemsize
    memory = np.zeros(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype)


def as_arrays(tensors: Tensors) -> dict[str, Array]:
    """The same memory, for numpy."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def copy_all(targets: Tensors, sources: Tensors) -> Tensors:
    """On the current stream, without waiting. -> targets."""
    for name, target in targets.items():
        target.copy_(sources[name], non_blocking=True)
    return targets


def torch_dtype(array: BatchArray) -> torch.dtype:
    """Torch's name of an input's dtype."""
    found: torch.dtype = getattr(torch, array.dtype.name)
    return found
