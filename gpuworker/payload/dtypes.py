"""A numpy dtype as plain data, exact also for padding, overlapping fields, sub-arrays, titles, byte order and time units.

`dtype.descr` and numpy's own `.npy` header lose or refuse some of these and need a parser of Python literals to read back; a list does not.
"""

from __future__ import annotations

import operator
import re
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec import Raw, msgpack

from gpuworker.errors import UnsupportedPayload
from gpuworker.payload.foreign import PICKLE_ADVICE

# What `dtype.str` can be for the types below; no objects, no comma-separated lists, no aliases, so np.dtype() sees nothing surprising.
_PLAIN = re.compile(r"[<>|](?:[biufcSUV]\d{1,10}|[mM]8(?:\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)")


@lru_cache(256)
def dtype_spec(dtype: np.dtype[Any]) -> Raw:
    """`dtype` in msgpack, as a string or as [itemsize, fields]. Raises UnsupportedPayload if it would come back as another dtype."""
    if dtype.kind == "T":
        raise UnsupportedPayload(f"an array of StringDType holds pointers: send array.astype('U') or array.tolist(){PICKLE_ADVICE}")
    if dtype.hasobject:
        raise UnsupportedPayload(
            f"an array of dtype {dtype} holds pointers: send an array of numbers or fixed-size strings, or a list{PICKLE_ADVICE}"
        )
    try:
        spec = msgpack.encode(_describe(dtype))
        survives = restore_dtype(msgpack.decode(spec)) == dtype
    except (TypeError, ValueError):  # such as a title that is no string
        survives = False
    if not survives:
        advice = "send array.astype(numpy.float32) or array.view(numpy.uint8)"
        raise UnsupportedPayload(f"dtype {dtype} cannot be described to another process: {advice}{PICKLE_ADVICE}")
    return Raw(spec)


def _describe(dtype: np.dtype[Any]) -> Any:
    if dtype.names is None:
        return dtype.str
    fields: list[Any] = []
    for name in dtype.names:
        field, offset, *title = dtype.fields[name]  # type: ignore[index]
        base, shape = field.subdtype or (field, ())
        fields.append([name, _describe(base), shape, offset, *title])
    return [dtype.itemsize, fields]


def restore_dtype(spec: Any) -> np.dtype[Any]:
    """The dtype of an untrusted, decoded description, never one with objects. Raises all sorts of exceptions for nonsense."""
    if type(spec) is str:
        return _plain_dtype(spec)
    itemsize, fields = spec
    names, formats, offsets, titles = [], [], [], []
    for name, base, shape, offset, *title in fields:
        element = restore_dtype(base)
        names.append(name)
        extents = tuple(map(operator.index, shape))  # numbers only: (dtype, tuple) has other meanings too
        formats.append(np.dtype((element, extents)) if extents else element)
        offsets.append(offset)
        titles.append(str.__str__(title[0]) if title else None)  # numpy would take anything, even what cannot be hashed
    description = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
    if any(titles):
        description["titles"] = titles
    dtype: np.dtype[Any] = np.dtype(description)  # type: ignore[call-overload]
    if dtype.hasobject:
        raise ValueError("dtype with objects")
    return dtype


@lru_cache(256)
def _plain_dtype(name: str) -> np.dtype[Any]:
    if not _PLAIN.fullmatch(name):
        raise ValueError(f"dtype {name[:40]!r}")
    return np.dtype(name)
