"""Requests as rows of padded batches and rows as answers (native/rows.c), against numpy and the payload codec; native/tests/rows.c has more of the same in C."""

import itertools
import math
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from gpuworker._native import ffi, lib
from gpuworker.errors import InvalidRequest, SegmentError
from gpuworker.execution.grid import Shape
from gpuworker.execution.program import batch_arrays
from gpuworker.execution.rows import LONGEST_NAME, MOST_ARRAYS, MOST_DIMS, Fields
from gpuworker.payload import decode, encode, write_data
from gpuworker.payload.codec import ARRAY, TREE
from gpuworker.segment import Geometry, Segment, State
from gpuworker.segment.wire import SLOT_MASK, data_start, describe
from gpuworker.tensors import DTYPES, Signature, TensorSpec

SETTINGS = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
CAPACITY, AREA_BYTES = 4, 1 << 20
LONG_NS = 30_000_000_000
GARBAGE = 0xEE


class Ring:
    """A segment with its owner and one frontend."""

    def __init__(self, name):
        self.owner = Segment.own(name, Geometry(CAPACITY, AREA_BYTES, AREA_BYTES, 2))
        lib.gw_set_policy(self.owner.port, lib.GW_REJECT, lib.GW_PARK, CAPACITY, CAPACITY, 0, CAPACITY)
        lib.gw_open_backlog(self.owner.port)
        lib.gw_set_state(self.owner.port, State.SERVING)
        self.front = Segment.attach(name)
        assert self.front.join()
        self.sent = []

    def clear(self):
        """What an example that failed has left."""
        for ticket in self.sent:
            if lib.gw_abandon(self.front.port, ticket) == 1:
                lib.gw_finish(self.owner.port, [ticket, 0], 1)
        self.sent.clear()

    def send(self, request):
        """As a client does."""
        kind, meta, data, data_bytes = encode(request)
        ticket, start = lib.gw_claim(self.front.port), data_start(len(meta))
        assert ticket >= 0
        self.sent.append(ticket)
        area = self.front.requests[ticket & SLOT_MASK]
        area[: len(meta)] = meta
        write_data(data, area[start : start + data_bytes])
        assert lib.gw_publish(self.front.port, ticket, describe(kind, len(meta), start + data_bytes), 0, 0) == 0
        return ticket

    def take(self, n):
        taken = ffi.new("uint64_t[]", 2 * n)
        assert lib.gw_collect(self.owner.port, 0) == n
        assert lib.gw_take(self.owner.port, n, 0, taken) == n
        return taken

    def receive(self, ticket, copy):
        response = lib.gw_wait(self.front.port, ticket, 0, LONG_NS)
        assert response >= 0
        kind, meta, total = (
            lib.GW_KIND_ARRAY if response >> 54 == ARRAY else response >> 54,
            response >> 36 & lib.GW_MAX_META,
            response & (1 << 36) - 1,
        )
        return decode(kind, meta, total, self.front.responses[ticket & SLOT_MASK], copy)


@pytest.fixture(scope="module")
def ring():
    ring = Ring(f"t-{os.getpid()}-rows")
    yield ring
    ring.front.close()
    ring.owner.unlink()
    ring.owner.close()


def fields_of(signature):
    return Fields(signature.inputs, not signature.single_input, signature.dims, signature.max_extents)


def read(ring, fields, taken, n):
    """-> (gw_rows, its gw_row[n], indices of odd ones)"""
    reader, rows, odd = fields.describe(), ffi.new("gw_row[]", n), ffi.new("int[]", n)
    odds = lib.gw_read_rows(ring.owner.port, reader, taken, n, rows, odd)
    return reader, rows, ffi.unpack(odd, odds) if odds else []


def shape_in(spec, dims, extents):
    return tuple(extents[dims.index(extent)] if isinstance(extent, str) else extent for extent in spec.shape)


def corner(shape):
    return tuple(map(slice, shape))


def padded_batch(signature, requests, extents, shape):
    """What the batch has to be, by numpy alone. All arrays by name, masks and lengths too."""
    dims, expected = signature.dims, {}
    for name, spec in signature.inputs.items():
        batch = np.full((shape.rows, *shape_in(spec, dims, shape.extents)), spec.pad_value, spec.dtype)
        for i, request in enumerate(requests):
            batch[(i, *corner(request[name].shape))] = request[name]
        expected[name] = batch
        real = [own[dims.index(spec.dims[0])] for own in extents] if spec.dims else []
        real += [1] * (shape.rows - len(real))
        if spec.mask:
            expected[spec.mask] = (np.arange(shape.extents[dims.index(spec.dims[0])]) < np.array(real)[:, None]).astype(np.int64)
        if spec.lengths:
            expected[spec.lengths] = np.array(real, np.int64)
    return expected


def garbage(signature, shape):
    return {
        array.name: np.frombuffer(bytearray([GARBAGE]) * (math.prod(found) * array.dtype.itemsize), array.dtype).reshape(found)
        for array in batch_arrays(signature)
        for found in [array.shape(shape, signature.dims)]
    }


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        assert got[name].shape == array.shape
        assert got[name].tobytes() == array.tobytes(), name


def random_array(seed, dtype, shape):
    """Any bytes at all; bools are 0 and 1."""
    raw = np.random.default_rng(seed).bytes(math.prod(shape) * np.dtype(dtype).itemsize)
    array = np.frombuffer(bytearray(raw), np.uint8 if dtype == "bool" else dtype).reshape(shape)
    return np.asarray(array & 1).astype(bool) if dtype == "bool" else array


PADS = {"b": [True, False], "u": [0, 1, 255], "i": [0, -1, 100], "f": [0, -1, 0.5, math.nan, -math.inf, -0.0], "c": [0, -1.5, math.nan]}


@st.composite
def specs(draw, dims, named, prefix):
    dtype = draw(st.sampled_from(DTYPES))
    ndim = draw(st.integers(0, 3) | st.integers(0, MOST_DIMS))
    shape = tuple(draw(st.lists(st.sampled_from(dims) | st.integers(1, 3 if ndim < 5 else 2), min_size=ndim, max_size=ndim)))
    has_dims = named and any(isinstance(extent, str) for extent in shape)
    options = {option: f"{prefix}.{option}" for option in ("mask", "lengths") if has_dims and draw(st.booleans())}
    return TensorSpec(dtype, shape, pad_value=draw(st.sampled_from(PADS[np.dtype(dtype).kind])), **options)


@st.composite
def signatures(draw):
    dims = draw(st.sampled_from([["n"], ["n", "m"], ["rows", "n", "m"]]))
    if draw(st.integers(0, 3)) == 0:
        inputs = draw(specs(dims, False, ""))
        known = list(inputs.dims)
    else:
        inputs = {
            name: draw(specs(dims, True, name)) for name in draw(st.sampled_from([["x"], ["x", "y"], ["b", "a", "c"], ["né", "x" * 40, "z", "y"]]))
        }
        known = [dim for spec in inputs.values() for dim in spec.dims]
    output = st.builds(
        TensorSpec, st.sampled_from(DTYPES), st.lists(st.integers(1, 2) | (st.sampled_from(known) if known else st.nothing()), max_size=4)
    )
    return Signature(inputs, draw(output | st.dictionaries(st.sampled_from(["p", "q", "r"]), output, min_size=1)))


@SETTINGS
@given(signature=signatures(), n=st.integers(1, CAPACITY), data=st.data())
def test_rows_are_what_numpy_makes_of_them(ring, signature, n, data):
    ring.clear()
    small = all(len(spec.shape) < 5 for spec in [*signature.inputs.values(), *signature.outputs.values()])
    extents = [tuple(data.draw(st.integers(1, 5 if small else 2)) for _ in signature.dims) for _ in range(n)]
    requests = [
        {name: random_array((i, k), spec.dtype, shape_in(spec, signature.dims, own)) for k, (name, spec) in enumerate(signature.inputs.items())}
        for i, own in enumerate(extents)
    ]
    tickets = [ring.send(request["input"] if signature.single_input else request) for request in requests]
    taken, fields = ring.take(n), fields_of(signature)
    reader, rows, odd = read(ring, fields, taken, n)
    assert odd == []
    largest = [max(column) for column in zip(*extents, strict=True)]
    assert list(reader.largest[0 : len(largest)]) == largest
    assert reader.cells == sum(map(math.prod, extents))
    shape = Shape(n + data.draw(st.integers(0, 2)), tuple(extent + data.draw(st.integers(0, 2 if small else 1)) for extent in largest))
    arrays = garbage(signature, shape)
    lib.gw_gather(fields.aimed(shape, arrays).rows, rows, n)
    assert_equal(arrays, padded_batch(signature, requests, extents, shape))

    outputs = {
        name: random_array(name.encode()[0], spec.dtype, (shape.rows, *shape_in(spec, signature.dims, shape.extents)))
        for name, spec in signature.outputs.items()
    }
    answers = Fields(signature.outputs, not signature.single_output, signature.dims, {}).aimed(shape, outputs)
    assert answers.size_bytes == sum(array.nbytes for array in outputs.values())
    assert lib.gw_scatter(ring.owner.port, answers.rows, rows, taken, n, ffi.new("int[]", n)) == 0
    assert lib.gw_finish(ring.owner.port, taken, n) == 0
    for i, ticket in enumerate(tickets):
        cut = {name: np.asarray(outputs[name][(i, *corner(shape_in(spec, signature.dims, extents[i])))]) for name, spec in signature.outputs.items()}
        for copy in (False, True):
            answer = ring.receive(ticket, copy)
            got = {"output": answer} if signature.single_output else answer
            assert list(got) == list(cut)
            assert_equal(got, cut)
            for array in got.values():
                assert type(array) is np.ndarray
                assert array.flags.c_contiguous
                assert array.flags.aligned
                assert array.ctypes.data % 64 == 0
                assert array.flags.writeable or not copy
        assert lib.gw_release(ring.front.port, ticket) == 0


TWO = Signature({"x": TensorSpec("int8", ("n",)), "y": TensorSpec("float32", (2, "n"), pad_value=7)}, TensorSpec("int8", ("n",)))


@pytest.mark.parametrize("extent", [*range(441, 461), 1, 7, 8, 63, 64, 65, 127, 128, 255, 256, 3640, 65535, 65536, 90_000])
@pytest.mark.parametrize("strided", [False, True])
def test_sizes_around_those_that_clients_copy_twice(ring, extent, strided):
    """Up to 4096 bytes of several arrays are joined before they are sent, larger ones are copied straight to their places; so are those with gaps."""
    step = 2 if strided else 1
    request = {"x": random_array(1, "int8", (extent * step,))[::step], "y": random_array(2, "float32", (2, extent * step))[:, ::step]}
    ticket, fields = ring.send(request), fields_of(TWO)
    _, rows, odd = read(ring, fields, ring.take(1), 1)
    assert odd == []
    shape = Shape(2, (extent + 3,))
    arrays = garbage(TWO, shape)
    lib.gw_gather(fields.aimed(shape, arrays).rows, rows, 1)
    assert_equal(arrays, padded_batch(TWO, [request], [(extent,)], shape))
    finish(ring, ticket)


def finish(ring, *tickets):
    lib.gw_finish(ring.owner.port, [word for ticket in tickets for word in (ticket, 0)], len(tickets))
    for ticket in tickets:
        assert lib.gw_release(ring.front.port, ticket) == 0


def test_odd_ones_among_others(ring):
    """They are named, and are neither among the largest nor among the cells."""
    signature = Signature(TensorSpec("float32", ("n", "m")), TensorSpec("float32", ("n", "m")), {"m": 4})
    right, other = np.ones((2, 4), "f4"), np.ones((3, 1), "f4")
    tickets = [ring.send(request) for request in (right, np.asfortranarray(np.ones((50, 4), "f4")), other, np.ones((1, 5), "f4"))]
    reader, rows, odd = read(ring, fields_of(signature), ring.take(4), 4)
    assert odd == [1, 3]
    assert list(reader.largest[0:2]) == [3, 4]
    assert reader.cells == 2 * 4 + 3
    assert [list(rows[i].extents[0:2]) for i in (0, 2)] == [[2, 4], [3, 1]]
    finish(ring, *tickets)


def test_the_largest_signature_there_is(ring):
    dims = [f"d{k}" for k in range(MOST_DIMS)]
    names = [f"{k}" * LONGEST_NAME for k in range(MOST_ARRAYS)]
    signature = Signature({name: TensorSpec("int8", tuple(dims[k:] + dims[:k])) for k, name in enumerate(names)}, TensorSpec("int8", (1,)))
    request = {name: random_array(k, "int8", (1,) * (7 - k) + (70_000,) + (1,) * k) for k, name in enumerate(names)}
    ticket, fields = ring.send(request), fields_of(signature)
    _, rows, odd = read(ring, fields, ring.take(1), 1)
    assert odd == []
    shape = Shape(1, (1,) * 7 + (70_001,))
    arrays = garbage(signature, shape)
    lib.gw_gather(fields.aimed(shape, arrays).rows, rows, 1)
    assert_equal(arrays, padded_batch(signature, [request], [(1,) * 7 + (70_000,)], shape))
    finish(ring, ticket)


@pytest.mark.parametrize(
    "specs",
    [
        {f"x{k}": TensorSpec("int8", (1,)) for k in range(MOST_ARRAYS + 1)},
        {"x": TensorSpec("int8", (1,) * (MOST_DIMS + 1))},
        {"x": TensorSpec("int8", tuple("abcde")), "y": TensorSpec("int8", tuple("fghi"))},
        {"é" * (LONGEST_NAME // 2 + 1): TensorSpec("int8", ("n",))},
    ],
)
def test_what_has_no_room_in_a_description_is_refused(specs):
    signature = Signature(specs, TensorSpec("int8", (1,)))
    with pytest.raises(ValueError, match="may have up to"):
        fields_of(signature)


def test_batches_that_are_not_in_one_piece_are_refused():
    arrays = {"x": np.zeros((4, 4), "i1")[:, ::2], "y": np.zeros((4, 2, 2), "f4")}
    with pytest.raises((ValueError, BufferError)):
        fields_of(TWO).aimed(Shape(4, (2,)), arrays)


def test_answers_that_do_not_fit_are_named_and_the_others_written(ring):
    signature = Signature(TensorSpec("int8", ("n",)), TensorSpec("float64", ("n", 3)))
    tickets = [ring.send(np.ones(n, "i1")) for n in (2, AREA_BYTES // 24, 5)]
    taken = ring.take(3)
    _, rows, odd = read(ring, fields_of(signature), taken, 3)
    assert odd == []
    shape = Shape(3, (AREA_BYTES // 24,))
    outputs = {"output": np.arange(3 * shape.extents[0] * 3, dtype="f8").reshape(3, -1, 3)}
    unfit, answers = ffi.new("int[]", 3), Fields(signature.outputs, False, signature.dims, {}).aimed(shape, outputs)
    assert lib.gw_scatter(ring.owner.port, answers.rows, rows, taken, 3, unfit) == 1
    assert unfit[0] == 1
    lib.gw_finish(ring.owner.port, taken, 3)
    for i, n in ((0, 2), (2, 5)):
        assert np.array_equal(ring.receive(tickets[i], True), outputs["output"][i][:n])
    for ticket in tickets:
        lib.gw_release(ring.front.port, ticket)


# descriptions that lie


def write(ring, meta, data_bytes):
    """Into slot 0, the rest of which is nobody's."""
    area = ring.front.requests[0]
    area[: len(meta)] = meta
    return data_start(len(meta)) + data_bytes


def read_as_python_would(ring, signature, fields, request, kind):
    """-> whether it was read: then as exactly what the decoder and the check make of it."""
    _, rows, odd = read(ring, fields, ffi.new("uint64_t[]", [0, request]), 1)
    if odd:
        return False
    meta, total = request >> 36 & lib.GW_MAX_META, request & (1 << 36) - 1
    assert total <= AREA_BYTES
    value = decode(kind, meta, total, ring.owner.requests[0].toreadonly(), False)
    canonical, extents = signature.check(value)
    assert tuple(rows[0].extents[0 : len(extents)]) == extents
    for f, array in enumerate([canonical] if signature.single_input else canonical.values()):
        assert array.flags.c_contiguous
        assert int(ffi.cast("uintptr_t", rows[0].source[f])) == array.ctypes.data
    return True


LIED_ABOUT = [
    (Signature(TensorSpec("float32", (384,)), TensorSpec("int8", (1,))), np.ones(384, "f4")),
    (Signature(TensorSpec("bool", ()), TensorSpec("int8", (1,))), np.array(True)),
    (Signature(TensorSpec("int64", ("n", 3, "m", "n")), TensorSpec("int8", (1,)), {"m": 3}), np.ones((2, 3, 3, 2), "i8")),
    (TWO, {"x": np.ones(200, "i1"), "y": np.ones((2, 200), "f4")}),
    (Signature({"ids": TensorSpec("int64", ("tokens",), mask="mask")}, TensorSpec("int8", (1,)), {"tokens": 512}), {"ids": np.ones(300, "i8")}),
    (
        Signature(
            {"a": TensorSpec("complex128", ()), "b": TensorSpec("uint16", ("h", "w")), "c": TensorSpec("int8", ("w",))}, TensorSpec("int8", (1,))
        ),
        {"a": np.ones((), "c16"), "b": np.ones((2, 5), "u2"), "c": np.ones(5, "i1")},
    ),
]


@pytest.mark.parametrize(("signature", "request_"), LIED_ABOUT)
def test_every_byte_and_every_cut(ring, signature, request_):
    fields, (kind, meta, _, data_bytes) = fields_of(signature), encode(request_)
    total, area = write(ring, meta, data_bytes), ring.front.requests[0]
    said = describe(kind, len(meta), total)
    assert read_as_python_would(ring, signature, fields, said, kind)
    read_anyway = 0
    for at, value in itertools.product(range(len(meta)), range(256)):
        area[at] = value
        read_anyway += read_as_python_would(ring, signature, fields, said, kind)
        area[at] = meta[at]
    assert read_anyway >= len(meta), "those that changed nothing"
    for cut in range(len(meta)):
        assert not read_as_python_would(ring, signature, fields, describe(kind, cut, total), kind)
        assert not read_as_python_would(ring, signature, fields, describe(kind, len(meta), cut), kind)
    for less in range(max(total - 100, 0), total + 100):
        assert read_as_python_would(ring, signature, fields, describe(kind, len(meta), less), kind) == (less >= total)
    for more in (AREA_BYTES, AREA_BYTES + 1, 1 << 32, (1 << 36) - 1):
        assert read_as_python_would(ring, signature, fields, describe(kind, len(meta), more), kind) == (more <= AREA_BYTES)
    for other in range(128):
        assert read_as_python_would(ring, signature, fields, describe(other, len(meta), total), kind) == (other == kind)
    assert read(ring, fields, ffi.new("uint64_t[]", [0, (1 << 64) - 1]), 1)[2] == [0]


@SETTINGS
@given(case=st.sampled_from(LIED_ABOUT), changes=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), max_size=4), off=st.integers(-2, 2))
def test_several_bytes(ring, case, changes, off):
    signature, request = case
    kind, meta, _, data_bytes = encode(request)
    changed = bytearray(meta)
    for at, value in changes:
        changed[at % len(meta)] = value
    total = write(ring, bytes(changed), data_bytes)
    read_as_python_would(ring, signature, fields_of(signature), describe(kind, len(meta) + off, total), kind)


def one(*description):
    return ARRAY, msgpack.encode(description)


def tree(document):
    return TREE, msgpack.encode({name: msgpack.Ext(1, msgpack.encode(array)) for name, array in document.items()})


PLAIN = Signature(TensorSpec("float32", ("n", "m")), TensorSpec("int8", (1,)), {"m": 100})


@pytest.mark.parametrize(
    "extents", [(0, 5), (5, 0), (1 << 32, 1), (1, 1 << 32), (1 << 63, 1), (1 << 63, 2), (1 << 31, 100), (5, 101), (5,), (5, 5, 1), (), (1 << 18, 2)]
)
def test_extents_that_cannot_be(ring, extents):
    kind, meta = one("<f4", extents, False)
    write(ring, meta, 0)
    assert not read_as_python_would(ring, PLAIN, fields_of(PLAIN), describe(kind, len(meta), AREA_BYTES), kind)


@pytest.mark.parametrize(
    ("signature", "kind", "meta"),
    [
        (PLAIN, *one("<f4", (5, 5), True)),
        (PLAIN, *one("<f4", (5, 5), 0)),
        (PLAIN, *one("<f4", (5, 5))),
        (PLAIN, *one("<f4", (5, 5), False, False)),
        (PLAIN, *one("<f4", (5, -5), False)),
        (PLAIN, *one("<f4", (5, 5.0), False)),
        (PLAIN, *one(">f4", (5, 5), False)),
        (PLAIN, *one("<f8", (5, 5), False)),
        (PLAIN, *one("<i4", (5, 5), False)),
        (PLAIN, ARRAY, b""),
        (PLAIN, TREE, one("<f4", (5, 5), False)[1]),
        (PLAIN, *tree({"input": ("<f4", (5, 5), False)})),
        (TWO, *tree({"x": ("|i1", (5,), False), "y": ("<f4", (2, 6), False)})),
        (TWO, *tree({"x": ("|i1", (5,), False), "y": ("<f4", (3, 5), False)})),
        (TWO, *tree({"x": ("|i1", (5,), False), "y": ("<f4", (2, 5), True)})),
        (TWO, *tree({"x": ("|i1", (5,), False)})),
        (TWO, *tree({"x": ("|i1", (5,), False), "z": ("<f4", (2, 5), False)})),
        (TWO, *tree({"x": ("|i1", (5,), False), "y": ("<f4", (2, 5), False), "z": ("<f4", (2, 5), False)})),
        (TWO, TREE, tree({"x": ("|i1", (5,), False), "y": ("<f4", (2, 5), False)})[1] + b"\xc0"),
        (TWO, TREE, b"\xc1" + (64).to_bytes(8, "little")),
        (TWO, TREE, msgpack.encode({"x": msgpack.Ext(1, msgpack.encode(("|i1", (5,), False))), "y": 7})),
        (TWO, TREE, msgpack.encode({"x": msgpack.Ext(2, msgpack.encode(("|i1", (5,), False))), "y": msgpack.Ext(1, b"")})),
    ],
)
def test_other_descriptions_are_odd(ring, signature, kind, meta):
    write(ring, meta, 0)
    assert not read_as_python_would(ring, signature, fields_of(signature), describe(kind, len(meta), AREA_BYTES), kind)


def test_extensions_that_end_within_or_behind_their_array(ring):
    x, y = (msgpack.encode(array) for array in (("|i1", (5,), False), ("<f4", (2, 5), False)))
    for grown in (-1, 0, 1):
        meta = b"\x82\xa1x\xc7" + bytes([len(x) + grown, 1]) + x + b"\xa1y\xc7" + bytes([len(y), 1]) + y
        write(ring, meta, 0)
        assert read_as_python_would(ring, TWO, fields_of(TWO), describe(TREE, len(meta), AREA_BYTES), TREE) == (grown == 0)


def test_an_order_that_is_not_the_declared_one_is_odd_and_no_mistake(ring):
    """Such requests are read by others: a client that checks its requests sends them in order."""
    kind, meta = tree({"y": ("<f4", (2, 5), False), "x": ("|i1", (5,), False)})
    total = write(ring, meta, 200)
    assert not read_as_python_would(ring, TWO, fields_of(TWO), describe(kind, len(meta), total), kind)
    assert TWO.check(decode(kind, len(meta), total, ring.owner.requests[0], False))[1] == (5,)


def test_what_python_refuses_is_never_read(ring):
    """The other way round, for descriptions at the edge of what there is."""
    fields = fields_of(PLAIN)
    for extents, data_bytes in itertools.product([(1, 1), (7, 100), (2621, 100), (2622, 100)], [0, 4, 2800, AREA_BYTES - 64, AREA_BYTES]):
        kind, meta = one("<f4", extents, False)
        total = write(ring, meta, data_bytes)
        was_read = read_as_python_would(ring, PLAIN, fields, describe(kind, len(meta), total), kind)
        try:
            PLAIN.check(decode(kind, len(meta), total, ring.owner.requests[0], False))
            fits = total <= AREA_BYTES
        except (SegmentError, InvalidRequest):
            fits = False
        assert was_read == fits, (extents, data_bytes)
