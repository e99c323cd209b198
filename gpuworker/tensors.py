"""What a worker's tensors look like: one request's arrays and one answer's, declared once and checked on both sides. No torch."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuworker.tensor_check import Checker, shape_text

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """One array of a request or of an answer, without the batch dimension.

    dtype: a numpy name, "bool", "int8" to "int64", "uint8" to "uint64", "float16" to "float64", "complex64" or "complex128"; the byte order is this machine's.
    shape: integers for fixed extents, strings for named ones that vary between requests; () is a scalar. Equal names mean equal extents, in all arrays.
    pad_value: what fills a request up to the extents of its batch. mask: the name under which `forward` also gets an int64 array [rows, extent of the first named
    dimension], 1 where the request is and 0 where padding is. lengths: the name under which it gets an int64 array [rows] of these extents before padding.
    below: of integers: they are indices, from 0 to below - 1; one that is out of a table's range can cost a GPU (None: any).

    Raises TypeError or ValueError that says what to write instead.
    """

    dtype: str
    shape: tuple[int | str, ...]
    pad_value: bool | int | float = field(default=0, kw_only=True)
    mask: str | None = field(default=None, kw_only=True)
    lengths: str | None = field(default=None, kw_only=True)
    below: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "dtype", _dtype_name(self.dtype))
        put(self, "shape", _checked_shape(self.shape))
        put(self, "pad_value", _checked_pad(self.pad_value, self.dtype))
        if self.below is not None:
            if self.numpy_dtype.kind not in "iu" or isinstance(self.below, bool) or not isinstance(self.below, int) or not 0 < self.below <= 1 << 62:
                raise ValueError(f"below={self.below!r}: give how many values there are, for an array of integers (its dtype is {self.dtype})")
            if not 0 <= self.pad_value < self.below:
                raise ValueError(f"pad_value={self.pad_value!r}: it is not below={self.below:,} either")
        for option in ("mask", "lengths"):
            name = getattr(self, option)
            if name is not None:
                _require_name(name, option)
                if not self.dims:
                    raise ValueError(
                        f"{option}={name!r}: a spec of shape {self.shape} has no named dimension to tell of; name one, or leave {option} out"
                    )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as numpy has it."""
        return np.dtype(self.dtype)

    @property
    def dims(self) -> tuple[str, ...]:
        """The named dimensions, each once, in order."""
        return tuple(dict.fromkeys(extent for extent in self.shape if isinstance(extent, str)))

    def __str__(self) -> str:
        return f"{self.dtype} {shape_text(self.shape)}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        named = {"pad_value": self.pad_value or None, "mask": self.mask, "lengths": self.lengths, "below": self.below}
        return {"dtype": self.dtype, "shape": list(self.shape), **{key: value for key, value in named.items() if value is not None}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorSpec:
        """From what `to_dict` gave. Raises TypeError or ValueError for anything else."""
        _require(data, "a spec", ("dtype", "shape"))
        options = {key: data[key] for key in ("pad_value", "mask", "lengths", "below") if key in data}
        return cls(data["dtype"], tuple(data["shape"]) if isinstance(data["shape"], list) else data["shape"], **options)


class Signature:
    """All that goes into a handler's `forward` and comes out of it.

    `inputs` and `outputs`: dict name -> TensorSpec, or one TensorSpec, which is then called "input" or "output" (`single_input`, `single_output`): requests or
    answers are bare arrays. `max_extents`: the largest extent of named dimensions. `dims`: the named dimensions of the inputs in order of appearance.

    Raises TypeError or ValueError that says what to write instead.
    """

    def __init__(
        self,
        inputs: TensorSpec | Mapping[str, TensorSpec],
        outputs: TensorSpec | Mapping[str, TensorSpec],
        max_extents: Mapping[str, int] | None = None,
    ) -> None:
        self.single_input, self.single_output = isinstance(inputs, TensorSpec), isinstance(outputs, TensorSpec)
        self.inputs, self.outputs = _named("inputs", inputs), _named("outputs", outputs)
        self.dims = tuple(dict.fromkeys(dim for spec in self.inputs.values() for dim in spec.dims))
        self.max_extents = self._checked_extents({} if max_extents is None else max_extents)
        self._check_companions()
        self._check_outputs()
        fields = {name: (spec.numpy_dtype, spec.shape) for name, spec in self.inputs.items()}
        below = {name: spec.below for name, spec in self.inputs.items() if spec.below is not None}
        self._checker = Checker(fields, self.single_input, self.dims, self.max_extents, below)
        self.check = self._checker.check
        """check(request) -> (request as a bare array or a dict of arrays in the order of `inputs`, extents of `dims`). Raises InvalidRequest."""

    def _checked_extents(self, limits: Mapping[str, int]) -> dict[str, int]:
        if not isinstance(limits, Mapping):
            raise TypeError(f"max_extents={limits!r}: give a dict from the names of dimensions to their largest extents")
        checked = {}
        for dim, limit in limits.items():
            if dim not in self.dims:
                known = f"they are {', '.join(map(repr, self.dims))}" if self.dims else "there are none"
                raise ValueError(f"max_extents[{dim!r}]: no input has a dimension of this name ({known})")
            if isinstance(limit, bool) or not hasattr(limit, "__index__") or not 1 <= operator.index(limit) < 1 << 31:
                raise ValueError(f"max_extents[{dim!r}]={limit!r}: give an integer from 1 to {(1 << 31) - 1:,}, or leave it out")
            checked[dim] = operator.index(limit)
        return checked

    def _check_companions(self) -> None:
        taken = set(self.inputs)
        for name, spec in self.inputs.items():
            for option, companion in (("mask", spec.mask), ("lengths", spec.lengths)):
                if companion is None:
                    continue
                if self.single_input:
                    raise ValueError(
                        f"{option}={companion!r}: with one bare TensorSpec forward gets that tensor and nothing else; write inputs = {{'input': TensorSpec(...)}}"
                    )
                if companion in taken:
                    raise ValueError(f"{option}={companion!r} of input {name!r}: forward gets another tensor of this name already; choose another")
                taken.add(companion)

    def _check_outputs(self) -> None:
        for name, spec in self.outputs.items():
            for dim in spec.dims:
                if dim not in self.dims:
                    raise ValueError(
                        f"output {name!r} has the dimension {dim!r}, and no input has: its extent could not be told; use an input's name or a number"
                    )
            if spec.mask is not None or spec.lengths is not None or spec.pad_value or spec.below is not None:
                raise ValueError(f"output {name!r}: pad_value, mask, lengths and below are for inputs; leave them out")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Signature({_repr(self.inputs, self.single_input)} -> {_repr(self.outputs, self.single_output)})"

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON, small."""
        data: dict[str, Any] = {"max_extents": dict(self.max_extents)}
        for key, specs, is_single in (("inputs", self.inputs, self.single_input), ("outputs", self.outputs, self.single_output)):
            if is_single:
                data[key[:-1]] = specs[key[:-1]].to_dict()
            else:
                data[key] = [[name, spec.to_dict()] for name, spec in specs.items()]  # a list: JSON tools may sort the keys of objects
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Signature:
        """From what `to_dict` gave; other keys are ignored. Raises TypeError or ValueError for anything else."""
        _require(data, "a signature", ("max_extents",))
        return cls(_specs(data, "inputs"), _specs(data, "outputs"), data["max_extents"])


def _specs(data: Mapping[str, Any], key: str) -> TensorSpec | dict[str, TensorSpec]:
    if key[:-1] in data:
        return TensorSpec.from_dict(data[key[:-1]])
    pairs = data.get(key)
    if not isinstance(pairs, list):
        raise TypeError(f"a signature without {key}")
    return {str(name): TensorSpec.from_dict(spec) for name, spec in pairs}


def _named(what: str, specs: Any) -> dict[str, TensorSpec]:
    if isinstance(specs, TensorSpec):
        return {what[:-1]: specs}
    if not isinstance(specs, Mapping) or not specs:
        raise TypeError(f"{what}={specs!r}: give one TensorSpec, or a dict from names to them")
    for name, spec in specs.items():
        _require_name(name, f"a name in {what}")
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{what}[{name!r}]={spec!r}: give a TensorSpec, such as TensorSpec('float32', (384,))")
    return dict(specs)


def _repr(specs: dict[str, TensorSpec], is_single: bool) -> str:
    return ", ".join(str(spec) if is_single else f"{name}: {spec}" for name, spec in specs.items())


def _require(data: object, what: str, keys: tuple[str, ...]) -> None:
    if not isinstance(data, Mapping) or not all(key in data for key in keys):
        raise TypeError(f"no description of {what}: {data!r:.200}")


def _require_name(name: object, what: str) -> None:
    if not isinstance(name, str) or not name:
        raise (ValueError if name == "" else TypeError)(f"{what}: give a name, a string that is not empty, in place of {name!r}")


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        known = np.dtype(dtype)
        text: str = known.name if known.isnative else known.str
    else:
        text = str(dtype).removeprefix("torch.")
        if not isinstance(dtype, str):
            raise TypeError(f"dtype={dtype!r}: give its name, {_nearest(text)}")
    if text == "bfloat16":
        raise ValueError(
            "dtype='bfloat16': arrays are numpy's, which has no bfloat16; declare 'float32', and set the handler's own dtype to 'bfloat16'"
        )
    if text not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: give {_nearest(text)}")
    return text


def _nearest(text: str) -> str:
    near = difflib.get_close_matches(text, DTYPES, 1)
    return repr(near[0]) if near else f"one of {', '.join(DTYPES)}"


def _checked_shape(shape: Any) -> tuple[int | str, ...]:
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"shape={shape!r}: give a tuple of extents and names, such as ({shape!r},); () is a scalar")
    checked: list[int | str] = []
    for extent in shape:
        if isinstance(extent, str):
            _require_name(extent, f"shape={shape!r}")
            checked.append(extent)
        elif isinstance(extent, bool) or not hasattr(extent, "__index__"):
            raise TypeError(f"shape={shape!r}: {extent!r} is neither an integer nor the name of a dimension that varies, such as 'tokens'")
        elif operator.index(extent) < 1:
            raise ValueError(f"shape={shape!r}: extents are at least 1; write a name, such as 'tokens', for one that varies between requests")
        else:
            checked.append(operator.index(extent))
    return tuple(checked)


def _checked_pad(value: Any, dtype: str) -> bool | int | float:
    """`value` as Python has it, if an array of this dtype can hold it."""
    if isinstance(value, np.generic):
        value = value.item()
    kind = np.dtype(dtype)
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"pad_value={value!r}: give a number that {dtype} has")
    if kind.kind == "b":
        fits = value in (0, 1)
    elif kind.kind in "iu":
        fits = isinstance(value, int) and np.iinfo(kind).min <= value <= np.iinfo(kind).max
    else:
        fits = abs(value) <= float(np.finfo(kind).max) or (isinstance(value, float) and not math.isfinite(value))
    if not fits:
        raise ValueError(f"pad_value={value!r} is no {dtype}; give one that is")
    return value
