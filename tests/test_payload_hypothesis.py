"""Any value of the supported types crosses unchanged; any bytes at all decode to a value or a SegmentError."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from gpuworker.errors import SegmentError
from gpuworker.payload import decode
from gpuworker.payload.codec import ARRAY, BYTES, STR, TREE
from tests.payload_area import Area, aligned, arrays_in, assert_crosses

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

strings = st.text(st.characters(codec=None), max_size=12)  # lone surrogates included
plain_dtypes = npst.scalar_dtypes() | npst.byte_string_dtypes(min_len=1) | npst.unicode_string_dtypes(min_len=1)
shapes = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@st.composite
def padded_dtypes(draw: st.DrawFn, base: st.SearchStrategy[np.dtype[Any]]) -> np.dtype[Any]:
    """Structures with holes, fields out of order, sub-arrays and structures inside."""
    fields = draw(st.lists(base, min_size=1, max_size=3))
    sub_shapes = [draw(st.sampled_from([(), (2,), (2, 3)])) for _ in fields]
    formats = [np.dtype((field, shape)) if shape and field.itemsize else field for field, shape in zip(fields, sub_shapes, strict=True)]
    offsets, end = [], 0
    for form in formats:
        offsets.append(end + draw(st.integers(0, 5)))
        end = offsets[-1] + form.itemsize
    order = draw(st.permutations(range(len(formats))))
    return np.dtype(
        {
            "names": [f"field {i}" for i in order],
            "formats": [formats[i] for i in order],
            "offsets": [offsets[i] for i in order],
            "itemsize": end + draw(st.integers(0, 4)),
        }
    )


dtypes = plain_dtypes | padded_dtypes(plain_dtypes | padded_dtypes(plain_dtypes)) | npst.array_dtypes(plain_dtypes)


@st.composite
def arrays(draw: st.DrawFn, dtypes: st.SearchStrategy[np.dtype[Any]] = dtypes) -> np.ndarray[Any, Any]:
    array = draw(npst.arrays(draw(dtypes), draw(shapes)))
    if array.ndim and draw(st.booleans()):
        array = array[tuple(draw(st.sampled_from([slice(None), slice(None, None, 2), slice(None, None, -1), slice(1, None)])) for _ in array.shape)]
    return draw(st.sampled_from([lambda a: a, np.transpose, np.asfortranarray, lambda a: np.swapaxes(a, 0, -1) if a.ndim else a]))(array)


scalars = npst.arrays(plain_dtypes, ()).map(lambda array: array[()]) | strings.map(np.str_) | st.binary(max_size=8).map(np.bytes_)
hashable = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | strings | st.binary(max_size=12) | scalars
trees = st.recursive(
    hashable | arrays() | npst.arrays(padded_dtypes(plain_dtypes), ()).map(lambda array: array[()]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(hashable | st.tuples(hashable), inner, max_size=4)
    ),
    max_leaves=12,
)


@SETTINGS
@given(arrays())
def test_arrays_cross(array: np.ndarray[Any, Any]) -> None:
    assert_crosses(array)


@SETTINGS
@given(trees)
def test_trees_cross(tree: Any) -> None:
    assert_crosses(tree)


VICTIMS = [
    b"some bytes",
    "text with é",
    np.arange(12, dtype=">f8").reshape(3, 4),
    np.zeros((3, 2), order="F"),
    np.zeros(3, [("a", "i4"), ("b", "U3", (2,)), ("c", [("d", "M8[ns]")])]),
    {"ids": np.arange(5), "mask": np.ones((2, 3), bool), "text": "x", "options": {"k": [1, 2.5, None, True]}},
    [(1, 2), {3: 4, (5,): 6j}, 1 << 80, "\udc80", np.float32(1), np.str_("s"), np.datetime64("2020"), b"raw"],
    {"a": (np.zeros(2000), "x" * 200)},
    None,
]


@pytest.mark.parametrize("index", range(len(VICTIMS)))
def test_patched_payloads_never_escape(index: int) -> None:
    chance = random.Random(index)
    area = Area(VICTIMS[index])
    good = bytes(area.memory)
    for _ in range(250):
        memory = aligned(len(good))
        memory[:] = good
        kind, meta_bytes, total_bytes = area.kind, area.meta_bytes, area.total_bytes
        where = meta_bytes if meta_bytes and chance.random() < 0.8 else total_bytes
        for _ in range(chance.choice((1, 1, 2, 4, 16))):
            memory[chance.randrange(max(where, 1))] = chance.choice((0, 0x7F, 0x80, 0xC1, 0xDD, 0xFF, chance.randrange(256)))
        if chance.random() < 0.2:
            kind = chance.choice((BYTES, STR, ARRAY, TREE, 77))
        if chance.random() < 0.2:
            total_bytes = chance.randrange(len(good) * 2)
            meta_bytes = chance.randrange(total_bytes + 1)
        check_hostile(kind, meta_bytes, total_bytes, memory)


@SETTINGS
@given(st.sampled_from([ARRAY, TREE]), st.binary(max_size=120), st.integers(0, 200))
def test_random_bytes_never_escape(kind: int, content: bytes, total_bytes: int) -> None:
    memory = aligned(256)
    memory[: len(content)] = content
    check_hostile(kind, min(len(content), total_bytes), total_bytes, memory)


def check_hostile(kind: int, meta_bytes: int, total_bytes: int, memory: memoryview) -> None:
    low = np.frombuffer(memory, np.uint8).ctypes.data
    for copy in (False, True):
        try:
            value = decode(kind, meta_bytes, total_bytes, memory.toreadonly(), copy)
        except SegmentError:
            continue
        if not copy:
            for array in arrays_in(value):
                assert array.nbytes == 0 or low <= array.ctypes.data <= low + total_bytes - array.nbytes
