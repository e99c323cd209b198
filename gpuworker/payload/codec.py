"""encode and decode: a dispatch by exact type and by kind. The first lines of each are the hot path."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from gpuworker._native import lib
from gpuworker.errors import SegmentError, UnsupportedPayload
from gpuworker.payload.arrays import Data, copy_array, encode_array, from_buffer, layout_for, parse_layout, view_array
from gpuworker.payload.foreign import to_array
from gpuworker.payload.tree import decode_tree, encode_tree

BYTES: int = lib.GW_KIND_BYTES
STR: int = lib.GW_KIND_STR
ARRAY: int = lib.GW_KIND_ARRAY
TREE: int = lib.GW_KIND_TREE
PICKLE: int = lib.GW_KIND_PICKLE

_ndarray = np.ndarray
_TREES = frozenset({dict, list, tuple, type(None), bool, int, float, complex})


def encode(value: Any, allow_pickle: bool = False) -> tuple[int, bytes, Data, int]:
    """-> (kind, meta, data, data_bytes). `data` is bytes, a cffi buffer over the value's own memory (which must not change before it is copied)
    or Parts. Raises UnsupportedPayload for a value that would not arrive as what it is; with `allow_pickle` such a value is pickled."""
    kind = type(value)
    if kind is bytes:
        return BYTES, b"", value, len(value)
    try:
        if kind is _ndarray:
            if value.flags.c_contiguous:
                layout = layout_for(value.dtype, value.shape)
                return ARRAY, layout.meta, from_buffer(value), layout.data_bytes
            return ARRAY, *encode_array(value)
        if kind is str:
            text = value.encode("utf-8", "surrogatepass")
            return STR, b"", text, len(text)
        if kind in _TREES or isinstance(value, np.generic):
            return TREE, *encode_tree(value)
        if kind is bytearray or kind is memoryview:
            view = memoryview(value)
            return BYTES, b"", from_buffer(value) if view.c_contiguous else view.tobytes(), view.nbytes
        return ARRAY, *encode_array(to_array(value))
    except UnsupportedPayload:
        if not allow_pickle:
            raise
        return _pickled(value)


def decode(kind: int, meta_bytes: int, total_bytes: int, area: memoryview, copy: bool, allow_pickle: bool = False) -> Any:
    """The value in area[:total_bytes], whose content is untrusted. `area` is of format "B", aligned, and may be longer.

    Arrays are views of the area, read-only where it is, or with `copy` fresh, writable, 64-byte aligned arrays. Everything else is always copied.
    Raises SegmentError for nonsense, UnsupportedPayload for a pickle where none is allowed."""
    if kind == ARRAY:
        meta = area[:meta_bytes].tobytes()
        if copy:
            layout = parse_layout(meta, total_bytes)
            if total_bytes > len(area):
                raise SegmentError(f"malformed payload (array in {total_bytes} bytes in an area of {len(area)})")
            return copy_array(layout, area, layout.data_offset)
        return view_array(meta, total_bytes, area)
    if kind == TREE:
        if not 0 <= meta_bytes <= total_bytes <= len(area):
            raise SegmentError(f"malformed payload ({meta_bytes} + data = {total_bytes} bytes in an area of {len(area)})")
        return decode_tree(meta_bytes, total_bytes, area, copy)
    content = area[:total_bytes].tobytes()
    if meta_bytes or len(content) != total_bytes:
        raise SegmentError(f"malformed payload (kind {kind}, {meta_bytes} meta bytes, {total_bytes} bytes in an area of {len(area)})")
    if kind == BYTES:
        return content
    if kind == STR:
        try:
            return content.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise SegmentError(f"malformed payload (text: {error})") from error
    if kind == PICKLE:
        return _unpickled(content, allow_pickle)
    raise SegmentError(f"malformed payload (kind {kind})")


def array_layout(shape: int | tuple[int, ...], dtype: DTypeLike) -> tuple[bytes, int, int]:
    """-> (meta, data_offset, total_bytes) of a C-ordered array that is filled in place. Raises UnsupportedPayload for a dtype that cannot cross."""
    extents = tuple(int(extent) for extent in shape) if isinstance(shape, (tuple, list)) else (int(shape),)
    if any(extent < 0 for extent in extents):
        raise ValueError(f"negative extent in shape {extents}")
    layout = layout_for(np.dtype(dtype), extents)
    return layout.meta, layout.data_offset, layout.total_bytes


def _pickled(value: object) -> tuple[int, bytes, Data, int]:
    try:
        content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # __reduce__ of the value is anybody's code
        raise UnsupportedPayload(f"{type(value).__qualname__} cannot be pickled: {error}") from error
    return PICKLE, b"", content, len(content)


def _unpickled(content: bytes, allow_pickle: bool) -> Any:
    if not allow_pickle:
        raise UnsupportedPayload("the payload is a pickle, and this side does not load pickles: allow_pickle=True must be set on both")
    try:
        return pickle.loads(content)
    except (pickle.UnpicklingError, EOFError) as error:
        raise SegmentError(f"malformed payload (pickle: {error})") from error
    except Exception as error:  # loading a pickle runs anybody's code
        raise UnsupportedPayload(f"a pickle cannot be loaded here ({type(error).__name__}: {error}); its classes must be importable") from error
