"""One place in CUDA's pipeline: a batch's memory on both sides, and the events that order its way."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from gpuworker.execution.buffers import MOST_VIEWS, Buffers, as_arrays
from gpuworker.execution.executor import Array, BatchArray, Tensors
from gpuworker.execution.grid import Shape


class Span(NamedTuple):
    """When a batch was where, in ms since the executor's start."""

    to_device: tuple[float, float]
    program: tuple[float, float]
    from_device: tuple[float, float]


class Views(NamedTuple):
    """A lane's inputs as a batch of one shape sees them."""

    host: Tensors
    device: Tensors
    arrays: dict[str, Array]
    """`host`, for numpy."""
    size_bytes: int


class Lane:
    """Buffers only grow; each is flat, and a batch uses its beginning. Whoever calls has waited for the lane's last batch, so nothing is in use on the device
    when it is grown or filled.
    """

    def __init__(self, arrays: list[BatchArray], dims: tuple[str, ...], device: torch.device, api: Any) -> None:
        pin = device.type == "cuda"
        self._host = Buffers(arrays, dims, lambda count, dtype: torch.zeros(count, dtype=dtype, pin_memory=pin))
        self._on_device = Buffers(arrays, dims, lambda count, dtype: torch.empty(count, dtype=dtype, device=device))
        self._views: dict[Shape, Views] = {}
        self._outputs = Outputs(device, pin=False)
        self._results = Outputs(torch.device("cpu"), pin)
        self.sent, self.ran, self.received = (
            # Whoever waits for the end sleeps: spinning would take a core from the frontends for as long as batches run.
            (api.Event(enable_timing=True), api.Event(enable_timing=True, blocking=True))
            for _ in range(3)
        )
        """Pairs of events, around the copies to the device, the program, and the copies back; each on the stream of what it is around."""
        self.is_running = False
        self.results: Tensors = {}
        """Outputs of the batch on its way, in host memory."""
        self.to_device_bytes = 0
        self._answered: Tensors | None = None
        self._answers: dict[str, Array] = {}

    def grow(self, shape: Shape) -> None:
        """Makes room for inputs of this shape. Device memory comes from the current stream's share of the allocator, which is to be the one that fills it."""
        self._host.reserve(shape)
        self._on_device.reserve(shape)

    def views(self, shape: Shape) -> Views:
        """The inputs of a batch of this shape, for which there is room."""
        host, known = self._host.of(shape), self._views.get(shape)
        if known is None or known.host is not host:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            known = Views(host, self._on_device.of(shape), as_arrays(host), sum(value.nbytes for value in host.values()))
            self._views[shape] = known
        return known

    def own_outputs(self, like: Tensors) -> Tensors:
        """Device memory of the lane's own, for outputs such as these."""
        return self._outputs.like(like)

    def host_outputs(self, like: Tensors) -> Tensors:
        """Host memory for outputs such as these."""
        return self._results.like(like)

    def answers(self) -> dict[str, Array]:
        """The results, for numpy: the same dict as long as it is of the same arrays."""
        if self._answered is not self.results:
            self._answered = self.results
            self._answers = {name: value.numpy() for name, value in self.results.items()}
        return self._answers


class Outputs:
    """Flat buffers for outputs, by name, made as large as they come."""

    def __init__(self, device: torch.device, pin: bool) -> None:
        self._device, self._pin = device, pin
        self._bytes: Tensors = {}
        self._last: Tensors = {}

    def like(self, values: Tensors) -> Tensors:
        """Tensors of the same shapes and dtypes, in the buffers; the same dict as for the last batch, if that was of the same shape."""
        last = self._last
        if last.keys() != values.keys() or any(last[name].shape != value.shape or last[name].dtype != value.dtype for name, value in values.items()):
            self._last = {}
            self._last = {name: self._room(name, value) for name, value in values.items()}
        return self._last

    def _room(self, name: str, value: torch.Tensor) -> torch.Tensor:
        size_bytes, held = value.nbytes, self._bytes.get(name)
        if held is None or held.numel() < size_bytes:
            del held
            self._bytes.pop(name, None)  # not both at a time
            held = self._bytes[name] = torch.empty(size_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._pin)
        return held[:size_bytes].view(value.dtype).view(value.shape)


def device_bytes(arrays: list[BatchArray], dims: tuple[str, ...], shapes: list[Shape]) -> int:
    """Of buffers in which the inputs of each of the shapes have room."""
    return sum(np.dtype(array.dtype).itemsize * max((prod(array.shape(shape, dims)) for shape in shapes), default=0) for array in arrays)
