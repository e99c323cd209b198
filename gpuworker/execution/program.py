"""A handler's forward as the uniform function that executors run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gpuworker.execution.executor import BatchArray, Program, Tensors
from gpuworker.tensors import Signature, TensorSpec


class WrongOutput(ValueError):
    """`forward` has returned something else than the handler declares: a mistake in the handler, whatever the requests are."""


def batch_arrays(signature: Signature) -> list[BatchArray]:
    """All inputs of the program, in the order in which `forward` finds them."""
    arrays = []
    for name, spec in signature.inputs.items():
        arrays.append(BatchArray(name, spec.numpy_dtype, spec.shape))
        if spec.mask:
            arrays.append(BatchArray(spec.mask, np.dtype(np.int64), spec.dims[:1]))
        if spec.lengths:
            arrays.append(BatchArray(spec.lengths, np.dtype(np.int64), ()))
    return arrays


def make_program(forward: Callable[[Any], Any], signature: Signature, dtype: torch.dtype | None = None) -> Program:
    """dtype: what floating-point inputs are cast to on the device; outputs have the declared dtypes in any case. Without gradients."""
    is_bare = signature.single_input
    wanted = {name: getattr(torch, spec.dtype) for name, spec in signature.outputs.items()}
    names = [name for name, _, _ in batch_arrays(signature)]
    dims = signature.dims

    def program(inputs: Tensors) -> Tensors:
        with torch.inference_mode():
            extents = _extents(inputs, signature, dims)
            rows = inputs[names[0]].shape[0]
            # Tensors of its own, over the same memory: forward may take them apart, and change their shapes in place.
            given = {name: _as(tensor, dtype) for name, tensor in inputs.items()}
            returned = forward(given[names[0]] if is_bare else given)
            found = _named(returned, signature.outputs)
            for name, spec in signature.outputs.items():
                _check(name, found[name], spec, rows, extents, inputs[names[0]].device)
            return {name: found[name].detach().resolve_conj().resolve_neg().to(wanted[name]).contiguous() for name in signature.outputs}

    return program


def _as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None or dtype == tensor.dtype or not tensor.is_floating_point():
        return tensor.view(tensor.shape)
    return tensor.to(dtype)


def _extents(inputs: Tensors, signature: Signature, dims: Sequence[str]) -> dict[str, int]:
    """Of the named dimensions, as they are padded."""
    found: dict[str, int] = {}
    for name, spec in signature.inputs.items() if dims else ():
        for k, extent in enumerate(spec.shape):
            if isinstance(extent, str):
                found[extent] = inputs[name].shape[1 + k]
    return found


def _named(returned: Any, outputs: Mapping[str, TensorSpec]) -> Mapping[str, torch.Tensor]:
    if isinstance(returned, torch.Tensor) and len(outputs) == 1:
        return {next(iter(outputs)): returned}
    if isinstance(returned, Mapping) and outputs.keys() <= returned.keys():
        return returned
    if isinstance(returned, (tuple, list)) and len(returned) == len(outputs):
        return dict(zip(outputs, returned, strict=True))
    got = f"a dict with {sorted(map(str, returned))}" if isinstance(returned, Mapping) else f"a {type(returned).__name__}"
    names = ", ".join(map(repr, outputs))
    raise WrongOutput(
        f"forward returned {got}; outputs declares {names}: return a dict of tensors" + (", or the tensor" if len(outputs) == 1 else "")
    )


def _check(name: str, tensor: torch.Tensor, spec: TensorSpec, rows: int, extents: Mapping[str, int], device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise WrongOutput(f"forward returned a {type(tensor).__name__} as output {name!r}: return a tensor")
    expected = (rows, *(extents[extent] if isinstance(extent, str) else extent for extent in spec.shape))
    if tuple(tensor.shape) != expected:
        raise WrongOutput(f"forward returned output {name!r} of shape {tuple(tensor.shape)}; for this batch, outputs declares {expected}, rows first")
    if tensor.layout is not torch.strided or tensor.device != device:
        raise WrongOutput(f"forward returned output {name!r} as a {tensor.layout} tensor on {tensor.device}; return a dense one on {device}")
