"""A payload area as the ring has it, for the payload tests: aligned, larger than the payload, with a canary behind it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from gpuworker.payload import decode, encode, write_data

CANARY = 0xEE


class Area:
    """`value` encoded into aligned memory the way Client and Owner do it."""

    def __init__(self, value: Any, allow_pickle: bool = False) -> None:
        self.kind, meta, data, data_bytes = encode(value, allow_pickle)
        start = -(-len(meta) // 64) * 64
        self.meta_bytes, self.total_bytes = len(meta), start + data_bytes
        self.memory = aligned(self.total_bytes + 128)
        self.memory[: len(meta)] = meta
        write_data(data, self.memory[start : start + data_bytes])
        assert bytes(self.memory[self.total_bytes :]) == bytes([CANARY]) * 128, "wrote behind its data"

    def decode(self, copy: bool, allow_pickle: bool = False) -> Any:
        return decode(self.kind, self.meta_bytes, self.total_bytes, self.memory.toreadonly(), copy, allow_pickle)


def aligned(size: int) -> memoryview:
    raw = np.full(size + 64, CANARY, np.uint8)
    skip = -raw.ctypes.data % 64
    return memoryview(raw)[skip : skip + size]


def assert_same(got: Any, sent: Any) -> None:
    """Equal in value to the bit, and in type all the way down."""
    assert type(got) is type(sent)
    if isinstance(sent, np.ndarray):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        if sent.dtype.names is None:
            assert got.tobytes() == sent.tobytes()
        for name in sent.dtype.names or ():
            assert_same(got[name], sent[name])
    elif isinstance(sent, np.generic):
        assert got.dtype == sent.dtype
        if isinstance(sent, (np.str_, np.bytes_)):
            assert got == sent
        else:
            assert_same(np.asarray(got), np.asarray(sent))
    elif isinstance(sent, float):
        assert struct.pack("d", got) == struct.pack("d", sent)
    elif isinstance(sent, complex):
        assert_same(got.real, sent.real)
        assert_same(got.imag, sent.imag)
    elif isinstance(sent, dict):
        assert_same(list(got), list(sent))
        assert_same(list(got.values()), list(sent.values()))
    elif isinstance(sent, (list, tuple)):
        assert len(got) == len(sent)
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)
    else:
        assert got == sent


def arrays_in(value: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return [array for item in value for array in arrays_in(item)] if isinstance(value, (list, tuple)) else []


def assert_crosses(value: Any) -> None:
    """`value` arrives as it is, on both sides, with arrays placed and protected as promised."""
    area = Area(value)
    low = np.frombuffer(area.memory, np.uint8).ctypes.data
    for copy in (False, True):
        got = area.decode(copy)
        assert_same(got, value)
        for array, sent in zip(arrays_in(got), arrays_in(value), strict=True):
            assert array.ctypes.data % 64 == 0
            assert array.flags.writeable is copy
            assert array.flags.f_contiguous if sent.flags.f_contiguous else array.flags.c_contiguous
            if copy:
                array.fill(array.flat[0]) if array.size else None
            else:
                assert array.nbytes == 0 or low <= array.ctypes.data <= low + area.total_bytes - array.nbytes
    assert_same(area.decode(False), value)  # writing to the copies changed nothing here
