"""TensorHandler: what a user writes to have batched tensors run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gpuworker._native import lib
from gpuworker.execution.engine import Engine
from gpuworker.execution.failures import Failure, check_device, kind_of
from gpuworker.execution.grid import Grid, steps_up_to
from gpuworker.execution.program import make_program
from gpuworker.execution.runner import TensorRunner
from gpuworker.scheduling.sizes import doubling
from gpuworker.tensors import Signature, TensorSpec
from gpuworker.worker.options import WorkerOptions

if TYPE_CHECKING:
    from gpuworker.segment import Segment
    from gpuworker.worker.exchange import Exchange
    from gpuworker.worker.runner import Runner

log = logging.getLogger("gpuworker")
MOST_EXAMPLES = 16
EXAMPLE_BYTES = 1 << 26
"""Larger requests of padding are not made up."""
MOST_LANES: int = lib.GW_MAX_DEPTH
HALF_TOLERANCE = 5e-2
"""By which a graph's outputs may differ from an eager run's where the program computes with 16 bits, whatever its outputs' dtypes are."""


class TensorHandler:
    """A model whose requests are arrays of declared shapes. It sees padded batches of tensors on its device, of few different shapes:

        class Scale(gpuworker.TensorHandler):
            inputs = {"x": gpuworker.TensorSpec("float32", ("samples",), mask="mask")}
            outputs = gpuworker.TensorSpec("float32", ("samples",))
            max_extents = {"samples": 48_000}

            def load(self):
                self.model = load_my_model().to(self.resolved_device)

            def forward(self, batch):                       # batch["x"], batch["mask"]: [rows, samples]
                return self.model(batch["x"], batch["mask"])

    Requests and answers are dicts of arrays by name; bare arrays where `inputs` or `outputs` is one TensorSpec, and then forward gets the one tensor. Clients
    check their requests against `inputs` before they send them. A request's named dimensions are padded to its batch's, and answers are cut to the request's
    own. Rows that only fill a batch up to an allowed size hold padding, with a mask and lengths of one element. `forward` runs without gradients.
    """

    inputs: TensorSpec | Mapping[str, TensorSpec]
    outputs: TensorSpec | Mapping[str, TensorSpec]
    max_extents: Mapping[str, int] = {}
    """Largest extent of named dimensions. Without one, a request may be as large as a payload."""
    device: str | None = None
    """ "cpu", "cuda", "cuda:1"; None: cuda if there is one. The worker's option `device` goes before."""
    dtype: str | None = None
    """Floating-point inputs are cast to it on the device, e.g. "bfloat16". Outputs have the dtypes that `outputs` says in any case."""
    compile: bool | dict[str, Any] = False
    """True, or arguments: forward goes through torch.compile."""
    cuda_graphs: bool = True
    """Capture each shape of batches as a CUDA graph where forward allows that. The worker's option `cuda_graphs` goes before."""
    graph_memory_bytes: int | None = None
    """What graphs may take on the device; the least recently used go first. None: a quarter of what is free at the start."""
    pipeline_depth: int | None = None
    """Batches on their way at a time. None: 2 on cuda, 1 on the cpu. The worker's option `pipeline_depth` goes before."""

    _options: WorkerOptions | None = None
    _signature: Signature | None = None
    _engine: Engine | None = None

    def load(self) -> None:
        """Once, in the owner, before anything else: read weights, set `inputs` and so on where they depend on them."""

    def forward(self, batch: Any) -> Any:
        """dict of tensors [rows, ...] on the device (or the one tensor) -> the same of outputs, or a tuple in their order."""
        raise NotImplementedError(f"{type(self).__qualname__} has no forward(batch)")

    def warmup(self) -> Sequence[Any] | None:
        """Requests that are run once before the worker is ready, and that run times are measured with. Here: some of padding, of many extents."""
        engine = self._prepared()
        if not self.signature.dims:
            return [engine.example(())]
        steps = engine.grid.examples(MOST_EXAMPLES)
        examples = [engine.example(extents) for extents in steps if engine.example_bytes(extents) <= EXAMPLE_BYTES]
        try:
            self.run_batch(examples)
        except Exception:
            self._warn_of_padding()
            return None
        return examples

    def example(self, length: int) -> Any:
        """A request of padding whose first named dimension is `length`; for measurements."""
        engine = self._prepared()
        return engine.example(engine.grid.shape(1, [length] * len(self.signature.dims)).extents)

    def length(self, request: Any) -> int:
        """What a request counts for in length_buckets: the extent of the first named dimension."""
        extents = self.signature.check(request)[1]
        return extents[0] if extents else 1

    def state(self) -> list[torch.Tensor]:
        """Tensors that forward changes in place, which trial runs must not change. Here: the buffers of this handler, if it is a module itself, and of all modules
        among its attributes, also in lists, tuples and dicts. Other tensors that forward changes are to be added."""
        if isinstance(self, torch.nn.Module):
            return list(self.buffers())
        found = []
        for value in vars(self).values():
            values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            found += [buffer for one in values if isinstance(one, torch.nn.Module) for buffer in one.buffers()]
        return found

    def close(self) -> None:
        """The worker ends."""

    @property
    def resolved_device(self) -> torch.device:
        """The device that forward gets its tensors on. Raises RuntimeError saying what is missing."""
        name = (self._options.device if self._options else None) or self.device
        return check_device(None if name is None else str(name))

    @property
    def signature(self) -> Signature:
        """Inputs, outputs and extents, checked. After `load`. Raises TypeError or ValueError."""
        found = self._signature
        if found is None:
            for attribute in ("inputs", "outputs"):
                if not hasattr(self, attribute):
                    raise TypeError(
                        f"{type(self).__qualname__} has no {attribute}: declare them, e.g. {attribute} = gpuworker.TensorSpec('float32', (128,))"
                    )
            found = Signature(self.inputs, self.outputs, self.max_extents)
            self._signature = found
        return found

    def contract(self) -> dict[str, Any]:
        """What clients have to know, as plain data."""
        return {**self.signature.to_dict(), "uses_lengths": type(self).length is TensorHandler.length}  # else the owner has to ask `length`

    def run_batch(self, requests: Sequence[Any]) -> list[Any]:
        """Answers to requests, in order, without a worker. Raises InvalidRequest, and what forward raises."""
        return self._prepared().run(requests)

    # For the worker.

    def configure(self, options: WorkerOptions | None) -> None:
        """The worker's options, before `load`."""
        if self._engine is not None:
            self._engine.close()
        self._options, self._signature, self._engine = options, None, None

    def prepare(self) -> None:
        """After `load`: claims the device. Raises RuntimeError, TypeError and ValueError saying what is wrong with what is declared, or with the device."""
        options, signature, device = self._options or WorkerOptions(), self.signature, self.resolved_device
        self._check_attributes()
        steps = {dim: steps_up_to(extent) for dim, extent in signature.max_extents.items()}
        if signature.dims and options.longest and type(self).length is TensorHandler.length:  # else lengths are something else than extents
            first = signature.dims[0]
            most = min(signature.max_extents.get(first, options.longest), options.longest)
            steps[first] = [*(step for step in options.boundaries or steps_up_to(most) if step < most), most]
        forward = torch.compile(self.forward, **(self.compile if isinstance(self.compile, dict) else {})) if self.compile else self.forward
        dtype = self.dtype if self.dtype is None or isinstance(self.dtype, torch.dtype) else getattr(torch, str(self.dtype), None)
        if self.dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype={self.dtype!r}: give the name of a floating-point dtype of torch, such as 'bfloat16'")
        self._engine = Engine(
            make_program(forward, signature, dtype),
            signature,
            Grid(options.sizes or doubling(options.max_batch_size), signature.dims, steps),
            device,
            depth=options.pipeline_depth or self.pipeline_depth,
            graphs=self.cuda_graphs if options.cuda_graphs is None else options.cuda_graphs,
            graph_memory_bytes=self.graph_memory_bytes,
            state=self.state,
            tolerance=HALF_TOLERANCE if dtype in (torch.bfloat16, torch.float16) else None,
        )
        if device.type == "cuda":
            try:
                self._engine.warm()
            except Exception as error:
                if kind_of(error) is not Failure.ORDINARY:
                    raise
                self._warn_of_padding()

    def _check_attributes(self) -> None:
        for name, most in (("pipeline_depth", MOST_LANES), ("graph_memory_bytes", 1 << 50)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
                raise ValueError(f"{name}={value!r}: give an integer from 1 to {most:,}, or None")

    def _warn_of_padding(self) -> None:
        log.warning("%s failed on requests of padding; give it a warmup() that returns real ones", type(self).__qualname__, exc_info=True)

    def make_runner(self, segment: Segment, exchange: Exchange, isolate_errors: bool) -> Runner:
        """See worker/runner.py."""
        return TensorRunner(self._prepared(), segment, exchange, f"{type(self).__module__}:{type(self).__qualname__}", isolate_errors)

    def _prepared(self) -> Engine:
        if self._engine is None:
            self.prepare()
        assert self._engine is not None
        return self._engine
