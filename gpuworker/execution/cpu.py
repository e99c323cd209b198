"""Padded batches on the CPU: the same static shapes and the same memory for each of them as on a GPU."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gpuworker.execution.executor import Array, BatchArray, Program, Tensors, Usage
from gpuworker.execution.grid import Shape
from gpuworker.payload.arrays import LINE

_NOTHING: dict[str, Array] = {}


class HostArrays:
    """Memory for the inputs of one lane's batches: one buffer per input, grown when a shape needs more, of which each shape's array is the front."""

    def __init__(self, arrays: Sequence[BatchArray], dims: tuple[str, ...], allocate: Callable[[int], Array]) -> None:
        """allocate(bytes) -> uint8 array on a cache line."""
        self._arrays, self._dims, self._allocate = arrays, dims, allocate
        self._buffers = {array.name: allocate(0) for array in arrays}
        self._views: dict[Shape, dict[str, Array]] = {}

    def of(self, shape: Shape) -> dict[str, Array]:
        """The same dict for the same shape, as long as no buffer had to grow. Owner's thread only."""
        found = self._views.get(shape)
        if found is None:
            found = self._views[shape] = self._made(shape)
        return found

    def _made(self, shape: Shape) -> dict[str, Array]:
        views = {}
        for array in self._arrays:
            extents = array.shape(shape, self._dims)
            size = array.dtype.itemsize * int(np.prod(extents, dtype=np.int64))
            if size > self._buffers[array.name].nbytes:
                self._buffers[array.name] = self._allocate(size)
                self._views.clear()  # they are of the old buffer
            views[array.name] = self._buffers[array.name][:size].view(array.dtype).reshape(extents)
        return views


def aligned(size: int) -> Array:
    """uint8 [size] of zeros, on a cache line."""
    memory = np.zeros(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size]


class CpuExecutor:
    """An Executor. With one lane batches run in the owner's thread; with more, in a thread of their own, in the order of their launches."""

    def __init__(self, program: Program, arrays: Sequence[BatchArray], dims: tuple[str, ...], depth: int = 1) -> None:
        self._program, self.depth = program, depth
        self._lanes = [_Lane(HostArrays(arrays, dims, aligned)) for _ in range(depth)]
        self._usage = Usage()
        self._notify: Callable[[], None] = _ignore
        self._launched: queue.SimpleQueue[_Lane | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_all, name="gpuworker-device", daemon=True) if depth > 1 else None
        if self._thread is not None:
            self._thread.start()

    def inputs(self, lane: int, shape: Shape) -> dict[str, Array]:
        """See Executor.inputs."""
        return self._lanes[lane].host.of(shape)

    def launch(self, lane: int, shape: Shape) -> None:
        """See Executor.launch."""
        place = self._lanes[lane]
        place.shape = shape
        if self._thread is None:
            self._run(place)
            if place.error is not None:
                error, place.error = place.error, None
                raise error
        else:
            place.is_done.clear()
            self._launched.put(place)

    def is_done(self, lane: int) -> bool:
        """See Executor.is_done."""
        return self._lanes[lane].is_done.is_set()

    def wait(self, lane: int) -> dict[str, Array]:
        """See Executor.wait."""
        place = self._lanes[lane]
        place.is_done.wait()
        error, place.error = place.error, None
        if error is not None:
            raise error
        return place.outputs

    def notify(self, callback: Callable[[], None]) -> None:
        """See Executor.notify."""
        self._notify = callback

    def idle(self) -> bool:
        """See Executor.idle."""
        return False

    def usage(self) -> Usage:
        """See Executor.usage."""
        return self._usage

    def close(self) -> None:
        """See Executor.close."""
        if self._thread is not None:
            self._launched.put(None)
            self._thread.join()
        self._lanes.clear()

    def _run_all(self) -> None:
        torch.set_num_threads(torch.get_num_threads())  # a new thread says the same number, and does not go by it until it is told
        while (place := self._launched.get()) is not None:
            self._run(place)
            place.is_done.set()  # publishes outputs and error to the owner's thread
            self._notify()

    def _run(self, place: _Lane) -> None:
        began_ns = time.perf_counter_ns()
        try:
            outputs = self._program(place.tensors())
            place.outputs = {name: tensor.numpy() for name, tensor in outputs.items()}
        except BaseException as error:
            place.error, place.outputs = error, _NOTHING
        self._usage.device_ns += time.perf_counter_ns() - began_ns


class _Lane:
    def __init__(self, host: HostArrays) -> None:
        self.host = host
        self.shape = Shape(0)
        self.outputs = _NOTHING
        self.error: BaseException | None = None
        self.is_done = threading.Event()
        self.is_done.set()
        self._tensors: dict[Shape, tuple[dict[str, Array], Tensors]] = {}

    def tensors(self) -> Tensors:
        """Of the inputs: the same memory, seen by torch."""
        arrays = self.host.of(self.shape)
        known, tensors = self._tensors.get(self.shape, (None, {}))
        if known is not arrays:
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            self._tensors[self.shape] = arrays, tensors
        return dict(tensors)


def _ignore() -> None:
    pass
