"""Tensors of the Open Inference Protocol to and from arrays: in JSON, and as the binary tensor data extension has them (little-endian, row-major, BYTES elements
behind their length in four bytes)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from gpuworker import InvalidRequest

Array = np.ndarray[Any, Any]

DATATYPES = {
    "BOOL": "bool", "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32",
    "UINT64": "uint64", "FP16": "float16", "FP32": "float32", "FP64": "float64", "BF16": "float32",
}  # fmt: skip
"""numpy's names. It has no bfloat16: BF16 comes in as float32, and does not go out."""
_NAMES = {np.dtype(name): datatype for datatype, name in DATATYPES.items() if datatype != "BF16"}
_DTYPES = {datatype: np.dtype(name).newbyteorder("<") for datatype, name in DATATYPES.items()} | {"BF16": np.dtype("<u2")}
"""As they are sent."""
MOST_DIMENSIONS = 32
MOST_ELEMENTS, MOST_TEXTS = 1 << 40, 1 << 18
"""Of a tensor, extents of 0 counted as 1; and of one of BYTES, each of which is an object of Python's, made in the event loop."""
_LENGTH = np.dtype("<u4")


def _element(datatype: str) -> Any:
    dtype = np.dtype(DATATYPES[datatype])
    if dtype.kind == "b":
        return bool
    if dtype.kind == "f":
        return float
    info = np.iinfo(dtype)
    return Annotated[int, msgspec.Meta(ge=int(info.min), le=min(int(info.max), (1 << 63) - 1))] if datatype != "UINT64" else int


_ELEMENTS: dict[str, Any] = {"BYTES": list[str], **{datatype: list[_element(datatype)] for datatype in DATATYPES}}  # type: ignore[misc]


def name_of(dtype: np.dtype[Any]) -> str:
    """What the protocol calls a dtype. Raises ValueError for one that it does not have."""
    if dtype.kind in "SU":
        return "BYTES"
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(f"the Open Inference Protocol has no datatype for {dtype}") from None


def elements(name: str, datatype: str, shape: Sequence[int]) -> int:
    """How many a tensor has. Raises InvalidRequest for a datatype or a shape that is none."""
    if datatype not in _ELEMENTS:
        raise InvalidRequest(f"input {name!r:.100}: there is no datatype {datatype!r:.40}; there are {', '.join(_ELEMENTS)}")
    if not 1 <= len(shape) <= MOST_DIMENSIONS or min(shape) < 0:
        raise InvalidRequest(f"input {name!r:.100}: its shape is a list of 1 to {MOST_DIMENSIONS} extents, of which the first counts the requests")
    most = MOST_TEXTS if datatype == "BYTES" else MOST_ELEMENTS
    if max(shape) > most or math.prod(extent or 1 for extent in shape) > most:
        raise InvalidRequest(f"input {name!r:.100}: a shape of more than {most:,} elements")
    return math.prod(shape)


def from_json(name: str, datatype: str, shape: Sequence[int], data: Any) -> Any:
    """An array, or for BYTES (nested) lists of str. data: what JSON has, flat or nested as the shape is. Raises InvalidRequest."""
    count = elements(name, datatype, shape)
    if not isinstance(data, list):
        raise InvalidRequest(f"input {name!r:.100}: its data is a list, or binary after the JSON (parameter binary_data_size)")
    flat = _flat(name, data, shape) if len(shape) > 1 and data and isinstance(data[0], list) else data
    if len(flat) != count:
        raise InvalidRequest(f"input {name!r:.100}: shape {list(shape)} has {count:,} elements, and there are {len(flat):,}")
    try:
        flat = msgspec.convert(flat, _ELEMENTS[datatype])
        if datatype == "BYTES":
            return _nested(flat, shape)
        with np.errstate(over="ignore"):
            array = np.array(flat, DATATYPES[datatype])
    except (msgspec.ValidationError, OverflowError) as error:
        raise InvalidRequest(f"input {name!r:.100}: data that is no {datatype}: {error}") from None
    if array.dtype.kind == "f" and not np.isfinite(array).all():  # JSON's numbers are finite
        raise InvalidRequest(f"input {name!r:.100}: data that is no {datatype}: a number that is too large for it")
    return array.reshape(shape)


def from_bytes(name: str, datatype: str, shape: Sequence[int], data: memoryview) -> Any:
    """As `from_json`, of bytes in place of str; an array looks at `data`. Raises InvalidRequest."""
    count = elements(name, datatype, shape)
    if datatype == "BYTES":
        return _nested(_byte_elements(name, count, data), shape)
    dtype = _DTYPES[datatype]
    if len(data) != count * dtype.itemsize:
        needed = count * dtype.itemsize
        raise InvalidRequest(f"input {name!r:.100}: {datatype} of shape {list(shape)} takes {needed:,} bytes, and binary_data_size is {len(data):,}")
    if datatype == "BF16":
        return (np.frombuffer(data, dtype).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if datatype == "BOOL":
        raw = np.frombuffer(data, np.uint8)
        if raw.size and raw.max() > 1:
            raise InvalidRequest(f"input {name!r:.100}: elements of BOOL are 0 or 1")
        return raw.view(np.bool_).reshape(shape)
    return np.ndarray(shape, dtype, data)


def to_json(column: Any) -> tuple[str, list[int], list[Any]]:
    """-> (datatype, shape, flat data). column: an array, or a list of str or bytes. Raises ValueError for what the protocol cannot have."""
    if isinstance(column, list):
        return "BYTES", [len(column)], [_text(one) for one in column]
    datatype, flat = name_of(column.dtype), column.ravel().tolist()
    return datatype, list(column.shape), [_text(one) for one in flat] if datatype == "BYTES" else flat


def to_bytes(column: Any) -> tuple[str, list[int], Any]:
    """-> (datatype, shape, its bytes, or an array that is contiguous). Raises ValueError for what the protocol cannot have."""
    if isinstance(column, list):
        return "BYTES", [len(column)], _with_lengths(column)
    datatype = name_of(column.dtype)
    if datatype == "BYTES":
        return datatype, list(column.shape), _with_lengths(column.ravel().tolist())
    return datatype, list(column.shape), np.ascontiguousarray(column, _DTYPES[datatype])


def _flat(name: str, data: list[Any], shape: Sequence[int]) -> list[Any]:
    for extent in shape[1:]:
        inner: list[Any] = []
        for one in data:
            if not isinstance(one, list) or len(one) != extent:
                raise InvalidRequest(f"input {name!r:.100}: nested data that is not of shape {list(shape)}")
            inner += one
        data = inner
    return data


def _nested(flat: list[Any], shape: Sequence[int]) -> list[Any]:
    for extent in reversed(shape[1:]):
        flat = [flat[at : at + extent] for at in range(0, len(flat), extent)] if extent else []
    return flat


def _byte_elements(name: str, count: int, data: memoryview) -> list[bytes]:
    found: list[bytes] = []
    at = 0
    while at < len(data) and len(found) <= count:
        start = at + _LENGTH.itemsize
        end = start + int.from_bytes(data[at:start], "little")
        if start > len(data) or end > len(data):
            raise InvalidRequest(f"input {name!r:.100}: an element of BYTES that ends behind the tensor's data")
        found.append(bytes(data[start:end]))
        at = end
    if len(found) != count:
        raise InvalidRequest(f"input {name!r:.100}: its shape has {count:,} elements of BYTES, and its data does not")
    return found


def _with_lengths(items: Iterable[str | bytes]) -> bytes:
    out = bytearray()
    for item in items:
        data = item.encode() if isinstance(item, str) else item
        out += len(data).to_bytes(_LENGTH.itemsize, "little") + data
    return bytes(out)


def _text(item: str | bytes) -> str:
    if isinstance(item, str):
        return item
    try:
        return item.decode()
    except UnicodeDecodeError:
        raise ValueError("bytes that are no text have no form in JSON; ask for this output as binary data") from None
