"""CUDA's executor: pinned staging, three streams, and CUDA graphs where a program allows them."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from gpuworker.execution.buffers import Buffers, copy_all
from gpuworker.execution.cuda_lane import Lane, Span, device_bytes
from gpuworker.execution.executor import Array, BatchArray, Program, Usage
from gpuworker.execution.failures import Failure, check_memory, kind_of
from gpuworker.execution.graph_capture import Capturer
from gpuworker.execution.graphed_program import Example, GraphedProgram, free_after, words
from gpuworker.execution.grid import Shape

log = logging.getLogger("gpuworker")

CLOSE_LIMIT_S = 5.0
"""Longest that a device that hangs may hold up the end."""
GRAPH_SHARE = 4
"""Graphs may take one part in so many of the memory that is free at the start, unless told otherwise."""


class CudaExecutor:
    """See Executor. A batch goes through three streams: its inputs are copied to the device, the program runs, its outputs are copied back; each step waits
    for the one before it by an event, so that the copies of one lane's batch run beside another's program.

    Who overwrites what, and why nobody still needs it then:

    - A lane's host and device inputs, its device outputs and its host outputs: only its next batch, which is launched after the host has waited for the
      end of its last one. That end comes after the copy back, which comes after the program, which comes after the copy to the device.
    - The graphs' static inputs: the copies before the next replay, which come later on the compute stream than the last one.
    - What a program returns may be a graph's static output, a buffer of the module, or memory that the allocator gives to the next run: all of it is
      overwritten in the order of the compute stream, and is copied to the lane's own device outputs there. So no memory that the program has made is used
      on another stream, and record_stream is not needed (it would hold memory for longer, and in a process in which a capture has failed for ever).
    - Memory that the allocator hands out was freed in the order of the same stream: each buffer is made in the stream that writes it first, and is given
      back only when the host has waited for all of its uses.
    """

    def __init__(
        self,
        program: Program,
        arrays: list[BatchArray],
        dims: tuple[str, ...],
        shapes: Sequence[Shape],
        *,
        device: str | torch.device = "cuda:0",
        depth: int = 2,
        graphs: bool = True,
        graph_memory_bytes: int | None = None,
        state: Callable[[], list[torch.Tensor]] = list,
        example: Example | None = None,
        tolerance: float | None = None,
        log: logging.Logger = log,
        api: Any = torch.cuda,
    ) -> None:
        """shapes: the grid, which graphs are captured for; may be empty. state: tensors that the program may change in place (a module's buffers).

        example: fills host arrays with a batch that the program can run, to be captured with where there is no real one; None: zeros.
        tolerance: by which a graph's outputs may differ from an eager run's, relative to the largest value; None: by their dtype.
        api: torch.cuda, or what tests put in its place.
        Raises RuntimeError where the device's memory is too small for the grid's inputs.
        """
        self.depth = depth
        self.timeline: list[Span] | None = None
        """Put a list here to have every batch's times appended."""
        self._api, self._log, self._device = api, log, torch.device(device)
        if self._device.type == "cuda":
            api.set_device(self._device)
        shapes = list(shapes)
        lane_bytes = device_bytes(arrays, dims, shapes)
        check_memory(lane_bytes, depth, lane_bytes if graphs else 0, self._device, api)
        self._copy_in, self._compute, self._copy_out = (api.Stream(device=self._device) for _ in range(3))
        self._lanes = [Lane(arrays, dims, self._device, api) for _ in range(depth)]
        with api.stream(self._copy_in):
            for shape, lane in product(shapes, self._lanes):
                lane.grow(shape)
        free_bytes, self._total_bytes = api.mem_get_info(self._device)
        limit_bytes = free_bytes // GRAPH_SHARE if graph_memory_bytes is None else graph_memory_bytes
        static = Buffers(arrays, dims, self._on_device, keeps_old=True)
        capturer = Capturer(program, state, self._device, api.Stream(device=self._device), api)
        self._graphs = GraphedProgram(program, state, shapes if graphs else [], static, capturer, limit_bytes, example, tolerance, log)
        if graphs:
            with api.stream(self._compute):
                for shape in shapes:
                    static.reserve(shape)
        else:
            self._graphs.give_up()
        self._usage = Usage()
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._completer: threading.Thread | None = None
        self._start = api.Event(enable_timing=True)
        self._start.record(self._compute)
        api.synchronize(self._device)  # weights that were loaded on another stream are there now

    def _on_device(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=self._device)

    def inputs(self, lane: int, shape: Shape) -> dict[str, Array]:
        """See Executor.inputs. The arrays are pinned."""
        with self._api.stream(self._copy_in):
            self._lanes[lane].grow(shape)
        return self._lanes[lane].views(shape).arrays

    def launch(self, lane: int, shape: Shape) -> None:
        """See Executor.launch. Returns when everything is queued; the first replay of a graph is compared with an eager run, and waited for."""
        place, api = self._lanes[lane], self._api
        if place.is_running:
            raise RuntimeError(f"lane {lane} was not waited for")
        views = place.views(shape)
        api.nvtx.range_push(f"gpuworker launch {words(shape)}")
        try:
            with torch.inference_mode(), api.stream(self._copy_in):
                place.sent[0].record(self._copy_in)
                copy_all(views.device, views.host)
                place.sent[1].record(self._copy_in)
            self._compute.wait_event(place.sent[1])
            with api.stream(self._compute):
                place.ran[0].record(self._compute)
                outputs = self._graphs.run(views.device, shape)
                with torch.inference_mode():
                    own = copy_all(place.own_outputs(outputs), outputs)
                place.ran[1].record(self._compute)
            self._copy_out.wait_event(place.ran[1])
            with torch.inference_mode(), api.stream(self._copy_out):
                place.results = place.host_outputs(own)
                place.received[0].record(self._copy_out)
                copy_all(place.results, own)
                place.received[1].record(self._copy_out)
        except BaseException as error:
            self._clean_up(error)
            raise
        finally:
            api.nvtx.range_pop()
        place.is_running, place.to_device_bytes = True, views.size_bytes
        if self._completer is not None:
            self._ended.put(place.received[1])

    def is_done(self, lane: int) -> bool:
        """See Executor.is_done."""
        try:
            return bool(self._lanes[lane].received[1].query())
        except Exception:
            return True  # a sticky error: `wait` raises it

    def wait(self, lane: int) -> dict[str, Array]:
        """See Executor.wait."""
        place = self._lanes[lane]
        if not place.is_running:
            raise RuntimeError(f"lane {lane} was not launched")
        place.is_running = False
        place.received[1].synchronize()
        self._account(place)
        return place.answers()

    def notify(self, callback: Callable[[], None]) -> None:
        """See Executor.notify. Called from a thread of the executor's own, for batches that are launched from now on."""
        if self._completer is not None:
            raise RuntimeError("notify was called already")
        self._completer = threading.Thread(target=self._complete, args=(callback,), name="gpuworker-completer", daemon=True)
        self._completer.start()

    def idle(self) -> bool:
        """See Executor.idle. Captures one graph, the largest shape of the grid first. Waits for what is on its way."""
        with self._api.stream(self._compute):
            return self._graphs.capture_next()

    def usage(self) -> Usage:
        """See Executor.usage."""
        usage, api = self._usage, self._api
        cache = self._graphs.cache
        usage.graph_hits, usage.graph_misses, usage.graphs, usage.graph_bytes = cache.hits, cache.misses, len(cache), cache.bytes
        usage.memory_bytes, usage.memory_reserved_bytes = api.memory_allocated(self._device), api.memory_reserved(self._device)
        usage.memory_total_bytes = self._total_bytes
        return usage

    @property
    def eager_because(self) -> str | None:
        """Why the program runs without graphs although they were asked for."""
        return self._graphs.cache.reason or None

    def close(self) -> None:
        """See Executor.close. Safe to call again, and on a device that is lost."""
        if self._completer is not None:
            self._ended.put(None)
            self._completer.join(CLOSE_LIMIT_S)
            self._completer = None
        with contextlib.suppress(Exception):
            self._api.synchronize(self._device)
        with contextlib.suppress(Exception):
            self._graphs.give_up()
        self._lanes = []
        with contextlib.suppress(Exception):
            self._api.empty_cache()

    def _clean_up(self, error: BaseException) -> None:
        """A launch has failed: nothing of it is to be on its way, and after an error of memory there is to be more of it the next time."""
        for stream in (self._copy_in, self._compute, self._copy_out):
            with contextlib.suppress(Exception):  # a lost device; `error` says so, too
                stream.synchronize()
        if kind_of(error) is Failure.OUT_OF_MEMORY:
            free_after(error, self._api)

    def _account(self, place: Lane) -> None:
        usage = self._usage
        usage.to_device_ns += _ns(*place.sent)
        usage.device_ns += _ns(*place.ran)
        usage.from_device_ns += _ns(*place.received)
        usage.to_device_bytes += place.to_device_bytes
        usage.from_device_bytes += sum(value.nbytes for value in place.results.values())
        if self.timeline is not None:
            at = self._start.elapsed_time
            self.timeline.append(Span(*((at(pair[0]), at(pair[1])) for pair in (place.sent, place.ran, place.received))))

    def _complete(self, callback: Callable[[], None]) -> None:
        if self._device.type == "cuda":
            self._api.set_device(self._device)
        while (event := self._ended.get()) is not None:
            with contextlib.suppress(Exception):  # the owner gets it from `wait`
                event.synchronize()
            try:
                callback()
            except Exception:
                self._log.exception("a callback for batches that have ended failed")


def _ns(began: Any, ended: Any) -> int:
    milliseconds: float = began.elapsed_time(ended)
    return round(milliseconds * 1e6)
