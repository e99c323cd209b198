"""Nested values as one msgpack document whose types come back exactly.

Writing ("lowering") replaces what msgpack lacks by extension objects and leaves plain parts as they are: a JSON-like value costs one walk over
its types, mostly in C, and one call of msgspec. Arrays stay outside the document; a reference in it stands for the next array of the data.

    meta = document               data = arrays
    meta = empty                  data = document                        no arrays
    meta = 0xc1, size (8 bytes)   data = document of this size, arrays   a document too large for meta (0xc1 starts no msgpack document)
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from msgspec import msgpack

from gpuworker.errors import SegmentError
from gpuworker.payload.arrays import (
    ARRAY,
    LINE,
    MAX_META_BYTES,
    Array,
    Data,
    align,
    array_in,
    copy_array,
    layout_for,
    pack_arrays,
    parse_description,
    place,
)
from gpuworker.payload.dtypes import dtype_spec, restore_dtype
from gpuworker.payload.foreign import refusal, to_array, too_deep

TUPLE, PAIRS, BIG_INT, COMPLEX, TEXT, SCALAR, NUMPY_STR, NUMPY_BYTES = range(2, 10)  # extension codes; ARRAY is 1
MAX_DEPTH = 128

# msgpack keeps these exactly; as keys too, except the first.
_PLAIN = frozenset({bytearray, bytes, str, int, float, bool, type(None)})

_pack = msgpack.Encoder().encode
_unpack_scalar = msgpack.Decoder(tuple[Any, bytes]).decode
_complex = struct.Struct("<dd")
_OVERSIZE = 0xC1
_NO_AREA = memoryview(b"")
Ext = msgpack.Ext


def dump(value: object) -> tuple[bytes, list[Array], int]:
    """-> (document, its arrays, bytes of their data). Raises UnsupportedPayload."""
    try:
        try:
            lowering = _Lowering()
            document = _pack(lowering.lower(value, 0))
        except (OverflowError, UnicodeEncodeError):
            lowering = _CarefulLowering()
            document = _pack(lowering.lower(value, 0))
    except RecursionError:
        raise too_deep(MAX_DEPTH) from None
    return document, lowering.arrays, lowering.data_bytes


def encode_tree(value: object) -> tuple[bytes, Data, int]:
    """-> (meta, data, data_bytes). Raises UnsupportedPayload."""
    document, arrays, data_bytes = dump(value)
    if not arrays:
        return b"", document, len(document)
    if len(document) <= MAX_META_BYTES:
        return document, pack_arrays(arrays, data_bytes), data_bytes
    meta = bytes([_OVERSIZE]) + len(document).to_bytes(8, "little")
    data_bytes += align(len(document))
    return meta, pack_arrays([np.frombuffer(document, np.uint8), *arrays], data_bytes), data_bytes


class _Lowering:
    """One pass over one value. Collects the arrays in the order of their references."""

    __slots__ = ("arrays", "data_bytes")
    plain: frozenset[object] = _PLAIN
    keys = _PLAIN - {bytearray}

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.data_bytes = 0

    def lower(self, value: Any, depth: int) -> Any:
        kind = type(value)
        return value if kind in self.plain else _METHODS.get(kind, _Lowering._other)(self, value, depth)

    def _list(self, items: Any, depth: int) -> Any:
        if self.plain.issuperset(map(type, items)):
            return items
        if depth >= MAX_DEPTH:
            raise too_deep(MAX_DEPTH)
        lower, depth = self.lower, depth + 1
        return [lower(item, depth) for item in items]

    def _tuple(self, items: Any, depth: int) -> Any:
        return Ext(TUPLE, _pack(self._list(items, depth)))

    def _dict(self, mapping: Any, depth: int) -> Any:
        if not self.keys.issuperset(map(type, mapping)):
            return Ext(PAIRS, _pack(self._list([item for pair in mapping.items() for item in pair], depth)))
        if depth >= MAX_DEPTH:
            raise too_deep(MAX_DEPTH)
        plain, methods = self.plain, _METHODS
        lowered = {}
        for key, value in mapping.items():  # `lower` in place: most dicts are small, a call per value would be most of the time
            kind = type(value)
            lowered[key] = value if kind in plain else methods.get(kind, _Lowering._other)(self, value, depth + 1)
        return lowered

    def _array(self, array: Array, depth: int) -> Any:
        if array.flags.c_contiguous:
            layout = layout_for(array.dtype, array.shape)
        else:
            layout, array = place(array)
        self.arrays.append(array)
        self.data_bytes = (self.data_bytes + LINE - 1 & -LINE) + layout.data_bytes
        return layout.reference

    def _int(self, value: Any, depth: int) -> Any:
        if -(1 << 63) <= value < 1 << 64:
            return value
        return Ext(BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))

    def _str(self, value: Any, depth: int) -> Any:
        try:
            value.encode()
        except UnicodeEncodeError:
            return Ext(TEXT, value.encode("utf-8", "surrogatepass"))
        return value

    def _complex(self, value: Any, depth: int) -> Any:
        return Ext(COMPLEX, _complex.pack(value.real, value.imag))

    def _memoryview(self, value: Any, depth: int) -> Any:
        return value.tobytes()

    def _other(self, value: Any, depth: int) -> Any:
        if not isinstance(value, np.generic):
            return self._array(to_array(value), depth)
        # These two are a str and a bytes: an array would lose trailing zeros.
        if type(value) is np.str_:
            return Ext(NUMPY_STR, value.encode("utf-8", "surrogatepass"))
        if type(value) is np.bytes_:
            return Ext(NUMPY_BYTES, bytes(value))
        if type(value) is np.record:
            raise refusal(value)
        return Ext(SCALAR, _pack((dtype_spec(value.dtype), value.tobytes())))


class _CarefulLowering(_Lowering):
    """The second attempt, after msgspec met an int beyond 64 bits or a lone surrogate: looks at each int and str."""

    __slots__ = ()
    plain = _PLAIN - {int, str}
    keys = _Lowering.keys - {int, str}


_Method: TypeAlias = "Callable[[_Lowering, Any, int], Any]"
_METHODS: dict[type, _Method] = {
    list: _Lowering._list,
    tuple: _Lowering._tuple,
    dict: _Lowering._dict,
    np.ndarray: _Lowering._array,
    int: _Lowering._int,
    str: _Lowering._str,
    complex: _Lowering._complex,
    memoryview: _Lowering._memoryview,
}


def decode_tree(meta_bytes: int, total_bytes: int, area: memoryview, copy: bool) -> Any:
    """Inverse of encode_tree for an untrusted area of at least total_bytes. Raises SegmentError."""
    document = area[: meta_bytes or total_bytes].tobytes()  # copied once: the writer may still be scribbling
    start = meta_bytes + LINE - 1 & -LINE
    try:
        reader = _READERS.pop()
    except IndexError:
        reader = _Reader()
    try:
        if meta_bytes and document[0] == _OVERSIZE:
            end = start + int.from_bytes(document[1:], "little")
            if end > total_bytes:
                raise ValueError(f"document ends at {end} of {total_bytes} bytes")
            document, start = area[start:end].tobytes(), align(end)
        reader.area, reader.start, reader.end, reader.copy, reader.depth = area, start, total_bytes, copy, 0
        return reader.decode(document)
    except SegmentError:
        raise
    except Exception as error:  # hostile documents reach constructors in many ways; to the caller they are all one
        raise SegmentError(f"malformed payload ({type(error).__name__}: {error})") from error
    finally:
        reader.area = _NO_AREA  # a view that outlives its request would keep the segment from being closed
        _READERS.append(reader)


class _Reader:
    """Decodes one document at a time. A msgspec decoder costs a microsecond to make and its hook needs to know the area: so they are kept."""

    __slots__ = ("area", "copy", "decode", "depth", "end", "start")
    area: memoryview
    start: int
    end: int
    copy: bool
    depth: int

    def __init__(self) -> None:
        self.decode = msgpack.Decoder(ext_hook=self.extension).decode

    def extension(self, code: int, data: memoryview) -> Any:
        if code == ARRAY:
            layout = parse_description(data.tobytes())
            start = self.start
            end = start + layout.data_bytes
            if end > self.end:
                raise ValueError(f"array ends at {end} of {self.end} bytes")
            self.start = end + LINE - 1 & -LINE
            if self.copy:
                return copy_array(layout, self.area, start)
            return array_in(layout, self.area, start)
        if code == TUPLE:
            return tuple(self.items(data))
        if code == PAIRS:
            items = self.items(data)
            return dict(zip(items[::2], items[1::2], strict=True))
        return _read_leaf(code, data.tobytes())

    def items(self, data: memoryview) -> list[Any]:
        if self.depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        self.depth += 1
        items = self.decode(data)
        self.depth -= 1
        if type(items) is not list:
            raise TypeError("no list of items")
        return items


_READERS: list[_Reader] = []  # as many as ever decoded at the same time


def _read_leaf(code: int, data: bytes) -> Any:
    if code == SCALAR:
        spec, raw = _unpack_scalar(data)
        dtype = restore_dtype(spec)
        if len(raw) != dtype.itemsize:
            raise ValueError(f"{len(raw)} bytes for a scalar of {dtype}")
        scalar = np.ndarray((), dtype, raw)
        return scalar.copy()[()] if dtype.kind == "V" else scalar[()]  # a void scalar is a view
    if code == BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    if code == COMPLEX:
        return complex(*_complex.unpack(data))
    if code == TEXT:
        return data.decode("utf-8", "surrogatepass")
    if code == NUMPY_STR:
        return np.str_(data.decode("utf-8", "surrogatepass"))
    if code == NUMPY_BYTES:
        return np.bytes_(data)
    raise ValueError(f"extension {code}")
