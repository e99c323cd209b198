"""Capturing a program as CUDA graphs, and telling whether a graph does what the program does."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from gpuworker.execution.executor import Program, Tensors
from gpuworker.execution.failures import first_cause
from gpuworker.execution.graph_state import Snapshot, State

WARM_UPS = 2
"""Runs before a capture: libraries choose algorithms and allocate workspaces in the first ones, and may wait for the device, which a capture must not."""

_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 2e-3, torch.float64: 1e-6, torch.complex64: 2e-3, torch.complex128: 1e-6}


class CaptureError(RuntimeError):
    """The program runs, but cannot be captured. The message says why."""


class Captured:
    """A graph, and what it reads and writes."""

    def __init__(self, graph: Any, inputs: Tensors, outputs: Tensors) -> None:
        # The references keep this memory from being given to anything else: the graph knows it by its addresses.
        self.graph, self.inputs, self.outputs = graph, inputs, outputs
        self.is_checked = False
        """Whether a replay has been compared with an eager run."""


class Capture(NamedTuple):
    """What a capture has cost."""

    captured: Captured
    size_bytes: int
    took_ns: int


class Capturer:
    """Captures one shape after the other, all into one pool of memory. Nothing else may use the device meanwhile."""

    def __init__(self, program: Program, state: State, device: torch.device, stream: Any, api: Any) -> None:
        """stream: where everything is captured and warmed up: graphs that share a pool are to be captured on the same stream. Not the one they run on."""
        self._program, self._state, self._stream = program, state, stream
        self.device, self.api = device, api
        self._pool = api.graph_pool_handle()

    def forget_pool(self) -> None:
        """No graph is left, or a capture has failed in the pool: the next ones get another."""
        self._pool = self.api.graph_pool_handle()

    def capture(self, inputs: Tensors) -> Capture:
        """Captures the program on these inputs, whose contents it may run with (and change). Leaves no trace in state and random numbers.

        Raises what the program raises in warming up, and CaptureError if only the capture fails.
        """
        api = self.api
        began_ns = time.monotonic_ns()
        ours = api.current_stream(self.device)
        snapshot = Snapshot(self._state, self.device, api)
        self._stream.wait_stream(ours)  # the inputs, the snapshot
        try:
            with api.stream(self._stream):
                for _ in range(WARM_UPS):
                    self._program(inputs)
        finally:
            ours.wait_stream(self._stream)
            snapshot.restore()
        if snapshot.is_rebound:
            raise CaptureError("it puts new tensors in the place of its buffers; changing them in place (copy_, add_) can be captured")
        api.synchronize(self.device)
        api.empty_cache()  # what the warm-up has left is not to count
        before_bytes = api.mem_get_info(self.device)[0]
        graph = api.CUDAGraph()
        try:
            # Other threads may use CUDA meanwhile (the completer, a handler's own), which in the global mode would break the capture, or they.
            with api.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = self._program(inputs)
        except Exception as error:
            self._recover(ours, graph)
            cause = first_cause(error)
            raise CaptureError(f"{type(cause).__name__}: {_first_line(cause)}") from error
        finally:
            snapshot.restore()
        if snapshot.is_rebound:
            self._recover(ours, graph)
            raise CaptureError("it puts new tensors in the place of its buffers when it is captured")
        api.synchronize(self.device)
        size_bytes = max(before_bytes - api.mem_get_info(self.device)[0], 0)
        return Capture(Captured(graph, inputs, outputs), size_bytes, time.monotonic_ns() - began_ns)

    def release(self, captured: Captured) -> int:
        """Gives a graph's memory back. -> bytes that are free again; what other graphs use too is not."""
        self.api.synchronize(self.device)
        before_bytes = self.api.mem_get_info(self.device)[0]
        captured.inputs, captured.outputs = {}, {}
        captured.graph.reset()
        self.api.empty_cache()
        return max(int(self.api.mem_get_info(self.device)[0] - before_bytes), 0)

    def _recover(self, ours: Any, graph: Any) -> None:
        """After a failed capture. If ending it failed as well, torch's context manager has left the capture's stream as the current one."""
        self.api.set_stream(ours)
        self.forget_pool()
        graph.reset()
        # In some versions of torch (pytorch issue 171263) a failed capture leaves the random number generator in its capturing state, and the next eager
        # torch.rand fails. A capture that succeeds, of next to nothing, ends that.
        with self.api.graph(self.api.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)


def agree(expected: Tensors, found: Tensors, tolerance: float | None) -> str | None:
    """None if two runs' outputs are equal but for rounding; else in what they differ. Waits for the device.

    tolerance: relative to the largest value of an output; None: what suits its dtype. Whole numbers must be equal. NaN equals NaN.
    """
    for name, value in expected.items():
        other = found[name]
        if value.shape != other.shape or value.dtype != other.dtype:
            return f"{name} is {other.dtype} {list(other.shape)} instead of {value.dtype} {list(value.shape)}"
        if value.numel() == 0:
            continue
        if not (value.is_floating_point() or value.is_complex()):
            same = torch.equal(value, other)
        else:
            limit = _TOLERANCES.get(value.dtype, 5e-2) if tolerance is None else tolerance
            wide = torch.complex128 if value.is_complex() else torch.float64
            value, other = value.to(wide), other.to(wide)
            size = torch.nan_to_num(value.abs(), 0.0, 0.0, 0.0).max().item()
            same = torch.allclose(other, value, rtol=limit, atol=limit * size, equal_nan=True)
        if not same:
            return f"{name} differs"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
