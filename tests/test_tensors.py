"""Declared tensors: what may be declared, what fits, and what is said of what does not."""

import collections
import json
import re

import numpy as np
import pytest

import gpuworker
from gpuworker.tensors import DTYPES, Signature, TensorSpec

PIXELS = TensorSpec("float32", (3, "height", "width"))
VECTOR = TensorSpec("float32", (384,))
IDS = TensorSpec("int64", ("tokens",), mask="attention_mask")
TYPES = TensorSpec("int64", ("tokens",))


# declaring


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_spec_says_what_numpy_makes_of_it(dtype):
    spec = TensorSpec(dtype, ("n", 2))
    assert spec.numpy_dtype == np.zeros(0, dtype).dtype
    assert spec == TensorSpec(np.dtype(dtype), ["n", np.int32(2)]) == TensorSpec(np.dtype(dtype).type, ("n", 2))
    assert (spec.dtype, spec.shape, spec.dims, str(spec)) == (dtype, ("n", 2), ("n",), f"{dtype} (n, 2)")
    assert TensorSpec(dtype, ()).dims == ()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TensorSpec("float", (3,)), ValueError, "dtype='float': give 'float"),
        (lambda: TensorSpec("string", (3,)), ValueError, "give one of bool, int8,"),
        (lambda: TensorSpec(">f4", (3,)), ValueError, "dtype='>f4': give"),
        (lambda: TensorSpec(np.dtype(">f4"), (3,)), ValueError, re.escape("dtype=dtype('>f4'): give")),
        (lambda: TensorSpec("bfloat16", (3,)), ValueError, "declare 'float32', and set the handler's own dtype to 'bfloat16'"),
        (lambda: TensorSpec(float, (3,)), TypeError, "dtype=<class 'float'>: give its name, "),
        (lambda: TensorSpec("float32", 3), TypeError, re.escape("shape=3: give a tuple of extents and names, such as (3,)")),
        (lambda: TensorSpec("float32", (3, -1)), ValueError, "extents are at least 1; write a name"),
        (lambda: TensorSpec("float32", (0,)), ValueError, "extents are at least 1"),
        (lambda: TensorSpec("float32", (True,)), TypeError, "True is neither an integer nor the name"),
        (lambda: TensorSpec("float32", (None,)), TypeError, "None is neither an integer nor the name"),
        (lambda: TensorSpec("float32", ("",)), ValueError, "give a name, a string that is not empty, in place of ''"),
        (lambda: TensorSpec("int8", ("n",), pad_value=300), ValueError, "pad_value=300 is no int8"),
        (lambda: TensorSpec("int8", ("n",), pad_value=0.5), ValueError, "pad_value=0.5 is no int8"),
        (lambda: TensorSpec("bool", ("n",), pad_value=2), ValueError, "pad_value=2 is no bool"),
        (lambda: TensorSpec("float16", ("n",), pad_value=1e6), ValueError, "is no float16"),
        (lambda: TensorSpec("float16", ("n",), pad_value=10**400), ValueError, "is no float16"),
        (lambda: TensorSpec("float32", ("n",), pad_value="0"), TypeError, "give a number that float32 has"),
        (lambda: TensorSpec("int64", (3,), mask="m"), ValueError, re.escape("mask='m': a spec of shape (3,) has no named dimension")),
        (lambda: TensorSpec("int64", (), lengths="n"), ValueError, "lengths='n': a spec of shape .. has no named dimension"),
        (lambda: TensorSpec("int64", ("n",), mask=7), TypeError, "mask: give a name"),
        (lambda: Signature([IDS], VECTOR), TypeError, "inputs=.*: give one TensorSpec, or a dict"),
        (lambda: Signature({}, VECTOR), TypeError, "inputs={}: give one TensorSpec, or a dict"),
        (lambda: Signature({"": IDS}, VECTOR), ValueError, "a name in inputs: give a name"),
        (lambda: Signature({"x": "int64"}, VECTOR), TypeError, r"inputs\['x'\]='int64': give a TensorSpec"),
        (lambda: Signature(TYPES, None), TypeError, "outputs=None: give one TensorSpec"),
        (lambda: Signature(TYPES, TensorSpec("float32", ("token",))), ValueError, "output 'output' has the dimension 'token', and no input has"),
        (
            lambda: Signature(TYPES, {"y": TensorSpec("int64", ("tokens",), mask="m")}),
            ValueError,
            "output 'y': pad_value, mask, lengths and below are for inputs",
        ),
        (lambda: Signature(TYPES, TensorSpec("float32", (3,), pad_value=1)), ValueError, "are for inputs"),
        (lambda: Signature(IDS, VECTOR), ValueError, "mask='attention_mask': with one bare TensorSpec forward gets that tensor and nothing else"),
        (lambda: Signature({"x": IDS, "attention_mask": TYPES}, VECTOR), ValueError, "forward gets another tensor of this name already"),
        (lambda: Signature({"x": IDS, "y": IDS}, VECTOR), ValueError, "mask='attention_mask' of input 'y': forward gets another"),
        (lambda: Signature({"x": TensorSpec("int8", ("n",), mask="m", lengths="m")}, VECTOR), ValueError, "lengths='m' of input 'x'"),
        (
            lambda: Signature(TYPES, VECTOR, {"token": 5}),
            ValueError,
            r"max_extents\['token'\]: no input has a dimension of this name \(they are 'tokens'\)",
        ),
        (lambda: Signature(VECTOR, VECTOR, {"n": 5}), ValueError, "there are none"),
        (lambda: Signature(TYPES, VECTOR, {"tokens": 0}), ValueError, r"max_extents\['tokens'\]=0: give an integer from 1 to"),
        (lambda: Signature(TYPES, VECTOR, {"tokens": 2.5}), ValueError, "give an integer"),
        (lambda: Signature(TYPES, VECTOR, 512), TypeError, "max_extents=512: give a dict"),
    ],
)
def test_a_mistake_in_a_declaration_says_what_to_write(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_torch_dtype_is_answered_with_its_name():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=re.escape("dtype=torch.float32: give its name, 'float32'")):
        TensorSpec(torch.float32, (3,))


def test_a_signature_is_the_same_for_one_array_and_for_many():
    one = Signature(PIXELS, VECTOR, {"width": np.int64(64)})
    assert (one.inputs, one.outputs, one.single_input, one.single_output) == ({"input": PIXELS}, {"output": VECTOR}, True, True)
    assert (one.dims, one.max_extents) == (("height", "width"), {"width": 64})
    many = Signature({"b": TensorSpec("int8", (2, "n")), "a": TensorSpec("int8", ("m", "n"))}, {"y": VECTOR})
    assert (list(many.inputs), many.dims, many.max_extents, many.single_input, many.single_output) == (["b", "a"], ("n", "m"), {}, False, False)
    assert repr(many) == "Signature(b: int8 (2, n), a: int8 (m, n) -> y: float32 (384,))"


SIGNATURES = [
    Signature(PIXELS, VECTOR, {"height": 512}),
    Signature({"z": IDS, "a": TensorSpec("float32", (), pad_value=1.5), "input": TYPES}, {"y": VECTOR, "x": VECTOR}),
    Signature({"n": TensorSpec("float16", ("n",), pad_value=float("-inf"), lengths="many")}, TensorSpec("bool", ())),
]


@pytest.mark.parametrize("signature", SIGNATURES, ids=repr)
def test_a_signature_survives_json(signature):
    text = json.dumps(signature.to_dict(), sort_keys=True)
    assert len(text) < 500
    back = Signature.from_dict(json.loads(text))
    assert back == signature
    assert list(back.inputs) == list(signature.inputs)
    assert back.inputs == signature.inputs
    assert back != SIGNATURES[SIGNATURES.index(signature) - 1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: [],
        lambda d: {},
        lambda d: {**d, "inputs": {}},
        lambda d: {**d, "inputs": []},
        lambda d: {**d, "inputs": [["x"]]},
        lambda d: {**d, "inputs": [7]},
        lambda d: {**d, "inputs": [["x", {"dtype": "int8"}]]},
        lambda d: {**d, "inputs": [["x", {"dtype": ["int8"], "shape": []}]]},
        lambda d: {**d, "inputs": [["x", {"dtype": "int8", "shape": [[1]]}]]},
        lambda d: {**d, "inputs": [["x", {"dtype": "int8", "shape": 3}]]},
        lambda d: {**d, "inputs": [["x", {"dtype": "int8", "shape": [1.5]}]]},
        lambda d: {**d, "inputs": [["x", {"dtype": "float32", "shape": [1], "pad_value": 10**400}]]},
        lambda d: {**d, "output": "float32"},
        lambda d: {**d, "max_extents": [3]},
        lambda d: {**d, "max_extents": {"tokens": "many"}},
    ],
)
def test_nonsense_is_no_signature(damage):
    good = Signature({"x": IDS}, VECTOR, {"tokens": 5}).to_dict()
    assert Signature.from_dict(good).max_extents == {"tokens": 5}
    with pytest.raises((TypeError, ValueError)):
        Signature.from_dict(damage(good))


# checking

ONE = Signature(PIXELS, VECTOR, {"height": 8})
MANY = Signature(
    {"input_ids": TensorSpec("int64", ("tokens",)), "bias": TensorSpec("float32", ("tokens", 2)), "scale": TensorSpec("float32", ())}, VECTOR
)


def pixels(height=4, width=5, dtype="float32"):
    return np.zeros((3, height, width), dtype)


def fields(**changes):
    return {"input_ids": np.arange(7), "bias": np.zeros((7, 2), "float32"), "scale": np.zeros((), "float32"), **changes}


def test_an_array_that_fits_goes_as_it_is():
    for array in (
        pixels(),
        pixels(8, 1),
        pixels(),
        np.asfortranarray(pixels()),
        pixels(8, 9)[:, ::2, ::-1],
        np.empty((4, 5, 3), "float32").transpose(2, 0, 1),
    ):
        checked, extents = ONE.check(array)
        assert checked is array
        assert extents == array.shape[1:]


def test_a_dict_that_fits_goes_in_the_order_of_the_declaration():
    for request in (fields(), dict(reversed(fields().items())), collections.UserDict(fields()), collections.OrderedDict(fields())):
        for _ in range(2):
            checked, extents = MANY.check(request)
            assert type(checked) is dict
            assert [(name, checked[name] is request[name]) for name in checked] == [("input_ids", True), ("bias", True), ("scale", True)]
            assert extents == (7,)


def test_shapes_are_forgotten_before_they_are_too_many():
    signature = Signature(TensorSpec("int8", ("n",)), VECTOR)
    for n in [*range(1, 3000), 1]:
        assert signature.check(np.zeros(n, "int8"))[1] == (n,)
    assert len(signature._checker._known) <= 1024


def test_what_becomes_an_array_of_the_right_kind_is_taken(tmp_path):
    np.save(tmp_path / "x.npy", pixels())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert type(ONE.check(mapped)[0]) is np.ndarray
    scalar, _ = Signature({"scale": TensorSpec("float32", ())}, VECTOR).check({"scale": np.float32(2.5)})
    assert type(scalar["scale"]) is np.ndarray
    assert scalar["scale"] == 2.5
    same = np.arange(3, dtype="longlong")
    ids, extents = Signature(TensorSpec("int64", ("n",)), VECTOR).check(same)
    assert (ids.dtype is np.dtype("int64"), extents) == (True, (3,))
    assert np.shares_memory(ids, same)


def test_tensors_are_taken():
    torch = pytest.importorskip("torch")
    for _ in range(2):
        array, extents = ONE.check(torch.full((3, 4, 5), 2.0))
        assert type(array) is np.ndarray
        assert (array.dtype, array.sum(), extents) == (np.float32, 120.0, (4, 5))
    with pytest.raises(gpuworker.InvalidRequest, match=r"expected an array of float32 \(3, height, width\), got Tensor; .*cast it with tensor.float"):
        ONE.check(torch.zeros(3, 4, 5, dtype=torch.bfloat16))
    with pytest.raises(gpuworker.InvalidRequest, match=r"got one of float64 \(3, 4, 5\); convert it with request.astype\('float32'\)"):
        ONE.check(torch.zeros(3, 4, 5, dtype=torch.float64))


A = "expected an array of float32 (3, height, width), "


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pixels(dtype="float64"), A + "got one of float64 (3, 4, 5); convert it with request.astype('float32')"),
        (pixels(dtype=">f4"), A + "got one of float32 in foreign byte order (>f4) (3, 4, 5); convert it with request.astype('float32')"),
        (pixels()[None], A + "got one of float32 (1, 3, 4, 5); send without a batch dimension: request[0]"),
        (np.zeros((2, 3, 4, 5), "float32"), A + "got one of float32 (2, 3, 4, 5); send one request for each row, without a batch dimension"),
        (pixels()[0], A + "got one of float32 (4, 5); send 3 dimensions"),
        (pixels()[1:], A + "got the shape (2, 4, 5); request.shape[0] must be 3"),
        (pixels(0), A + "got the shape (3, 0, 5); 'height' must be at least 1, so do not send empty requests"),
        (pixels(9), A + "got the shape (3, 9, 5); 'height' is at most 8 (max_extents), so send less of it"),
        (pixels().tolist(), A + "got a list of 3; send np.asarray(request, 'float32')"),
        ((), A + "got a tuple of 0; send np.asarray(request, 'float32')"),
        (7, A + "got int (7); send np.asarray(request, 'float32')"),
        (None, A + "got NoneType (None); send np.asarray(request, 'float32')"),
        ("some text", A + "got text ('some text'); this worker takes arrays here, so convert it first"),
        (b"bytes", A + "got bytes (b'bytes'); this worker takes arrays here, so convert it first"),
        ({"input": pixels()}, A + "got a dict of 'input'; send the bare array"),
        (np.ma.zeros(3), A + "got MaskedArray; send np.asarray(request, 'float32')"),
    ],
    ids=lambda value: value[-40:] if isinstance(value, str) else "",
)
def test_what_is_said_of_an_array_that_does_not_fit(request_, message):
    with pytest.raises(gpuworker.InvalidRequest) as caught:
        ONE.check(request_)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)
    assert ONE.check(pixels())[1] == (4, 5)


EXACTLY = "Expected exactly {'input_ids': int64 (tokens,), 'bias': float32 (tokens, 2), 'scale': float32 ()}"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (np.arange(3), EXACTLY.replace("Expected exactly", "expected") + ", got an array of int64 (3,); send a dict with these names"),
        ("text", EXACTLY.replace("Expected exactly", "expected") + ", got text ('text'); send a dict with these names"),
        ({}, "missing: 'input_ids', 'bias', 'scale'. " + EXACTLY),
        ({**fields(), 7: 1, "scales": 2}, "unknown: 7, 'scales' (did you mean 'scale'?). " + EXACTLY),
        (
            {"input_id": 1, **{k: v for k, v in fields().items() if k != "input_ids"}},
            "missing: 'input_ids'; unknown: 'input_id' (did you mean 'input_ids'?). " + EXACTLY,
        ),
        (
            fields(input_ids=[1, 2]),
            "input 'input_ids': expected an array of int64 (tokens,), got a list of 2; send np.asarray(request['input_ids'], 'int64')",
        ),
        (
            fields(bias=np.zeros((6, 2), "float32")),
            "input 'bias': expected an array of float32 (tokens, 2), got the shape (6, 2); "
            "'tokens' is 7 in input 'input_ids' already, and must be the same everywhere",
        ),
        (
            fields(bias=np.zeros((7, 3), "float32")),
            "input 'bias': expected an array of float32 (tokens, 2), got the shape (7, 3); request['bias'].shape[1] must be 2",
        ),
        (fields(scale=0.5), "input 'scale': expected an array of float32 (), got float (0.5); send np.asarray(request['scale'], 'float32')"),
    ],
    ids=lambda value: value[-40:] if isinstance(value, str) else "",
)
def test_what_is_said_of_a_dict_that_does_not_fit(request_, message):
    with pytest.raises(gpuworker.InvalidRequest) as caught:
        MANY.check(request_)
    assert str(caught.value) == message


def test_a_dimension_that_an_array_has_twice_has_one_extent():
    square = Signature(TensorSpec("float32", ("n", "n")), VECTOR)
    assert square.check(np.zeros((3, 3), "float32"))[1] == (3,)
    with pytest.raises(gpuworker.InvalidRequest, match="'n' is 3 already, and must be the same everywhere"):
        square.check(np.zeros((3, 4), "float32"))


def test_a_refusal_travels():
    from gpuworker.payload import decode_error, encode_error

    error = decode_error(encode_error(gpuworker.InvalidRequest("so and so")))
    assert type(error) is gpuworker.InvalidRequest
    assert str(error) == "so and so"
