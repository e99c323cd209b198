"""The Open Inference Protocol, in front of in-process workers."""

import asyncio
import json
import struct
import threading

import numpy as np
import pytest

from gpuworker.frontends.asgi import make_app
from gpuworker.frontends.http import tensors
from tests.conftest import Gate
from tests.tensor_handlers import Doubled, Summed
from tests.web import call, get, post

INFER = "/v2/models/m/infer"


@pytest.fixture
def web(in_process):
    def start(handler, *, options=None, **app_options):
        return make_app({"m": in_process(handler, **(options or {})).name}, **app_options)

    return start


@pytest.fixture
def echo(web):
    return web(lambda requests: requests)


def tensor(name, datatype, shape, data, **more):
    return {"name": name, "datatype": datatype, "shape": shape, "data": data, **more}


def one(*arguments):
    return {"inputs": [tensor("input", *arguments)]}


def binary(app, parts, request=None, header=None, **headers):
    """parts: (name, datatype, shape, bytes). -> the response."""
    inputs = [{"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(data)}} for name, kind, shape, data in parts]
    head = json.dumps({"inputs": inputs, **(request or {})}).encode()
    body = head + b"".join(data for *_, data in parts)
    return call(app, "POST", INFER, body, Inference_Header_Content_Length=str(len(head) if header is None else header), **headers)


def split(response):
    """-> (the JSON, what is behind it)."""
    at = int(response.headers["inference-header-content-length"])
    return json.loads(response.content[:at]), response.content[at:]


def test_rows_are_requests_and_run_together(web):
    gate = Gate(lambda row: row * 2)
    status, body = post(web(gate), INFER, {"id": "seven", **one("FP32", [3, 2], [1, 2, 3, 4, 5, 6.5])})
    assert status == 200
    assert body == {"model_name": "m", "id": "seven", "outputs": [tensor("output", "FP32", [3, 2], [2, 4, 6, 8, 10, 13])]}
    rows = [row for batch in gate.batches for row in batch]
    assert [(row.shape, row.dtype) for row in rows] == [((2,), np.float32)] * 3


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("BOOL", [True, False]),
        ("INT8", [-128, 127]),
        ("INT16", [-(2**15), 2**15 - 1]),
        ("INT32", [-(2**31), 2**31 - 1]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("UINT8", [0, 255]),
        ("UINT16", [0, 2**16 - 1]),
        ("UINT32", [0, 2**32 - 1]),
        ("UINT64", [0, 2**64 - 1]),
        ("FP16", [0.5, -65504.0]),
        ("FP32", [0.5, 3]),
        ("FP64", [1e300, -0.1]),
        ("BYTES", ["a", "é\U0001f600"]),
    ],
)
def test_every_datatype_comes_back_as_it_went(echo, datatype, data):
    assert post(echo, INFER, one(datatype, [2], data)) == (200, {"model_name": "m", "outputs": [tensor("output", datatype, [2], data)]})
    if datatype == "BYTES":
        raw = b"".join(struct.pack("<I", len(item.encode())) + item.encode() for item in data)
    else:
        raw = np.array(data, tensors.DATATYPES[datatype]).tobytes()
    response = binary(echo, [("input", datatype, [2], raw)], {"parameters": {"binary_data_output": True}})
    head, rest = split(response)
    assert head["outputs"] == [{"name": "output", "datatype": datatype, "shape": [2], "parameters": {"binary_data_size": len(raw)}}]
    assert rest == raw
    assert response.headers["content-type"] == "application/octet-stream"
    assert int(response.headers["content-length"]) == len(response.content)


def test_bfloat16_becomes_float32(echo):
    values = np.array([1.5, -2.0, 3.140625], np.float32)
    raw = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    assert binary(echo, [("input", "BF16", [1, 3], raw)]).json()["outputs"] == [tensor("output", "FP32", [1, 3], values.tolist())]


def test_nested_data_is_flat_data(echo):
    assert post(echo, INFER, one("INT64", [2, 1, 2], [[[1, 2]], [[3, 4]]])) == post(echo, INFER, one("INT64", [2, 1, 2], [1, 2, 3, 4]))
    assert post(echo, INFER, one("INT64", [1, 0], []))[1]["outputs"] == [tensor("output", "INT64", [1, 0], [])]


def test_json_and_binary_data_in_one_request(web):
    app = web(Summed())
    parts = [("x", "FP32", [2, 3], np.arange(6, dtype="<f4").tobytes())]
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": 24}},
        tensor("scale", "FP32", [2], [1, 10]),
    ]
    wanted = [{"name": "sum", "parameters": {"binary_data": False}}, {"name": "y", "parameters": {"binary_data": True}}]
    head, rest = split(binary(app, parts, {"inputs": inputs, "outputs": wanted, "parameters": {"binary_data_output": True}}))
    assert head["outputs"][0] == tensor("sum", "FP64", [2], [3.0, 120.0])
    assert head["outputs"][1]["name"] == "y"
    assert np.frombuffer(rest, "<f4").tolist() == [0, 1, 2, 30, 40, 50]


def test_what_a_worker_declares_is_told_and_checked(web):
    app = web(Summed())
    status, about = get(app, "/v2/models/m")
    assert status == 200
    assert about["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}, {"name": "scale", "datatype": "FP32", "shape": [-1]}]
    assert about["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, -1]}, {"name": "sum", "datatype": "FP64", "shape": [-1]}]
    for inputs, words in (
        ([tensor("x", "FP32", [1, 2], [1, 2])], "scale"),
        ([tensor("x", "FP64", [1, 2], [1, 2]), tensor("scale", "FP32", [1], [1])], "float32"),
        ([tensor("x", "FP32", [1, 301], [1] * 301), tensor("scale", "FP32", [1], [1])], "300"),
        ([tensor("x", "FP32", [1, 2], [1, 2]), tensor("scale", "FP32", [2], [1, 1])], "first extent"),
    ):
        status, body = post(app, INFER, {"inputs": inputs})
        assert status == 400
        assert words in body["error"]


def test_a_bare_tensor_is_called_input(web):
    app = web(Doubled())
    assert post(app, INFER, one("FP32", [1, 4], [1, 2, 3, 4]))[1]["outputs"] == [tensor("output", "FP32", [1, 4], [2, 4, 6, 8])]
    status, body = post(app, INFER, {"inputs": [tensor("x", "FP32", [1, 4], [1, 2, 3, 4])]})
    assert (status, body["error"]) == (400, "this model has one input, 'input', and not 'x'")


def test_other_names_make_requests_that_are_dicts(web):
    app = web(lambda requests: [{"both": request["a"] + request["b"], "name": request["name"]} for request in requests])
    inputs = [tensor("a", "INT32", [2, 1], [1, 2]), tensor("b", "INT32", [2, 1], [10, 20]), tensor("name", "BYTES", [2], ["x", "y"])]
    assert post(app, INFER, {"inputs": inputs})[1]["outputs"] == [tensor("both", "INT32", [2, 1], [11, 22]), tensor("name", "BYTES", [2], ["x", "y"])]


def test_bytes_are_text_where_that_is_said(web):
    app = web(lambda requests: [type(request).__name__ for request in requests])
    raw = struct.pack("<I", 1) + b"a"
    assert binary(app, [("input", "BYTES", [1], raw)]).json()["outputs"][0]["data"] == ["bytes"]
    said = {"inputs": [{"name": "input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5, "content_type": "str"}}]}
    assert binary(app, [("input", "BYTES", [1], raw)], said).json()["outputs"][0]["data"] == ["str"]
    assert post(app, INFER, one("BYTES", [1], ["a"]))[1]["outputs"][0]["data"] == ["str"]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"inputs": []}, "no inputs"),
        ({}, "inputs"),
        ([], "inference request"),
        ({"inputs": [{"name": "input"}]}, "shape"),
        (one("FP32", [2], [1]), "2 elements, and there are 1"),
        (one("FP32", [0], []), "a batch of 0"),
        (one("FP32", [], [1]), "extents"),
        (one("FP32", [-1], []), "extents"),
        (one("FP32", [1] * 40, [1]), "extents"),
        (one("FP32", [2**62, 2**62], [1]), "elements"),
        (one("FP32", [1.5], [1]), "int"),
        (one("FP32", ["1"], [1]), "int"),
        (one("FP32", [10**30], [1]), "elements"),
        (one("FP8", [1], [1]), "there is no datatype"),
        (one("FP32", [1], ["1"]), "no FP32"),
        (one("FP32", [1], [True]), "no FP32"),
        (one("FP32", [1], [None]), "no FP32"),
        (one("FP32", [1], [1e39]), "too large"),
        (one("FP16", [1], [65520]), "too large"),
        (one("INT8", [1], [128]), "no INT8"),
        (one("INT8", [1], [1.5]), "no INT8"),
        (one("UINT64", [1], [-1]), "no UINT64"),
        (one("UINT64", [1], [2**64]), "no UINT64"),
        (one("UINT8", [1], [-1]), "no UINT8"),
        (one("BOOL", [1], [1]), "no BOOL"),
        (one("BYTES", [1], [1]), "no BYTES"),
        (one("FP32", [1], 1), "data is a list"),
        (one("FP32", [1], {"0": 1}), "data is a list"),
        (one("FP32", [2, 2], [[1, 2], [3]]), "nested"),
        (one("FP32", [2, 2], [[1, 2], 3]), "nested"),
        ({"inputs": [tensor("input", "FP32", [1], [1]), tensor("input", "FP32", [1], [1])]}, "twice"),
        ({"inputs": [tensor("a", "FP32", [1], [1]), tensor("b", "FP32", [2], [1, 2])]}, "first extent"),
        ({**one("FP32", [1], [1]), "outputs": [{"name": "nix"}]}, "no output 'nix'"),
        ({"inputs": [tensor("input", "FP32", [1], [1], parameters={"shared_memory_region": "x"})]}, "not supported"),
        ({"inputs": [tensor("input", "FP32", [1], [1], parameters={"binary_data_size": 4})]}, "binary_data_size"),
        ({**one("FP32", [1], [1]), "outputs": [{"name": "output", "parameters": {"classification": 3}}]}, "not supported"),
        ({**one("FP32", [1], [1]), "parameters": {"sequence_id": 3}}, "not supported"),
        ({**one("FP32", [1], [1]), "parameters": {"priority": 3}}, "not supported"),
        ({**one("FP32", [1], [1]), "parameters": {"timeout": "soon"}}, "microseconds"),
        (one("FP32", [5000], [0] * 5000), "a batch of 5,000"),
        (one("FP32", [1, 2**64, 0], []), "more than"),
        (one("FP32", [1, *[2**39] * 3, 0], []), "more than"),
        (one("INT8", [2**63] * 32, [1]), "more than"),
        (one("BYTES", [1, 300_000], [""] * 300_000), "more than 262,144 elements"),
        ({"inputs": [tensor(f"x{i}", "FP32", [1], [1]) for i in range(1025)]}, "at most 1,024"),
    ],
)
def test_nonsense_is_a_bad_request(echo, request_, words):
    status, body = post(echo, INFER, request_)
    assert status == 400
    assert words in body["error"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"inputs": NaN}', b'{"inputs":[{"name":"input","datatype":"FP32","shape":[1],"data":[NaN]}]}', b"[" * 100_000]
)
def test_a_body_that_is_no_json_is_a_bad_request(echo, body):
    response = call(echo, "POST", INFER, body)
    assert response.status_code == 400
    assert response.json()["error"].startswith("the body is no inference request")


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("FP32", [1, 2], b"\0" * 7),
        ("FP32", [1, 2], b"\0" * 9),
        ("FP32", [2**40], b"\0" * 8),
        ("BOOL", [1], b"\2"),
        ("BYTES", [1], b"\x05\0\0\0abcd"),
        ("BYTES", [1], b"\xff\xff\xff\xff"),
        ("BYTES", [1], b"\x01\0"),
        ("BYTES", [2], b"\x01\0\0\0a"),
        ("BYTES", [1], b"\0\0\0\0" * 2),
    ],
)
def test_binary_data_that_does_not_fit_its_shape(echo, datatype, shape, data):
    response = binary(echo, [("input", datatype, shape, data)])
    assert response.status_code == 400
    assert "'input'" in response.json()["error"]


@pytest.mark.parametrize(
    ("size", "header", "words"),
    [
        (9, None, "binary_data_size"),
        (10**30, None, "binary_data_size"),
        (-1, None, "binary_data_size"),
        ("8", None, "binary_data_size"),
        (True, None, "binary_data_size"),
        (4, None, "belong to no input"),
        (8, 10**6, "no length"),
        (8, "-1", "no length"),
        (8, "9" * 30, "no length"),
        (8, "x", "no length"),
        (8, 3, "no inference request"),
    ],
)
def test_headers_that_lie(echo, size, header, words):
    inputs = [{"name": "input", "datatype": "FP32", "shape": [1, 2 if size == 8 else 1], "parameters": {"binary_data_size": size}}]
    response = binary(echo, [("input", "FP32", [1, 2], b"\0" * 8)], {"inputs": inputs}, header)
    assert response.status_code == 400
    assert words in response.json()["error"]


def test_answers_that_are_no_tensors(web, caplog):
    for answer in (None, [1, "a"], 1 + 2j, {"a": None}, object, "\ud800", {"\ud800": 1}):
        app = web(lambda requests, answer=answer: [answer for _ in requests])
        status, body = post(app, INFER, one("INT64", [1], [1]))
        assert status == 500
        assert body == {"error": "the request failed; the server's log says why"}
    assert "Traceback" in caplog.text


def test_answers_of_other_shapes_are_no_tensor_together(web):
    app = web(lambda requests: [np.zeros(int(request)) for request in requests])
    assert post(app, INFER, one("INT64", [2], [2, 2]))[0] == 200
    status, body = post(app, INFER, one("INT64", [2], [1, 2]))
    assert status == 400
    assert "one by one" in body["error"]


def test_numbers_lists_and_nan_are_answers(web):
    app = web(lambda requests: [[1.5, float("nan")] for _ in requests])
    assert post(app, INFER, one("INT64", [2], [1, 2]))[1]["outputs"] == [tensor("output", "FP64", [2, 2], [1.5, None, 1.5, None])]
    assert post(web(lambda requests: [int(request) for request in requests]), INFER, one("INT64", [1], [1]))[1]["outputs"] == [
        tensor("output", "INT64", [1], [1])
    ]


def test_errors_of_the_handler(web):
    status, body = post(
        web(lambda requests: [ValueError("odd") if request % 2 else request for request in requests]), INFER, one("INT64", [2], [2, 3])
    )
    assert (status, body) == (400, {"error": "odd"})
    odd = web(lambda requests: [ValueError("half a pair: \ud83d") for _ in requests])
    assert post(odd, INFER, one("INT64", [1], [2])) == (400, {"error": "half a pair: ?"})
    status, body = post(odd, "/v1/embeddings", {"model": "m", "input": "a"})
    assert (status, body["error"]["message"]) == (400, "half a pair: ?")
    status, body = post(web(lambda requests: [KeyError("secret") for _ in requests]), INFER, one("INT64", [1], [2]))
    assert (status, "secret" in str(body)) == (500, False)


def test_more_rows_than_slots(web):
    app = web(lambda requests: requests, options={"capacity": 2})
    assert post(app, INFER, one("INT64", [500], list(range(500))))[1]["outputs"][0]["data"] == list(range(500))


def test_time_limits_are_504(web):
    gate = Gate(is_open=False)
    app = web(gate)
    for request in ({"parameters": {"timeout": 20_000}}, {}):
        headers = {} if request else {"X_Timeout_Ms": "20"}
        status, body = post(app, INFER, {**one("INT64", [1], [1]), **request}, **headers)
        assert (status, body) == (504, {"error": "no answer within the time limit"})
    assert post(app, INFER, one("INT64", [1], [1]), X_Timeout_Ms="soon")[0] == 400
    gate.open()


def test_the_time_limit_is_for_all_rows_together(web):
    turns = threading.Semaphore(0)

    def run_batch(requests):
        turns.acquire(timeout=0.1)  # each is in time by itself
        return requests

    app = web(run_batch, options={"max_batch_size": 1, "capacity": 2})
    status, _ = post(app, INFER, one("INT64", [100], list(range(100))), X_Timeout_Ms="600")
    assert status == 504
    turns.release(1000)


def test_a_full_ring_is_503_with_the_time_to_wait(in_process):
    gate = Gate(is_open=False)
    worker = in_process(gate, capacity=1)
    with worker.connect() as client:
        held = client.enqueue(0)
        gate.wait_entered()
        response = call(make_app({"m": worker.name}), "POST", INFER, json.dumps(one("INT64", [1], [1])).encode())
        assert (response.status_code, response.json()) == (503, {"error": "all places are taken"})
        assert int(response.headers["retry-after"]) >= 1
        gate.open()
        held.result()


def test_the_server_and_its_models(in_process, name):
    worker = in_process(lambda requests: requests)
    app = make_app({"m": worker.name, "a/b": worker.name}, title="ours")
    assert get(app, "/v2")[1] == {"name": "ours", "version": "0.1.0", "extensions": ["binary_tensor_data"]}
    assert get(app, "/v2/")[0] == 200
    assert get(app, "/v2/health/live") == (200, {"live": True})
    assert get(app, "/v2/health/ready") == (200, {"ready": True, "models": {"m": "ok", "a/b": "ok"}})
    assert get(app, "/v2/models/a%2Fb/ready") == (200, {"name": "a/b", "ready": True, "status": "ok"})
    assert get(app, "/healthz")[0] == 200
    assert call(app, "HEAD", "/v2/health/ready").content == b""
    assert get(app, "/v2/models/nix")[0] == get(app, "/v2/models/nix/ready")[0] == 404
    status, body = get(app, "/v2/models/m/versions/1/ready")
    assert (status, "no versions" in body["error"]) == (404, True)
    absent = make_app({"m": worker.name, "n": name})
    assert get(absent, "/v2/health/ready") == (503, {"ready": False, "models": {"m": "ok", "n": "absent"}})
    assert get(absent, "/v2/models/n/ready")[0] == get(absent, "/healthz")[0] == 503
    response = call(absent, "POST", "/v2/models/n/infer", json.dumps(one("INT64", [1], [1])).encode())
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_a_worker_that_is_replaced_is_asked_anew(name):
    import gpuworker

    app = make_app({"m": name})

    async def run():
        import httpx2

        statuses = []
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://web") as web:
            for handler in (lambda requests: requests, Doubled(), lambda requests: requests):
                with gpuworker.Worker(handler, name=name, in_process=True):
                    response = await web.post(INFER, json=one("FP32", [1, 3], [1, 2, 3]))
                    statuses.append(response.status_code)
        return statuses

    assert asyncio.run(run()) == [200, 400, 200]
