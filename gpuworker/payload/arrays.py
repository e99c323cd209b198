"""Arrays: the description that travels with the elements, views and copies of what lies in an area, and several arrays in one area.

The one rule of placement, for every reader and writer: the first array starts where the data starts, each further one on the next multiple of 64.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from msgspec import Meta, msgpack

from gpuworker._native import ffi, lib
from gpuworker.errors import SegmentError, UnsupportedPayload
from gpuworker.payload.dtypes import dtype_spec, restore_dtype

Array: TypeAlias = "np.ndarray[Any, Any]"
CBuffer: TypeAlias = Any  # what ffi.from_buffer returns: the memory of a Python object, as a `const char *` argument
Data: TypeAlias = "bytes | CBuffer | Parts"

LINE: int = lib.GW_LINE
ARRAY = 1  # msgpack extension code of a reference to an array, see tree.py
MAX_META_BYTES: int = lib.GW_MAX_META
_MAX_LAYOUT_BYTES = 16384  # of one description: bounds what the caches below hold
_SMALL_BYTES = 4096  # up to here a second copy is cheaper than a Python call per array
_UINT8 = np.dtype(np.uint8)
_NULL = ffi.cast("char *", 0)
_ZEROS = bytes(LINE)

from_buffer, _memmove = ffi.from_buffer, ffi.memmove
_empty = np.empty
_pack = msgpack.Encoder().encode
_unpack = msgpack.Decoder(tuple[Any, tuple[Annotated[int, Meta(ge=0)], ...], bool]).decode


def align(size: int) -> int:
    """`size` rounded up to a cache line."""
    return (size + LINE - 1) & -LINE


class Layout:
    """Of one array in an area: `meta` describes it, `data_offset` is where the elements start when it is the whole payload."""

    __slots__ = ("data_bytes", "data_offset", "dtype", "meta", "order", "reference", "shape", "total_bytes")

    def __init__(self, meta: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> None:
        self.meta, self.dtype, self.shape = meta, dtype, shape
        self.order: Literal["C", "F"] = "F" if fortran else "C"
        self.data_bytes = dtype.itemsize
        for extent in shape:
            self.data_bytes *= extent  # a Python int: never overflows
        self.data_offset = align(len(meta))
        self.total_bytes = self.data_offset + self.data_bytes
        self.reference = msgpack.Ext(ARRAY, meta)  # stands for the array in a tree


@lru_cache(1024)
def layout_for(dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool = False) -> Layout:
    """Raises UnsupportedPayload for a dtype that does not survive."""
    meta = _pack((dtype_spec(dtype), shape, fortran))
    if len(meta) > _MAX_LAYOUT_BYTES:
        raise UnsupportedPayload(f"a dtype whose description takes {len(meta):,} bytes (limit {_MAX_LAYOUT_BYTES:,}): send fewer fields")
    return Layout(meta, dtype, shape, fortran)


def parse_layout(meta: bytes, total_bytes: int) -> Layout:
    """The layout an untrusted description stands for, which has to fit `total_bytes`. Raises SegmentError."""
    layout = parse_description(meta)
    if layout.total_bytes > total_bytes:
        raise SegmentError(f"malformed payload (array of {layout.total_bytes} bytes in {total_bytes})")
    return layout


def view_array(meta: bytes, total_bytes: int, area: memoryview) -> Array:
    """The array that an untrusted `meta` describes, as a view of area[:total_bytes], read-only where that is. Raises SegmentError."""
    layout = parse_layout(meta, total_bytes)
    return array_in(layout, area, layout.data_offset)


def array_in(layout: Layout, memory: Any, start: int) -> Array:
    """An array over `memory` from byte `start` on. Raises SegmentError for what numpy refuses (a shape of 65 dimensions, say, or too little memory)."""
    try:
        array: Array = np.ndarray(layout.shape, layout.dtype, memory, start, None, layout.order)
        return array
    except (TypeError, ValueError, OverflowError) as error:
        raise SegmentError(f"malformed payload (array of shape {layout.shape}: {error})") from error


@lru_cache(256)
def parse_description(meta: bytes) -> Layout:
    """The layout an untrusted description stands for. Raises SegmentError."""
    try:
        if len(meta) > _MAX_LAYOUT_BYTES:
            raise ValueError(f"description of {len(meta)} bytes")
        spec, shape, fortran = _unpack(meta)
        return Layout(meta, restore_dtype(spec), shape, fortran)
    except Exception as error:  # numpy has many ways to refuse a description; to the caller they are all one
        raise SegmentError(f"malformed payload (array description: {error})") from error


def encode_array(array: Array) -> tuple[bytes, Data, int]:
    """-> (meta, data, data_bytes) of a plain ndarray."""
    layout, source = place(array)
    return layout.meta, pack_arrays([source], layout.data_bytes), layout.data_bytes


def place(array: Array) -> tuple[Layout, Array]:
    """The array's layout, and the array whose elements in C order are what travels: of a Fortran-ordered one its transpose."""
    flags = array.flags
    if flags.c_contiguous or not flags.f_contiguous:
        return layout_for(array.dtype, array.shape), array
    return layout_for(array.dtype, array.shape, True), array.T


def pack_arrays(arrays: list[Array], data_bytes: int) -> Data:
    """What fills `data_bytes` bytes of an area with these arrays; contiguous and large ones are not copied here."""
    if len(arrays) == 1 and arrays[0].flags.c_contiguous:
        return from_buffer(arrays[0])
    if data_bytes > _SMALL_BYTES:
        return Parts(arrays)
    chunks, over = [], 0
    for array in arrays:
        if over:
            chunks.append(_ZEROS[over:])
        chunk = array.tobytes()
        chunks.append(chunk)
        over = len(chunk) % LINE
    return b"".join(chunks)


class Parts:
    """Arrays still to be copied: each once, straight to its place."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: list[Array]) -> None:
        self.arrays = arrays

    def write(self, area: memoryview) -> None:
        """Fills `area`, which is where the data starts: aligned, and data_bytes or more long."""
        start = 0
        for array in self.arrays:
            np.ndarray(array.shape, array.dtype, area, start)[...] = array
            start = align(start + array.nbytes)


def write_data(data: Data, area: memoryview) -> None:
    """Copies what `encode` returned to `area`, which is where the data starts: aligned, and data_bytes long."""
    if isinstance(data, Parts):
        data.write(area)
    else:
        _memmove(area, data, len(data))


def contiguous(data: Data, data_bytes: int) -> memoryview:
    """What `encode` returned, as it lies in an area, in one piece of memory."""
    if isinstance(data, Parts):
        memory = np.zeros(data_bytes, _UINT8).data  # nothing of ours shows in the gaps
        data.write(memory)
        return memory
    return memoryview(data if isinstance(data, bytes) else ffi.buffer(data))


def copy_array(layout: Layout, area: memoryview, start: int) -> Array:
    """A fresh writable copy, on a cache line, of the array at `start`; the caller has checked that it lies in the area. Raises SegmentError."""
    size = layout.data_bytes
    memory = _empty(size + LINE, _UINT8)
    pointer = from_buffer(memory)
    skip = (_NULL - pointer) & (LINE - 1)  # bytes to the next cache line; the cheapest way to ask for an address
    _memmove(pointer + skip, area[start : start + size], size)
    return array_in(layout, memory, skip)
