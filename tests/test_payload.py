"""What crosses, what is refused and with which advice, and what hostile descriptions lead to."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import math
import subprocess
import sys
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from gpuworker.errors import SegmentError, UnsupportedPayload
from gpuworker.payload import Parts, array_layout, decode, encode
from gpuworker.payload.codec import ARRAY, PICKLE, STR, TREE
from tests.payload_area import Area, aligned, assert_crosses, assert_same

pack = msgspec.msgpack.encode
Ext = msgspec.msgpack.Ext
RECORD = np.dtype([("id", "i4"), ("name", "U5"), ("vector", ">f2", (3,))])

VALUES: list[Any] = [
    b"",
    b"x" * 64,
    "",
    "héllo \U0001f600",
    "lone \ud800 surrogate",
    None,
    True,
    0,
    -1,
    2**63,
    2**64 - 1,
    -(2**63),
    2**64,
    -(2**63) - 1,
    10**400,
    0.0,
    -0.0,
    math.inf,
    math.nan,
    complex(-0.0, math.nan),
    np.float32(1.5),
    np.bool_(True),
    np.longdouble("1.1"),
    np.datetime64("NaT"),
    np.datetime64("2020-01-01T00", "25s"),
    np.timedelta64(3, "ms"),
    np.str_("trailing\0"),
    np.bytes_(b"trailing\0"),
    np.void(b"ab\0"),
    np.zeros(1, RECORD)[0],
    np.float64(-0.0),
    np.array(3.5),
    np.array("text"),
    np.zeros((0, 3)),
    np.zeros(0, RECORD),
    np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(0, 2, 1),
    np.arange(24.0).reshape(4, 6)[::-2, ::3],
    np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    np.asfortranarray(np.arange(2000.0).reshape(50, 40)),
    np.arange(4000.0)[::2],
    np.broadcast_to(np.float32(7), (30, 100)),
    np.array([1, 2], ">u4"),
    np.array(["2020-01-01", "NaT"], "M8[D]"),
    np.array([b"a", b"bc"]),
    np.array(["é", "\U0001f600x"], ">U2"),
    np.array([True, False]),
    np.array([1 + 2j, math.nan], np.complex64),
    np.array([1, 2], np.float16),
    np.arange(6).astype([("only", "i8")]),
    np.ones(3, RECORD)[["vector", "id"]],
    np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    np.zeros(2, [(("a title", "name"), "i4")]),
    np.zeros(3, np.dtype([])),
    [],
    (),
    {},
    [[], (), {}, [()]],
    {"text": "hello", "ids": [1, 2, 3], "options": {"top_k": 5, "scores": [0.5, None, True]}},
    ("text", 3),
    {"input_ids": np.arange(32), "attention_mask": np.ones(32, np.int64)},
    {"input_ids": np.arange(1000), "attention_mask": np.ones(1000, np.int64)},
    {"image": np.zeros((32, 32, 3), np.uint8)[:, ::-1], "name": "x"},
    {"empty": np.zeros(0), "odd": np.arange(3, dtype=np.uint8), "last": np.zeros((0, 2))},
    {1: "int", "1": "str", 1.5: "float", None: 0, b"b": 1, (1, ("x", 2)): 2, 2j: 3, 1 << 70: 4, "\udcff": 5, np.int8(7): 6, np.str_("n"): 8},
    {"big": [1 << 64, {"s": "\ud800"}], "array": np.arange(3), "plain": {"x": 1}},
    [np.arange(3), {(0,): np.arange(4.0)}, (np.arange(5), [np.float32(1)])],
    ["x" * 100_000, list(range(100_000))],
    {"long": ["y" * 300] * 1000, "array": np.arange(10), "more": np.ones((3, 4), order="F")},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:40].encode("ascii", "replace").decode())
def test_values_cross(value: Any) -> None:
    assert_crosses(value)


@pytest.mark.parametrize(
    "buffer", [bytearray(b"abc"), memoryview(b"abc"), memoryview(b"aXbXcX")[::2], memoryview(np.array([0x6261], "<u2"))], ids=repr
)
def test_buffers_arrive_as_bytes(buffer: Any) -> None:
    assert_same(Area(buffer).decode(True), bytes(buffer))
    assert_same(Area([buffer]).decode(True), [bytes(buffer)])


def test_memory_map_arrives_as_array(tmp_path: Any) -> None:
    array = np.memmap(tmp_path / "map", np.int16, "w+", shape=(3, 4))
    array[:] = np.arange(12).reshape(3, 4)
    assert_same(Area(array).decode(True), np.asarray(array))
    assert_same(Area([array]).decode(True), [np.asarray(array)])


def test_arrays_are_not_copied_before_the_area() -> None:
    big = np.zeros(10_000)
    assert len(encode(big)[2]) == big.nbytes
    assert not isinstance(encode(big)[2], (bytes, Parts))
    assert not isinstance(encode({"one": big})[2], (bytes, Parts))
    assert isinstance(encode(big[::2])[2], Parts)
    assert isinstance(encode([big, big])[2], Parts)


def test_array_layout_describes_an_array_filled_in_place() -> None:
    meta, start, total_bytes = array_layout((3, 4), "f4")
    memory = aligned(total_bytes)
    memory[: len(meta)] = meta
    np.ndarray((3, 4), "f4", memory, start)[...] = 7
    assert start % 64 == 0
    assert total_bytes == start + 48
    assert_same(decode(ARRAY, len(meta), total_bytes, memory, True), np.full((3, 4), 7, "f4"))
    assert array_layout(5, np.uint8)[2] == array_layout((5,), np.uint8)[2]
    with pytest.raises(ValueError, match="negative"):
        array_layout(-1, "f4")
    with pytest.raises(UnsupportedPayload, match="pointers"):
        array_layout(1, object)


def test_views_follow_the_area_and_keep_it_alive() -> None:
    area = Area({"x": np.arange(5)})
    view = area.decode(False)["x"]
    area.memory[64] = 99
    assert view[0] == 99
    del area
    assert view[1] == 1


def test_nothing_keeps_the_area_after_decoding() -> None:
    memory = bytearray(4096)
    for value in ({"x": np.arange(5)}, [1, (2,)]):
        area = Area(value)
        memory[: area.total_bytes] = area.memory[: area.total_bytes]
        with memoryview(memory) as view:
            decode(area.kind, area.meta_bytes, area.total_bytes, view, True)
        with memoryview(memory) as view, pytest.raises(SegmentError):
            decode(area.kind, max(area.meta_bytes - 1, 0), area.total_bytes - 1, view, True)
    memory.extend(b"x")  # BufferError if a view of it were left


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Point:
    x: int


Pair = collections.namedtuple("Pair", "a b")


class Text(str):
    __slots__ = ()


class Words(list):  # type: ignore[type-arg]
    pass


class Matrix(np.ndarray):  # type: ignore[type-arg]
    pass


REFUSED = [
    ({1, 2}, "list"),
    (frozenset(), "list"),
    (Colour.RED, r"\.value"),
    (Level.LOW, "int"),
    (Point(1), "asdict"),
    (Pair(1, 2), "_asdict"),
    (Text("x"), "str"),
    (Words(), "list"),
    (collections.OrderedDict(), "dict"),
    (range(3), "list"),
    (datetime.datetime(2020, 1, 1), "isoformat"),
    (datetime.timedelta(1), "total_seconds"),
    (object(), "numpy array"),
    (len, "numpy array"),
    (np.array([None]), "pointers"),
    (np.zeros(2, [("a", "O")]), "pointers"),
    (np.ma.masked_array([1, 2], [True, False]), "filled"),
    (np.zeros(2).view(Matrix), "asarray"),
    (np.zeros(2, [("a", "i4")]).view(np.recarray), "asarray"),
    (np.zeros(2, [("a", "i4")]).view(np.recarray)[0], "item"),
    (np.zeros(2, [("\ud800", "i4")]), "described"),
]


@pytest.mark.parametrize(("value", "advice"), REFUSED, ids=lambda x: type(x).__name__)
def test_refusals_say_what_to_send(value: Any, advice: str) -> None:
    for wrapped in (value, [value], {"key": (1, value)}):
        with pytest.raises(UnsupportedPayload, match=rf"(?s){advice}.*allow_pickle=True"):
            encode(wrapped)


def test_string_dtype_is_refused() -> None:
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("numpy 2 only")
    with pytest.raises(UnsupportedPayload, match="astype"):
        encode(np.array(["a"], np.dtypes.StringDType()))


def test_dtypes_numpy_cannot_name_are_refused() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4):
        for value in (np.zeros(3, dtype), np.zeros(3, dtype)[0], np.zeros(3, [("a", dtype)])):
            with pytest.raises(UnsupportedPayload, match="astype"):
                encode(value)


def test_circular_and_deep_values_are_refused() -> None:
    circular: list[Any] = [1]
    circular += [circular, circular]
    twins: dict[str, Any] = {}
    twins["twin"] = (twins,)
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    for value in (circular, twins, deep, {(1,): deep}):
        with pytest.raises(UnsupportedPayload, match="levels deep"):
            encode(value)
    nested: Any = [1.5]
    for i in range(100):
        nested = ([nested], (nested,), {"x": nested}, {(1,): nested})[i % 4]
    assert_crosses(nested)


def test_pickle_only_where_allowed() -> None:
    for value in (Colour.RED, [Point(1)], Text("x"), {1, 2}, np.array([None, 1j])):
        area = Area(value, allow_pickle=True)
        assert area.kind == PICKLE
        got = area.decode(True, allow_pickle=True)
        assert type(got) is type(value)
        assert np.array_equal(got, value) if isinstance(value, np.ndarray) else got == value
        with pytest.raises(UnsupportedPayload, match="allow_pickle=True"):
            area.decode(True)
    assert encode({"a": 1}, True)[0] == TREE
    with pytest.raises(UnsupportedPayload, match="pickled"):
        encode(lambda: 1, True)
    for junk, error in ((b"junk", SegmentError), (b"", SegmentError), (b"cno_such_module\nx\n.", UnsupportedPayload)):
        with pytest.raises(error):
            decode(PICKLE, 0, len(junk), memoryview(junk), True, True)


def hostile_array(spec: Any, shape: Any = (1,), fortran: Any = False) -> tuple[int, bytes]:
    return ARRAY, pack([spec, shape, fortran])


def nested_extension(depth: int) -> bytes:
    document = pack([])
    for _ in range(depth):
        document = pack(Ext(2, document))
    return document


def structure(**changes: Any) -> list[Any]:
    field = {"name": "a", "base": "<i4", "shape": [], "offset": 0} | changes
    return [field.pop("itemsize", 4), [list(field.values())]]


HOSTILE = [
    hostile_array("|O"),
    hostile_array("O"),
    hostile_array("object"),
    hostile_array("i4,O"),
    hostile_array("<f4", [-1]),
    hostile_array("<f4", [1 << 40]),
    hostile_array("<f4", [1 << 32, 1 << 32]),
    hostile_array("<f4", [0, 1 << 63]),
    hostile_array("<f4", [True]),
    hostile_array("<f4", [1.0]),
    hostile_array("<f4", [1] * 100),
    hostile_array("<f4", [1], 3),
    hostile_array("<V99999999999"),
    hostile_array("|S2147483647"),
    hostile_array("__import__('os')"),
    hostile_array(None),
    hostile_array(["x"]),
    hostile_array(structure(base="|O")),
    hostile_array(structure(offset=-8)),
    hostile_array(structure(offset=1 << 40)),
    hostile_array(structure(name=5)),
    hostile_array(structure(shape=[1 << 20, 1 << 20])),
    hostile_array(structure(shape=["O", [1]])),
    hostile_array(structure(title=[1])),
    hostile_array(structure(itemsize=-1)),
    hostile_array(structure(itemsize=1 << 40)),
    (ARRAY, b""),
    (ARRAY, b"\xc1"),
    (ARRAY, pack(["<f4", [1]])),
    (ARRAY, b"\x91" * 5000),
    (ARRAY, pack(["x" * 20_000, [1], False])),
    (TREE, b"\xc1"),
    (TREE, b"\xc1" + b"\xff" * 8),
    (TREE, b"\x91" * 100_000),
    (TREE, b"\xdd\xff\xff\xff\xff"),
    (TREE, nested_extension(3000)),
    (TREE, nested_extension(140)),
    (TREE, pack(Ext(1, hostile_array("<f4", [1 << 40])[1]))),
    (TREE, pack(Ext(1, hostile_array("|O")[1]))),
    (TREE, pack(Ext(2, pack("no list")))),
    (TREE, pack(Ext(3, pack([1])))),
    (TREE, pack(Ext(3, pack([[], 1])))),
    (TREE, pack(Ext(5, b"short"))),
    (TREE, pack(Ext(6, b"\xff"))),
    (TREE, pack(Ext(7, pack(["<f4", b"123"])))),
    (TREE, pack(Ext(7, pack(["|O", b"12345678"])))),
    (TREE, pack(Ext(99, b""))),
    (STR, b""),
    (99, b""),
]


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(("kind", "meta"), HOSTILE)
def test_hostile_descriptions(kind: int, meta: bytes, copy: bool) -> None:
    start = -(-len(meta) // 64) * 64
    memory = aligned(start + 4096)
    memory[: len(meta)] = meta
    memory[start : start + 64] = b"\xff" * 64
    with pytest.raises(SegmentError, match="malformed payload"):
        decode(kind, len(meta), start + 64, memory.toreadonly(), copy)


@pytest.mark.parametrize("value", [b"x" * 100, "x" * 100, np.arange(100), {"a": np.arange(100), "b": np.arange(3)}, list(range(100))], ids=repr)
def test_claims_beyond_the_area(value: Any) -> None:
    area = Area(value)
    with pytest.raises(SegmentError, match="malformed payload"):  # says more than the area has
        decode(area.kind, area.meta_bytes, area.total_bytes, area.memory[: area.total_bytes - 1], False)
    if not isinstance(value, (bytes, str)):
        with pytest.raises(SegmentError, match="malformed payload"):  # holds less than its description says
            decode(area.kind, area.meta_bytes, area.total_bytes - 1, area.memory, True)


def test_threads_do_not_share_readers() -> None:
    areas = [Area({"id": i, "array": np.full(50, i), "tuple": (i, [i])}) for i in range(4)]
    wrong = []

    def read(i: int) -> None:
        for _ in range(500):
            got = areas[i].decode(True)
            if not (got["id"] == i and (got["array"] == i).all() and got["tuple"] == (i, [i])):
                wrong.append(got)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_torch_is_imported() -> None:
    program = (
        "import sys, numpy as np; from gpuworker.payload import encode, decode, encode_error, decode_error\n"
        "encode({'a': np.zeros(3)}); decode_error(encode_error(ValueError('x')))\n"
        "try: encode(object())\n"
        "except TypeError: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
