"""Linear layers on the CPU in bfloat16, with their weights laid out once as its matrix units want them.

torch does that anew in each call. For the few rows of a decode step it takes about as long as the product itself; the results are the same, bit for bit. For many
rows nothing is lost, so that the originals need not be kept. In float32 results are not quite the same, and nothing is packed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from transformers.pytorch_utils import Conv1D

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""What families call layers that they give the same input, one after the other."""

_TRIAL_ROWS = (1, 16)
_TRIALS = 8


class PackedLinear(torch.nn.Module):
    """In place of a linear layer. weight: [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed, self._bias = _lay_out(weight), bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if not rows.numel():
            return rows.new_empty((*rows.shape[:-1], self.out_features))
        return _product(rows, self._packed, self._bias)

    def original(self) -> torch.Tensor:
        """The weight that it was made from."""
        return self._packed.to_dense()


class Part(torch.nn.Module):
    """One of several linear layers of the same input, which are computed as one: the first that is called computes all, the others take what is theirs."""

    def __init__(self, whole: PackedLinear, parts: list[Part], first: int, size: int) -> None:
        """parts: all of them, this one included. first, size: where its outputs are among the whole's."""
        super().__init__()
        self._whole, self._parts, self._first, self._size = [whole], parts, first, size  # a list: not a module of this one
        self._held: list[torch.Tensor] = []  # the input, and its output; filled and emptied in place, which costs less than a module's attributes do

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if not self._held or self._held[0] is not rows:
            found = self._whole[0](rows)
            for part in self._parts:
                part._held[:] = rows, found[..., part._first : part._first + part._size]
        output = self._held[1]
        self._held.clear()
        return output


class _Replaced(NamedTuple):
    parent: torch.nn.Module
    name: str
    layer: Any
    """As it was, but for its weight, unless somebody else has that, too."""
    packed: PackedLinear
    first: int
    size: int
    is_shared: bool


class PackedWeights:
    """The layers of a model that have been replaced."""

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []
        self._pays: dict[torch.Size, bool] = {}

    def __len__(self) -> int:
        return len(self._replaced)

    def pack(self, model: torch.nn.Module) -> None:
        """Replaces the linear layers of a model that is on the CPU and in bfloat16, where the processor gains by it. Their own weights are given up, but for those
        that other layers have too (tied embeddings)."""
        if not can_pack():
            return
        holders = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        for parent in list(model.modules()):
            layers = {name: layer for name, layer in parent.named_children() if _is_linear(layer) and self._is_faster(_weight_of(layer))}
            for names in TOGETHER:
                if all(name in layers for name in names) and _go_together([layers[name] for name in names]):
                    self._replace(parent, {name: layers.pop(name) for name in names}, holders)
            for name, layer in layers.items():
                self._replace(parent, {name: layer}, holders)

    def unpack(self) -> None:
        """The model has its own layers again."""
        for parent, name, layer, packed, first, size, is_shared in self._replaced:
            if not is_shared:
                weight = packed.original()[first : first + size]
                layer.weight.data = (weight.T if isinstance(layer, Conv1D) else weight).clone(memory_format=torch.contiguous_format)
            setattr(parent, name, layer)
        self._replaced = []

    def _replace(self, parent: torch.nn.Module, layers: dict[str, Any], holders: Counter[int]) -> None:
        biases = [layer.bias for layer in layers.values() if layer.bias is not None]
        weights = [_weight_of(layer) for layer in layers.values()]
        one = len(layers) == 1
        packed = PackedLinear(weights[0] if one else torch.cat(weights), (biases[0] if one else torch.cat(biases)) if biases else None)
        first, parts = 0, list[Part]()
        for (name, layer), weight in zip(layers.items(), weights, strict=True):
            is_shared = holders[id(layer.weight)] > 1
            self._replaced.append(_Replaced(parent, name, layer, packed, first, weight.shape[0], is_shared))
            if one:
                setattr(parent, name, packed)
            else:
                parts.append(Part(packed, parts, first, weight.shape[0]))
                setattr(parent, name, parts[-1])
            first += weight.shape[0]
            if not is_shared:
                layer.weight.data = layer.weight.data.new_empty(0)

    def _is_faster(self, weight: torch.Tensor) -> bool:
        """Whether this processor gains by it, for weights of this shape: measured."""
        found = self._pays.get(weight.shape)
        if found is None:
            packed, plain_s, packed_s = _lay_out(weight), 0.0, 0.0
            for rows in _TRIAL_ROWS:
                data = weight.new_zeros(1, rows, weight.shape[1])
                # One after the other, so that what else the machine does meets both.
                trials = [(_took_s(F.linear, data, weight), _took_s(_product, data, packed)) for _ in range(_TRIALS)]
                plain_s, packed_s = plain_s + min(plain for plain, _ in trials), packed_s + min(packed for _, packed in trials)
            found = self._pays[weight.shape] = packed_s < plain_s
        return found


def can_pack() -> bool:
    """Whether torch and the processor know how."""
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return torch._C._has_mkldnn and known and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _lay_out(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    return packed


def _product(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return found


def _took_s(run: Callable[[torch.Tensor, torch.Tensor], object], rows: torch.Tensor, weight: torch.Tensor) -> float:
    began = time.perf_counter()
    run(rows, weight)
    return time.perf_counter() - began


def _is_linear(layer: torch.nn.Module) -> bool:
    if type(layer) not in (torch.nn.Linear, Conv1D) or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    weight: Any = layer.weight
    return bool(weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.numel())


def _weight_of(layer: Any) -> torch.Tensor:
    """[out, in]."""
    weight: torch.Tensor = layer.weight.data
    return weight.T if isinstance(layer, Conv1D) else weight


def _go_together(layers: list[Any]) -> bool:
    return all(type(layer) is torch.nn.Linear for layer in layers) and len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
