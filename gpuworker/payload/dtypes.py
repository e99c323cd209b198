"""A numpy dtype as plain data, exact also for padding, overlapping fields, sub-arrays, titles, byte order and time units.

`dtype.descr` and numpy's own `.npy` header lose or refuse some of these and need a parser of Python literals to read back; a list does not.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from gpuworker.errors import UnsupportedPayload
from gpuworker.payload.foreign import PICKLE_ADVICE

# What `dtype.str` can be for the types below; no objects, no comma-separated lists, no aliases, so np.dtype() sees nothing surprising.
_PLAIN = re.compile(r"[<>|](?:[biufcSUV]\d{1,10}|[mM]8(?:\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)")


@lru_cache(256)
def dtype_spec(dtype: np.dtype[Any]) -> Any:
    """`dtype` as a string, or as [itemsize, fields]. Raises UnsupportedPayload if it would come back as another dtype."""
    if dtype.kind == "T":
        raise UnsupportedPayload(f"an array of StringDType holds pointers: use array.astype('U'), array.tolist(){PICKLE_ADVICE}")
    if dtype.hasobject:
        raise UnsupportedPayload(f"an array of Python objects ({dtype}) holds pointers: use a numeric or string dtype, array.tolist(){PICKLE_ADVICE}")
    spec = _describe(dtype)
    try:
        survives = restore_dtype(spec) == dtype
    except (TypeError, ValueError):
        survives = False
    if not survives:
        advice = "use array.astype(numpy.float32) or array.view(numpy.uint8)"
        raise UnsupportedPayload(f"numpy itself cannot name the dtype {dtype} in a file: {advice}{PICKLE_ADVICE}")
    return spec


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
    """The inverse of dtype_spec for untrusted input: a dtype without objects, or any of TypeError, ValueError, OverflowError, RecursionError."""
    if type(spec) is str:
        if not _PLAIN.fullmatch(spec):
            raise ValueError(f"dtype {spec[:40]!r}")
        return np.dtype(spec)
    itemsize, fields = spec
    names, formats, offsets, titles = [], [], [], []
    for name, base, shape, offset, *title in fields:
        element = restore_dtype(base)
        names.append(name)
        formats.append(np.dtype((element, tuple(shape))) if shape else element)
        offsets.append(offset)
        titles.append(title[0] if title else None)
    description = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
    if any(titles):
        description["titles"] = titles
    return np.dtype(description)  # type: ignore[call-overload, no-any-return]
