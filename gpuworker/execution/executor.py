"""What runs padded batches: the seam between the owner's loop and a device. Two implementations, cpu.py and cuda.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from gpuworker.execution.grid import Shape

Array = np.ndarray[Any, Any]
Tensors = dict[str, torch.Tensor]
Program = Callable[[Tensors], Tensors]
"""A handler's forward, made uniform: every input (arrays, masks, lengths) by name -> every output by name, contiguous, of its declared dtype, [rows, ...]."""


class BatchArray(NamedTuple):
    """One input of a program: the arrays of a declared input, a mask, or lengths."""

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int | str, ...]
    """Without the batch dimension; strings are named dimensions."""

    def shape(self, shape: Shape, names: tuple[str, ...]) -> tuple[int, ...]:
        """[rows, ...] in a batch padded to `shape`; names: Signature.dims."""
        return (shape.rows, *(shape.extents[names.index(dim)] if isinstance(dim, str) else dim for dim in self.dims))


@dataclasses.dataclass
class Usage:
    """What an executor has done since its start. 0 where that does not apply to its device."""

    device_ns: int = 0
    """Time that programs took on the device."""
    to_device_ns: int = 0
    to_device_bytes: int = 0
    from_device_ns: int = 0
    from_device_bytes: int = 0
    graph_hits: int = 0
    """Batches that were replays of a CUDA graph."""
    graph_misses: int = 0
    """Batches that were run eagerly although graphs are on."""
    graphs: int = 0
    """Captured and kept now."""
    graph_bytes: int = 0
    memory_bytes: int = 0
    """Allocated on the device now, by this process."""
    memory_reserved_bytes: int = 0
    memory_total_bytes: int = 0


class Executor(Protocol):
    """Runs padded batches. Lanes are places in its pipeline, used in turn; each has memory of its own. All for the owner's thread."""

    depth: int
    """Lanes: batches that may be on their way at a time."""

    def inputs(self, lane: int, shape: Shape) -> dict[str, Array]:
        """Host arrays for the lane's next batch, C-contiguous (pinned where that helps). They are views of the same memory for every shape, and hold what
        an earlier batch has left there. Only for a lane with nothing on its way."""
        ...

    def launch(self, lane: int, shape: Shape) -> None:
        """Starts the batch that inputs(lane, shape) now hold. May raise what the program raises; then nothing is on its way."""
        ...

    def is_done(self, lane: int) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self, lane: int) -> dict[str, Array]:
        """Waits for the lane's batch. -> outputs [rows, ...] in host memory, valid until the lane is launched again. Raises what the run raised."""
        ...

    def notify(self, callback: Callable[[], None]) -> None:
        """Has `callback` called, from any thread, whenever a batch has ended. A synchronous executor never does."""
        ...

    def idle(self) -> bool:
        """Nothing is queued: does one piece of work that is to be done some time (captures one graph). -> whether there is more."""
        ...

    def usage(self) -> Usage:
        """Counters."""
        ...

    def close(self) -> None:
        """Gives everything back. When nothing is on its way."""
        ...
