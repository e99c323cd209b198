"""torch.cuda without a GPU: streams, events and graphs over CPU tensors, as asynchronous as the real ones, but deterministic.

Tensors made with device=DEVICE count as being on the device. What is called on them inside `api.stream(...)` is queued, and run only when somebody waits for
it: as late as possible, or (with a seed) at random times that the streams and events allow. So a missing wait is a read of garbage. While a graph is captured
calls are recorded with the tensors that they used, and replay runs those again. What a capture must not do raises what CUDA raises.
"""

import random
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gpuworker.execution import graph_capture, graphed_program

DEVICE = torch.device("cpu", 0)
GARBAGE = 0x7B
GRAPH_BYTES = 1000

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
INVALIDATED = "CUDA error: operation failed due to a previous error during capture"
ASSERTED = "CUDA error: device-side assert triggered"
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate"

_elsewhere = ThreadPoolExecutor(1, "fake-cuda")
"""Runs what was queued: modes are a thread's own, and none of the caller's is to meet it."""


class FakeCuda:
    """What CudaExecutor takes as `api`."""

    def __init__(self, seed=None, total_bytes=1 << 30):
        self.random = random.Random(seed) if seed is not None else None
        self.total_bytes, self.largest_bytes = total_bytes, total_bytes
        self._storages = {}
        self._lock = threading.RLock()
        self._local = threading.local()
        self.ticks, self.streams = 0, []
        self.lost = None
        self.host_ns = 0
        """What launching has taken the host: 1 ns a call or replay."""
        self.captures = self.replays = self.failed_captures = 0
        self.living_graphs = 0
        self.seed, self.offset, self.is_generator_stuck = 1, 0, False
        self.Stream, self.Event = partial(Stream, self), partial(Event, self)
        self.CUDAGraph, self.graph = partial(Graph, self), partial(Capture, self)
        self.ranges = []
        self.nvtx = SimpleNamespace(range_push=self.ranges.append, range_pop=lambda: None)
        self.default = Stream(self)

    # The module's functions.

    def set_device(self, device):
        pass

    def current_stream(self, device=None):
        return getattr(self._local, "stream", self.default)

    def set_stream(self, stream):
        self._local.stream = stream

    def stream(self, stream):
        return _Within(self, stream)

    def synchronize(self, device=None):
        self._refuse_in_capture()
        with self._lock:
            for stream in self.streams:
                self._drain(stream)
            self._raise_lost()

    def empty_cache(self):
        pass

    def memory_allocated(self, device=None):
        self._storages = {key: (ref, size) for key, (ref, size) in self._storages.items() if not ref.expired()}
        return sum(size for _, size in self._storages.values())

    memory_reserved = memory_allocated

    def mem_get_info(self, device=None):
        return self.total_bytes - self.memory_allocated() - GRAPH_BYTES * self.living_graphs, self.total_bytes

    def graph_pool_handle(self):
        return object()

    def get_rng_state(self, device=None):
        self._refuse_in_capture()
        return torch.tensor([self.seed, self.offset])

    def set_rng_state(self, state, device=None):
        self._refuse_in_capture()
        self.seed, self.offset = state.tolist()

    # For tests.

    def time(self, monkeypatch):
        """Has the executor read `host_ns` for the time: what it decides then is always the same."""
        for module in (graph_capture, graphed_program):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: self.host_ns))

    def put(self, tensor):
        """A copy of it on the device."""
        copy = tensor.clone()
        self._register(copy)
        return copy

    def is_on_device(self, tensor):
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return found is not None and not found[0].expired()

    # Queues.

    def _register(self, tensor):
        storage = tensor.untyped_storage()
        if storage.nbytes() > self.largest_bytes:
            raise torch.OutOfMemoryError(f"{OUT_OF_MEMORY} {storage.nbytes()} bytes")
        self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def _enqueue(self, stream, item):
        with self._lock:
            stream.items.append(item)
            stream.added += 1
            if self.random is not None:
                for _ in range(self.random.randrange(8)):
                    self._step_somewhere()

    def _step_somewhere(self):
        (stream,) = self.random.choices(self.streams, [stream.speed for stream in self.streams])
        if stream.items and not self._is_blocked(stream):
            self._step(stream)

    @staticmethod
    def _is_blocked(stream):
        kind, *rest = stream.items[0]
        return kind == "wait" and rest[0].done < rest[1]

    def _step(self, stream):
        kind, *rest = stream.items[0]
        if kind == "wait":
            self._run_until(*rest)
        stream.items.popleft()
        stream.run += 1
        self.ticks += 1
        if kind == "record":
            event, version = rest
            event.done, event.at = max(event.done, version), self.ticks
        elif kind == "call" and self.lost is None:
            try:
                _elsewhere.submit(_run, rest[0]).result()
            except Exception as error:
                self.lost = error

    def _run_until(self, event, version):
        while event.done < version:
            self._step(event.stream)

    def _drain(self, stream):
        end = stream.added
        while stream.run < end:
            self._step(stream)

    def _raise_lost(self):
        if self.lost is not None:
            raise torch.AcceleratorError(ASSERTED)

    def _refuse_in_capture(self):
        graph = self.current_stream().graph
        if graph is not None:
            graph.is_invalid = True
            raise torch.AcceleratorError(NOT_PERMITTED)

    # Calls on tensors.

    def call(self, func, args, kwargs):
        self.host_ns += 1
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_made_here = kwargs.get("device") == DEVICE
        if not is_made_here and not any(map(self.is_on_device, tensors)):
            return func(*args, **kwargs)  # the host's own
        self._raise_lost()
        returns = func._schema.returns
        if any(value.alias_info is not None and not value.alias_info.is_write for value in returns):
            return func(*args, **kwargs)  # a view
        waits = func is torch.ops.aten.copy_.default and not (len(args) > 2 and args[2]) and not all(map(self.is_on_device, tensors))
        if waits or _tells_host(func, args):
            self._refuse_in_capture()
            with self._lock:
                self._drain(self.current_stream())
                self._raise_lost()
            result = func(*args, **kwargs)
            pytree.tree_map_only(torch.Tensor, self._register, result)
            return result
        return self._later(func, args, kwargs)

    def _later(self, func, args, kwargs):
        stream = self.current_stream()
        on_meta = partial(pytree.tree_map_only, torch.Tensor, _meta)
        planned = func(*on_meta(args), **(on_meta(kwargs) | ({"device": torch.device("meta")} if "device" in kwargs else {})))
        many = isinstance(planned, (tuple, list))
        made, results = [], []
        for k, (value, described) in enumerate(zip(planned if many else [planned], func._schema.returns, strict=True)):
            if described.alias_info is None:
                result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
                result.untyped_storage().fill_(GARBAGE)
                self._register(result)
                made.append((k, result))
            else:
                result = _aliased(func, described, args, kwargs)
            results.append(result)

        def run(base):
            found = _seeded(self.seed + 1_000_003 * (base + number), func, args, kwargs) if is_random else func(*args, **kwargs)
            for k, result in made:
                result.copy_(found[k] if many else found)

        is_random = torch.Tag.nondeterministic_seeded in func.tags
        graph = stream.graph
        number = self.next_number(graph) if is_random else 0
        if graph is not None:
            graph.calls.append(run)
        else:
            self._enqueue(stream, ("call", partial(run, 0)))
        return tuple(results) if many else results[0] if results else None

    def next_number(self, graph):
        if graph is not None:
            graph.numbers += 1
            return graph.numbers - 1
        if self.is_generator_stuck:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.offset += 1
        return self.offset - 1


class OneDevice(FakeCuda):
    """What is made on the device of some tensor is on the simulated one: all of the model's tensors are."""

    def call(self, func, args, kwargs):
        return super().call(func, args, kwargs | {"device": DEVICE} if kwargs.get("device") == torch.device("cpu") else kwargs)


class Stream:
    def __init__(self, api, device=None, priority=0):
        self.api, self.items = api, deque()
        self.added = self.run = 0
        self.graph = None
        self.speed = api.random.choice([1, 50]) if api.random is not None else 1
        api.streams.append(self)

    def wait_event(self, event):
        if event.version:
            self.api._enqueue(self, ("wait", event, event.version))

    def wait_stream(self, other):
        event = Event(self.api)
        event.record(other)
        self.wait_event(event)

    def synchronize(self):
        self.api._refuse_in_capture()
        with self.api._lock:
            self.api._drain(self)
            self.api._raise_lost()


class Event:
    def __init__(self, api, enable_timing=False, blocking=False):
        self.api, self.version, self.done, self.at, self.stream = api, 0, 0, None, None

    def record(self, stream):
        self.version, self.stream = self.version + 1, stream
        self.api._enqueue(stream, ("record", self, self.version))

    def synchronize(self):
        with self.api._lock:
            if self.version:
                self.api._run_until(self, self.version)
            self.api._raise_lost()

    def query(self):
        with self.api._lock:
            if self.done < self.version:
                self.api._step(self.stream)
            self.api._raise_lost()
            return self.done >= self.version

    def elapsed_time(self, end):
        assert None not in (self.at, end.at)
        assert self.at <= end.at
        return float(end.at - self.at)


class Graph:
    def __init__(self, api):
        self.api, self.calls, self.numbers = api, [], 0
        self.is_invalid = self.is_alive = False

    def replay(self):
        assert self.is_alive, "a graph that was reset"
        api = self.api
        api.replays += 1
        api.host_ns += 1
        base, api.offset = api.offset, api.offset + self.numbers
        for call in self.calls:
            api._enqueue(api.current_stream(), ("call", partial(call, base)))

    def reset(self):
        self.api.living_graphs -= self.is_alive
        self.calls, self.is_alive = [], False

    def __del__(self):
        self.reset()


class Capture:
    def __init__(self, api, graph, pool=None, stream=None, capture_error_mode="global"):
        assert capture_error_mode == "thread_local"
        self.api, self.graph, self.stream = api, graph, stream

    def __enter__(self):
        self.api.synchronize()
        self.before, self.mode = self.api.current_stream(), _within(self.api)
        self.mode.__enter__()
        self.api.set_stream(self.stream)
        self.stream.graph = self.graph

    def __exit__(self, *args):
        self.mode.__exit__(*args)
        self.stream.graph = None
        if self.graph.is_invalid:  # and the stream stays, as with torch's own
            self.api.failed_captures += 1
            self.api.is_generator_stuck = True
            raise torch.AcceleratorError(INVALIDATED)
        self.api.set_stream(self.before)
        self.api.captures += 1
        self.api.is_generator_stuck = False
        self.graph.is_alive = True
        self.api.living_graphs += 1


class _Within:
    def __init__(self, api, stream):
        self.api, self.stream = api, stream

    def __enter__(self):
        self.before, self.mode = self.api.current_stream(), _within(self.api)
        self.mode.__enter__()
        self.api.set_stream(self.stream)

    def __exit__(self, *args):
        self.mode.__exit__(*args)
        self.api.set_stream(self.before)


class _Mode(TorchDispatchMode):
    def __init__(self, api):
        super().__init__()
        self.api = api

    def __enter__(self):
        self.api._local.depth = getattr(self.api._local, "depth", 0) + 1
        if self.api._local.depth == 1:
            super().__enter__()
        return self

    def __exit__(self, *args):
        self.api._local.depth -= 1
        if self.api._local.depth == 0:
            super().__exit__(*args)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._can_decompose():  # in inference mode they come whole
            with _Again(self):
                return func.decompose(*args, **(kwargs or {}))
        return self.api.call(func, args, kwargs or {})


class _Again:
    """A mode, within itself."""

    def __init__(self, mode):
        self.mode = mode

    def __enter__(self):
        TorchDispatchMode.__enter__(self.mode)

    def __exit__(self, *args):
        TorchDispatchMode.__exit__(self.mode, *args)


def _within(api):
    return api._local.__dict__.setdefault("mode", _Mode(api))


def _run(call):
    with torch.inference_mode():
        call()


def _tells_host(func, args):
    """Whether the result, or its shape, depends on what the tensors hold."""
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype is torch.bool for index in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def _meta(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _aliased(func, described, args, kwargs):
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == described.alias_info.before_set:
            return args[k] if k < len(args) else kwargs[argument.name]
    raise AssertionError(f"{func}: no argument for a result")


def _seeded(seed, func, args, kwargs):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return func(*args, **kwargs)
