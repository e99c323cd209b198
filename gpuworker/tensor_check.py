"""Does a request fit what was declared? This is on the way of every request, so shapes that were found to fit are looked up and not examined again."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from gpuworker.errors import InvalidRequest, UnsupportedPayload
from gpuworker.payload.foreign import to_array

Array: TypeAlias = "np.ndarray[Any, Any]"
Field: TypeAlias = "tuple[np.dtype[Any], tuple[int | str, ...]]"  # dtype and declared shape

_MAX_KNOWN = 1024
_ndarray = np.ndarray


class Checker:
    """Of one signature. `fields`: the declared arrays by name; `dims`: the named dimensions whose extents are wanted; `below`: limits of values. Thread-safe."""

    def __init__(
        self,
        fields: Mapping[str, Field],
        is_single: bool,
        dims: tuple[str, ...],
        max_extents: Mapping[str, int],
        below: Mapping[str, int] | None = None,
    ) -> None:
        self._fields, self._dims, self._max_extents = dict(fields), dims, dict(max_extents)
        self._known: dict[Any, tuple[int, ...]] = {}  # extents by the shapes that were found to fit
        self._dtypes = [(name, dtype) for name, (dtype, _) in fields.items()]
        self._dtype = self._dtypes[0][1]
        self._check_shapes: Callable[[Any], tuple[Any, tuple[int, ...]]] = self._check_array if is_single else self._check_arrays
        self._is_single, self._below = is_single, dict(below or {})
        self.check = self._check_values if below else self._check_shapes

    def _check_values(self, request: Any) -> tuple[Any, tuple[int, ...]]:
        found, extents = self._check_shapes(request)
        for name, limit in self._below.items():
            array = found if self._is_single else found[name]
            # As unsigned integers negative ones are the largest: one look for both ends.
            if array.size and int(array.view(f"u{array.itemsize}").max()) >= limit:
                wrong = int(array.max()) if int(array.max()) >= limit else int(array.min())
                what, _ = _called("" if self._is_single else name)
                raise InvalidRequest(f"{what}the value {wrong} is out of range: values go from 0 to {limit - 1:,}")
        return found, extents

    def _check_array(self, request: Any) -> tuple[Any, tuple[int, ...]]:
        if request.__class__ is _ndarray and request.dtype is self._dtype:
            extents = self._known.get(request.shape)
            if extents is not None:
                return request, extents
        array = self._array("", request)
        extents = self._extents({"": array})
        self._remember(array.shape, extents)
        return array, extents

    def _check_arrays(self, request: Any) -> tuple[Any, tuple[int, ...]]:
        if request.__class__ is dict and len(request) == len(self._dtypes):
            arrays, shapes = {}, []
            for name, dtype in self._dtypes:
                array = request.get(name)
                if array.__class__ is not _ndarray or array.dtype is not dtype:
                    break
                arrays[name] = array
                shapes.append(array.shape)
            else:
                extents = self._known.get(tuple(shapes))
                if extents is not None:
                    return arrays, extents
        arrays = self._arrays(request)
        extents = self._extents(arrays)
        self._remember(tuple(array.shape for array in arrays.values()), extents)
        return arrays, extents

    def _remember(self, key: Any, extents: tuple[int, ...]) -> None:
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[key] = extents

    def _arrays(self, request: Any) -> dict[str, Array]:
        """In the order of the fields. Raises InvalidRequest."""
        if not isinstance(request, Mapping):
            raise InvalidRequest(f"expected {self._expected()}, got {_described(request)}; send a dict with these names")
        missing = [name for name in self._fields if name not in request]
        unknown = [key for key in request if key not in self._fields]
        if missing or unknown:
            parts = [f"missing: {', '.join(map(repr, missing))}"] if missing else []
            parts += [f"unknown: {', '.join(self._unknown(key) for key in unknown)}"] if unknown else []
            raise InvalidRequest(f"{'; '.join(parts)}. Expected exactly {self._expected()}")
        return {name: self._array(name, request[name]) for name in self._fields}

    def _unknown(self, key: object) -> str:
        near = difflib.get_close_matches(key, self._fields, 1) if isinstance(key, str) else []
        return f"{key!r:.100} (did you mean {near[0]!r}?)" if near else f"{key!r:.100}"

    def _array(self, name: str, value: Any) -> Array:
        """As an array of the declared dtype and number of dimensions. Raises InvalidRequest."""
        dtype, shape = self._fields[name] if name else next(iter(self._fields.values()))
        what, source = _called(name)
        expected = f"{what}expected an array of {dtype.name} {shape_text(shape)}"
        if value.__class__ is _ndarray or isinstance(value, np.generic):
            array = np.asarray(value)
        elif isinstance(value, (str, bytes, bytearray)):
            raise InvalidRequest(f"{expected}, got {_described(value)}; this worker takes arrays here, so convert it first")
        elif isinstance(value, Mapping):
            raise InvalidRequest(f"{expected}, got {_described(value)}; send the bare array")
        else:
            try:
                array = to_array(value)
            except UnsupportedPayload as error:
                module = type(value).__module__.partition(".")[0]
                advice = str(error) if module == "torch" else f"send np.asarray({source}, {dtype.name!r})"
                raise InvalidRequest(f"{expected}, got {_described(value)}; {advice}") from None
        got = f"got one of {_dtype_text(array.dtype)} {shape_text(array.shape)}"
        if array.dtype != dtype:
            raise InvalidRequest(f"{expected}, {got}; convert it with {source}.astype({dtype.name!r})")
        if array.ndim != len(shape):
            if array.ndim == len(shape) + 1:
                advice = f"without a batch dimension: {source}[0]" if array.shape[0] == 1 else "one request for each row, without a batch dimension"
            else:
                advice = f"{len(shape)} dimensions" if len(shape) != 1 else "one dimension"
            raise InvalidRequest(f"{expected}, {got}; send {advice}")
        return array if array.dtype is dtype else array.view(dtype)

    def _extents(self, arrays: dict[str, Array]) -> tuple[int, ...]:
        """Of `dims`. Raises InvalidRequest."""
        extents: dict[str, int] = {}
        seen_in: dict[str, str] = {}
        for (name, array), (dtype, shape) in zip(arrays.items(), self._fields.values(), strict=True):
            what, source = _called(name)
            got = f"{what}expected an array of {dtype.name} {shape_text(shape)}, got the shape {shape_text(array.shape)}"
            for axis, (declared, extent) in enumerate(zip(shape, array.shape, strict=True)):
                if not isinstance(declared, str):
                    if extent != declared:
                        raise InvalidRequest(f"{got}; {source}.shape[{axis}] must be {declared}")
                elif extent < 1:
                    raise InvalidRequest(f"{got}; {declared!r} must be at least 1, so do not send empty requests")
                elif extent > self._max_extents.get(declared, extent):
                    raise InvalidRequest(f"{got}; {declared!r} is at most {self._max_extents[declared]:,} (max_extents), so send less of it")
                elif extents.setdefault(declared, extent) != extent:
                    other = f" in input {seen_in[declared]!r}" if seen_in[declared] else ""
                    raise InvalidRequest(f"{got}; {declared!r} is {extents[declared]}{other} already, and must be the same everywhere")
                else:
                    seen_in.setdefault(declared, name)
        return tuple(extents[dim] for dim in self._dims)

    def _expected(self) -> str:
        return "{" + ", ".join(f"{name!r}: {dtype.name} {shape_text(shape)}" for name, (dtype, shape) in self._fields.items()) + "}"


def shape_text(shape: tuple[int | str, ...]) -> str:
    """As Python writes it, with names bare: (3, tokens)."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _called(name: str) -> tuple[str, str]:
    """What to call the array in a message, and in code."""
    return (f"input {name!r}: ", f"request[{name!r}]") if name else ("", "request")


def _dtype_text(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.isnative else f"{dtype.name} in foreign byte order ({dtype.str})"


def _described(value: object) -> str:
    """A value that is no array, in few words."""
    kind = type(value)
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(f'{key!r:.40}' for key in list(value)[:8]) or 'nothing'}"
    if kind is _ndarray:
        return f"an array of {_dtype_text(value.dtype)} {shape_text(value.shape)}"  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple)):
        return f"a {kind.__name__} of {len(value)}"
    if isinstance(value, str):
        return f"text ({value!r:.40})"
    return f"{kind.__name__} ({value!r:.40})" if kind in (bool, int, float, complex, bytes, type(None)) else kind.__qualname__
