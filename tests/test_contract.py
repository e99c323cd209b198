"""What a worker has declared is checked in the frontend: against in-process workers whose info the test writes, as an owner would."""

import json
import os

import numpy as np
import pytest

import gpuworker
from gpuworker._native import lib
from gpuworker.client import contract
from gpuworker.client.contract import Contract
from gpuworker.segment import Segment
from gpuworker.tensors import Signature, TensorSpec
from tests.conftest import eventually
from tests.live_worker import hold

VECTOR = TensorSpec("float32", (4,))
FLOATS = Signature(TensorSpec("float32", ("n",)), VECTOR, {"n": 16})
IDS = Signature({"ids": TensorSpec("int64", ("tokens",))}, VECTOR)


def declare(worker, signature, **more):
    """`signature`: a Signature, raw bytes, or None for a worker that declares nothing."""
    info = (
        {"name": worker.name}
        if signature is None
        else {"contract": {**signature.to_dict(), **more}}
        if isinstance(signature, Signature)
        else signature
    )
    blob = info if isinstance(info, bytes) else json.dumps(info).encode()
    segment = Segment.attach(worker.name)
    assert lib.gw_set_info(segment.port, blob, len(blob)) == 0


def floats(n=3):
    return np.ones(n, "float32")


def ids(*values):
    return {"ids": np.array(values, "int64")}


class FakeTokenizer:
    """A letter is its number, plus what the entry says."""

    def __init__(self, entry):
        self._plus = entry["plus"]

    def __call__(self, text):
        return ids(*(ord(letter) + self._plus for letter in text))


@pytest.fixture(autouse=True)
def fake_tokenizer(monkeypatch):
    monkeypatch.setattr(contract, "Tokenizer", FakeTokenizer)


def ways(client):
    """Everything that sends a request."""
    return {
        "submit": client.submit,
        "submit_with_timeout": lambda request: client.submit(request, timeout=60),
        "enqueue": lambda request: client.enqueue(request).result(),
        "map": lambda request: next(iter([*client.map([request])])),
    }


WAYS = list(ways(gpuworker.connect("nobody")))


# what passes, and what does not


@pytest.mark.parametrize("way", WAYS)
def test_a_request_that_does_not_fit_is_never_sent(in_process, gate, way):
    worker = in_process(gate.run_batch)
    declare(worker, FLOATS)
    send = ways(worker.connect())[way]
    for bad, message in ((floats().astype("float64"), "convert it with"), (floats(17), "at most 16"), ([1.0], "np.asarray"), ("text", "got text")):
        with pytest.raises(gpuworker.InvalidRequest, match=message):
            send(bad)
    stats = worker.stats()
    assert (stats.submitted, stats.slots_in_use, gate.batches) == (0, 0, [])
    np.testing.assert_array_equal(send(floats(16)), floats(16))


def test_map_withdraws_what_it_has_sent_before_a_request_that_does_not_fit(in_process, gate):
    worker = in_process(gate.run_batch)
    declare(worker, FLOATS)
    gate.shut()
    with pytest.raises(gpuworker.InvalidRequest):
        list(worker.connect().map([floats(), floats(), [1.0], floats()]))
    gate.open()
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert worker.stats().submitted == 2


@pytest.mark.parametrize("way", WAYS)
def test_what_arrives_is_what_was_declared(in_process, gate, way):
    worker = in_process(gate.run_batch)
    declare(worker, Signature({"b": TensorSpec("int8", ("n",)), "a": TensorSpec("float32", ())}, VECTOR))
    ways(worker.connect())[way]({"a": np.float32(2), "b": np.ones(3, "int8")})
    ((request,),) = gate.batches
    assert [(name, type(array), array.dtype.name) for name, array in request.items()] == [("b", np.ndarray, "int8"), ("a", np.ndarray, "float32")]


@pytest.mark.parametrize("way", ["submit", "enqueue"])
def test_a_reserved_array_is_checked_and_stays_where_it_is(in_process, way):
    seen = []

    def look(requests):
        seen.extend(request.flags.owndata for request in requests)
        return [float(request.sum()) for request in requests]

    worker = in_process(look)
    declare(worker, FLOATS)
    client = worker.connect()
    send = ways(client)[way]
    with client.reserve(17) as array, pytest.raises(gpuworker.InvalidRequest, match="at most 16"):
        send(array)
    assert (worker.stats().submitted, worker.stats().slots_in_use) == (0, 0)
    with client.reserve(5) as array:
        array[:] = 2
        assert send(array) == 10.0
    assert seen == [False]
    assert worker.stats().slots_in_use == 0


def test_a_worker_that_declares_nothing_is_asked_once(in_process, gate, monkeypatch):
    read = []
    info = Segment.info
    monkeypatch.setattr(Segment, "info", lambda segment: (read.append(1), info(segment))[1])
    client = in_process(gate.run_batch).connect()
    for request in ([1], "text", 7) * 5:
        assert client.submit(request) == request
    assert len(read) == 1


@pytest.mark.parametrize(
    "info",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 8000,
        b"[]",
        b'{"contract": 7}',
        b'{"contract": {}}',
        b'{"contract": [["inputs", 1]]}',
        b'{"contract": {"inputs": [], "outputs": [], "max_extents": {}}}',
        b'{"contract": {"input": {"dtype": "float32", "shape": [1e400]}, "output": {"dtype": "float32", "shape": []}, "max_extents": {}}}',
        json.dumps({"contract": {**FLOATS.to_dict(), "tokenizer": "file"}}).encode(),
        json.dumps({"contract": {**FLOATS.to_dict(), "tokenizer": {}}}).encode(),
        json.dumps({"contract": {**FLOATS.to_dict(), "uses_lengths": "yes"}}).encode(),
        json.dumps({"contract": FLOATS.to_dict()}).encode()[:-1],
    ],
)
def test_nonsense_declares_nothing(in_process, gate, info):
    assert Contract.parse(info) is None
    worker = in_process(gate.run_batch)
    declare(worker, info)
    client = worker.connect()
    for request in ([1], "text"):
        assert client.submit(request) == request


# workers that change


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_refused_by_an_old_declaration(in_process, gate, way):
    worker = in_process(gate.run_batch)
    declare(worker, FLOATS)
    send = ways(worker.connect())[way]
    send(floats())
    declare(worker, IDS)
    np.testing.assert_array_equal(send(ids(1, 2))["ids"], [1, 2])
    with pytest.raises(gpuworker.InvalidRequest, match=r"expected .'ids': int64"):
        send(floats())
    declare(worker, None)
    assert send("anything") == "anything"
    assert send([1]) == [1]


@pytest.mark.parametrize("way", WAYS)
def test_an_owner_that_refuses_makes_its_clients_look_again(in_process, way):
    def strict(requests):
        return ["fine" if isinstance(request, dict) else gpuworker.InvalidRequest("the owner says so") for request in requests]

    worker = in_process(strict)
    declare(worker, None)
    send = ways(worker.connect())[way]
    with pytest.raises(gpuworker.InvalidRequest, match="the owner says so"):
        send("text")
    declare(worker, IDS, tokenizer={"plus": 0})
    assert send("text") == "fine"


@pytest.mark.parametrize("way", WAYS)
def test_text_becomes_what_the_present_worker_takes(in_process, gate, way):
    worker = in_process(gate.run_batch)
    send = ways(worker.connect())[way]
    for plus in (0, 1, 2):
        declare(worker, IDS, tokenizer={"plus": plus})
        np.testing.assert_array_equal(send("ab")["ids"], [97 + plus, 98 + plus])
    declare(worker, IDS)
    with pytest.raises(gpuworker.InvalidRequest, match="got text"):
        send("ab")
    np.testing.assert_array_equal(send(ids(7))["ids"], [7])


@pytest.mark.parametrize("way", WAYS)
def test_a_request_is_made_anew_for_another_worker_of_the_same_name(name, gate, way):
    send = ways(gpuworker.connect(name))[way]
    for capacity, plus in ((8, 0), (16, 1)):
        with gpuworker.Worker(gate.run_batch, name=name, in_process=True, capacity=capacity) as worker:
            declare(worker, IDS, tokenizer={"plus": plus})
            np.testing.assert_array_equal(send("a")["ids"], [97 + plus])
            assert worker.stats().slots_in_use == 0
    with gpuworker.Worker(gate.run_batch, name=name, in_process=True, capacity=8) as worker:
        declare(worker, FLOATS)
        with pytest.raises(gpuworker.InvalidRequest, match="got text"):
            send("a")
        assert (worker.stats().submitted, worker.stats().slots_in_use) == (0, 0)
        np.testing.assert_array_equal(send(floats()), floats())
    with gpuworker.Worker(gate.run_batch, name=name, in_process=True, capacity=16) as worker:
        declare(worker, IDS)  # what FLOATS would have refused
        np.testing.assert_array_equal(send(ids(5))["ids"], [5])


# full rings, lengths, forks


@pytest.mark.parametrize("way", WAYS)
def test_a_fallback_gets_the_callers_own_request(in_process, gate, way):
    worker = in_process(gate.run_batch, capacity=1)
    declare(worker, IDS, tokenizer={"plus": 0})
    first = hold(worker.connect(), gate, "first")
    given = []
    client = worker.connect(fallback=lambda request: given.append(request) or "fell back")
    request = "some text"
    assert ways(client)[way](request) == "fell back"
    assert given[0] is request
    with pytest.raises(gpuworker.InvalidRequest):
        ways(client)[way](floats())
    assert len(given) == 1
    gate.open()
    assert len(first.result()["ids"]) == 5


def test_a_request_that_waits_for_a_slot_goes_as_declared(in_process, gate):
    worker = in_process(gate.run_batch, capacity=1)
    declare(worker, IDS, tokenizer={"plus": 0})
    client = worker.connect(on_full="block")
    first = hold(client, gate, "first")
    with pytest.raises(gpuworker.DeadlineExceeded):
        client.submit("a", timeout=0.05)
    gate.open()
    first.result()
    np.testing.assert_array_equal(client.submit("a", timeout=60)["ids"], [97])


@pytest.mark.parametrize("declared", [{"uses_lengths": True}, {}], ids=["said", "not said"])
@pytest.mark.parametrize("way", WAYS)
def test_the_first_named_dimension_is_the_length(in_process, gate, way, declared):
    """The handler has no length(request), so the owner could not tell it."""
    worker = in_process(gate.run_batch, length_buckets=(4, 8), cost_file="off")
    declare(worker, IDS, tokenizer={"plus": 0}, **declared)
    send = ways(worker.connect())[way]
    assert len(send("abc")["ids"]) == 3
    assert len(send(ids(*range(8)))["ids"]) == 8
    assert (worker.stats().tokens, worker.stats().padded_tokens) == (11, 12)
    with pytest.raises(gpuworker.RequestTooLong, match="of length 9 is longer than the worker takes, 8"):
        send("abcdefghi")
    assert (worker.stats().submitted, worker.stats().slots_in_use) == (2, 0)


def test_a_length_of_the_users_own_goes_first_and_sees_the_request_as_it_was(in_process, gate):
    worker = in_process(gate.run_batch, length_buckets=(4, 8), cost_file="off")
    declare(worker, IDS, tokenizer={"plus": 0}, uses_lengths=True)
    seen = []
    client = worker.connect(length=lambda request: seen.append(request) or 4)
    assert [len(way("too long by far")["ids"]) for way in ways(client).values()] == [15] * 4
    assert seen == ["too long by far"] * 4
    assert worker.stats().tokens == 16


@pytest.mark.parametrize("uses_lengths", [False, None])
def test_a_worker_that_knows_no_lengths_is_told_none(in_process, gate, uses_lengths):
    worker = in_process(gate.run_batch, priorities=True, cost_file="off")
    declare(worker, IDS, uses_lengths=uses_lengths)
    client = worker.connect()
    assert len(client.submit(ids(*range(100)), priority=3)["ids"]) == 100
    link = client._link
    assert [link.fit(ids(1, 2))[1], Contract(IDS.to_dict()).prepare(ids(1, 2))[1]] == [0, 2]


def test_without_named_dimensions_there_is_no_length():
    assert Contract(Signature(VECTOR, VECTOR).to_dict()).prepare(floats(4))[1] == 0


def test_a_forked_child_checks_for_itself(in_process, gate):
    worker = in_process(gate.run_batch)
    declare(worker, IDS, tokenizer={"plus": 0})
    client = worker.connect()
    client.submit("a")
    declare(worker, IDS, tokenizer={"plus": 1})
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = client.submit("ab", timeout=60)["ids"].tolist()
            try:
                client.submit([1], timeout=60)
            except gpuworker.InvalidRequest:
                os.write(write, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as said:
        assert json.loads(said.read()) == [98, 99]
    os.waitpid(child, 0)
    np.testing.assert_array_equal(client.submit("a")["ids"], [98])
