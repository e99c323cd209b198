"""Padded batches on the CPU: the same static shapes and the same memory for each of them as on a GPU."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from gpuworker.execution.buffers import Buffers, as_arrays, on_host
from gpuworker.execution.executor import Array, BatchArray, Program, Tensors, Usage
from gpuworker.execution.grid import Shape

_NOTHING: dict[str, Array] = {}


class CpuExecutor:
    """An Executor. With one lane batches run in the owner's thread; with more, in a thread of their own, in the order of their launches."""

    def __init__(self, program: Program, arrays: Sequence[BatchArray], dims: tuple[str, ...], depth: int = 1) -> None:
        self._program, self.depth = program, depth
        self._lanes = [_Lane(Buffers(arrays, dims, on_host)) for _ in range(depth)]
        self._usage = Usage()
        self._notify: Callable[[], None] = _ignore
        self._launched: queue.SimpleQueue[_Lane | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_all, name="gpuworker-device", daemon=True) if depth > 1 else None
        if self._thread is not None:
            self._thread.start()

    def inputs(self, lane: int, shape: Shape) -> dict[str, Array]:
        """See Executor.inputs."""
        return self._lanes[lane].arrays(shape)

    def launch(self, lane: int, shape: Shape) -> None:
        """See Executor.launch."""
        place = self._lanes[lane]
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
            outputs = as_arrays(self._program(dict(place.inputs)))
            if self._thread is not None:  # the program may have returned a buffer of its own, and writes the next lane's outputs there
                outputs = {name: array.copy() for name, array in outputs.items()}
            place.outputs = outputs
        except BaseException as error:
            place.error, place.outputs = error, _NOTHING
        self._usage.device_ns += time.perf_counter_ns() - began_ns


class _Lane:
    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._arrays: tuple[Tensors, dict[str, Array]] = {}, {}
        self.inputs: Tensors = {}
        self.outputs = _NOTHING
        self.error: BaseException | None = None
        self.is_done = threading.Event()
        self.is_done.set()

    def arrays(self, shape: Shape) -> dict[str, Array]:
        """The inputs for the next batch, of this shape; as a program they are `inputs`."""
        self.inputs = self._buffers.of(shape)
        if self._arrays[0] is not self.inputs:
            self._arrays = self.inputs, as_arrays(self.inputs)
        return self._arrays[1]


def _ignore() -> None:
    pass
