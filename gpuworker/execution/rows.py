"""Requests as rows of padded arrays: the Python side of native/rows.c."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import msgpack

from gpuworker._native import ffi, lib
from gpuworker.execution.grid import Shape
from gpuworker.payload.dtypes import dtype_spec
from gpuworker.tensors import TensorSpec

Array = np.ndarray[Any, Any]
_pack = msgpack.Encoder().encode
_from_buffer = ffi.from_buffer
MOST_ARRAYS: int = lib.GW_ROW_ARRAYS
MOST_DIMS: int = lib.GW_ROW_DIMS
LONGEST_NAME = 64


class Fields:
    """The arrays that every request, or every answer, of a handler has, as `gw_rows` describes them.

    dims: the named dimensions; most: their largest extents. Raises ValueError for more arrays, dimensions or letters than a description has room for.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], is_tree: bool, dims: Sequence[str], most: Mapping[str, int]) -> None:
        if len(specs) > MOST_ARRAYS or len(dims) > MOST_DIMS or any(len(spec.shape) > MOST_DIMS for spec in specs.values()):
            raise ValueError(f"a request or answer may have up to {MOST_ARRAYS} arrays of up to {MOST_DIMS} dimensions, {MOST_DIMS} of them named")
        self._specs, self._dims, self._is_tree, self._most = dict(specs), tuple(dims), is_tree, dict(most)
        for name in specs:
            if len(name.encode()) > LONGEST_NAME:
                raise ValueError(f"{name!r}: names of inputs and outputs may have up to {LONGEST_NAME} bytes")
        self._texts = [(_pack(name), _pack(dtype_spec(spec.numpy_dtype))) for name, spec in specs.items()]
        self._keys = [tuple(_from_buffer(text) for text in pair) for pair in self._texts]

    def describe(self) -> Any:
        """A fresh gw_rows, not aimed at any batch yet."""
        made = ffi.new("gw_rows *")
        made.count, made.dims, made.is_tree = len(self._specs), len(self._dims), self._is_tree
        for d, dim in enumerate(self._dims):
            made.most[d] = self._most.get(dim, 0)
        for f, (spec, (key, dtype)) in enumerate(zip(self._specs.values(), self._keys, strict=True)):
            field = made.field[f]
            field.key, field.key_bytes, field.dtype, field.dtype_bytes = key, len(key), dtype, len(dtype)
            field.ndim, field.itemsize = len(spec.shape), spec.numpy_dtype.itemsize
            for k, extent in enumerate(spec.shape):
                field.shape[k] = -1 - self._dims.index(extent) if isinstance(extent, str) else extent
            field.below = spec.below or 0
            if spec.dims:
                field.counted = self._dims.index(spec.dims[0])
            ffi.buffer(field.pad)[: field.itemsize] = np.asarray(spec.pad_value, spec.numpy_dtype).tobytes()
        return made

    def aimed(self, shape: Shape, arrays: Mapping[str, Array]) -> Aimed:
        """For a batch of this shape in these arrays: each field's own and, for inputs, its mask and lengths."""
        return Aimed(self, self.describe(), shape, arrays)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """By name."""
        return self._specs


class Aimed:
    """Fields with the batch that they are to be gathered into or scattered from. `rows` is what the C side takes. Keeps no array alive: whoever uses it does."""

    def __init__(self, fields: Fields, rows: Any, shape: Shape, arrays: Mapping[str, Array]) -> None:
        self.rows = rows
        rows.rows = shape.rows
        for d, extent in enumerate(shape.extents):
            rows.extents[d] = extent
        self._fields = fields
        self.size_bytes = sum(array.nbytes for array in arrays.values())
        """Of all arrays."""
        self._first = next(iter(fields.specs))
        self._aimed_at: weakref.ref[Array] | None = None
        self.aim(arrays)

    def aim(self, arrays: Mapping[str, Array]) -> None:
        """At other arrays of the same shape, if they are others."""
        first = arrays[self._first]
        if self._aimed_at is not None and self._aimed_at() is first:
            return
        for f, (name, spec) in enumerate(self._fields.specs.items()):
            field = self.rows.field[f]
            field.batch = _pointer(arrays[name], "char *")
            if spec.mask:
                field.mask = _pointer(arrays[spec.mask], "int64_t *")
            if spec.lengths:
                field.lengths = _pointer(arrays[spec.lengths], "int64_t *")
        self._aimed_at = weakref.ref(first)


def _pointer(array: Array, kind: str) -> Any:
    return ffi.cast(kind, _from_buffer(array))  # which refuses what is not contiguous


def place(row: Any, specs: Mapping[str, TensorSpec], values: Mapping[str, Array], extents: Sequence[int]) -> list[Any]:
    """Makes a gw_row of arrays that lie anywhere. -> what has to be kept until they are gathered."""
    kept = []
    for f, name in enumerate(specs):
        array = np.ascontiguousarray(values[name])  # in C order; a request may come in another
        buffer = _from_buffer(array)
        row.source[f] = ffi.cast("const char *", buffer)
        kept.append(buffer)
    for d, extent in enumerate(extents):
        row.extents[d] = extent
    return kept
