"""Canaries: batches of all sizes and lengths go through the same memory, and nothing of one is ever seen in another, be it as padding or as an answer."""

import itertools
import random
import threading
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpuworker
from gpuworker import TensorHandler, TensorSpec
from gpuworker._native import ffi
from gpuworker.execution.engine import Engine
from gpuworker.execution.grid import Grid, steps_up_to
from gpuworker.execution.program import make_program
from gpuworker.tensors import Signature
from tests.conftest import eventually

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MOST, LONGEST = 8, 130
X_PAD, Y_PAD = -1, -7.0


def canary(serial, length, order="C"):
    """A request that is its number everywhere; no two have the same."""
    return {"x": np.full(length, serial, "i8"), "y": np.full((2, length, 3), serial, "f4", order), "z": np.array(serial, "i4")}


class Watched(TensorHandler):
    """The identity, which looks at what it gets: real rows first, each of one number throughout, and all else padding."""

    inputs = {
        "x": TensorSpec("int64", ("n",), pad_value=X_PAD, mask="mask", lengths="lengths"),
        "y": TensorSpec("float32", (2, "n", 3), pad_value=Y_PAD),
        "z": TensorSpec("int32", ()),
    }
    outputs = {
        "x": TensorSpec("int64", ("n",)),
        "y": TensorSpec("float32", (2, "n", 3)),
        "z": TensorSpec("int32", ()),
        "lengths": TensorSpec("int64", ()),
    }
    max_extents = {"n": LONGEST}

    def __init__(self):
        self.batches, self.wrong = [], []
        self.gate, self.entered = threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def warmup(self):
        return None

    def wait_entered(self):
        assert self.entered.acquire(timeout=60), "no batch came"

    def forward(self, batch):
        try:
            self.look({name: tensor.numpy().copy() for name, tensor in batch.items()})
        except AssertionError as error:
            self.wrong.append(error)
        self.entered.release()
        assert self.gate.wait(60), "the test never opened the gate"
        return {name: batch[name] for name in self.outputs}  # the very memory of the inputs

    def look(self, found):
        serials, (rows, extent) = found["z"].tolist(), found["x"].shape
        n = sum(serial != 0 for serial in serials)
        lengths = found["lengths"].tolist()
        self.batches.append(serials[:n])
        assert len(set(serials[:n])) == n
        assert all(serials[:n]), "real rows come first"
        assert lengths[n:] == [1] * (rows - n)
        assert np.array_equal(found["mask"], np.arange(extent) < np.array(lengths)[:, None])
        for i in range(rows):
            own = lengths[i] if i < n else 0
            assert (found["x"][i, :own] == serials[i]).all()
            assert (found["x"][i, own:] == X_PAD).all(), "something else than padding"
            assert (found["y"][i, :, :own] == serials[i]).all()
            assert (found["y"][i, :, own:] == Y_PAD).all(), "something else than padding"


def check(answer, request):
    """The request's own, and in its own size."""
    for name, sent in request.items():
        assert answer[name].dtype == sent.dtype
        assert np.array_equal(answer[name], sent), (name, request["z"])
    assert answer["lengths"] == len(request["x"])


class Pipeline:
    """An engine whose lanes are used in turn, as the runner does it."""

    def __init__(self, depth):
        self.handler, self.signature = Watched(), Signature(Watched.inputs, Watched.outputs, Watched.max_extents)
        grid = Grid([1, 2, 4, MOST], self.signature.dims, {"n": steps_up_to(LONGEST)})
        self.engine = Engine(make_program(self.handler.forward, self.signature), self.signature, grid, torch.device("cpu"), depth=depth)
        self.lanes, self.flights = itertools.cycle(range(depth)), deque()

    def begin(self, requests):
        if len(self.flights) == self.engine.depth:
            self.land()
        engine, lane = self.engine, next(self.lanes)
        rows, checked = ffi.new("gw_row[]", len(requests)), [self.signature.check(request) for request in requests]
        kept = [engine.place(row, *one) for row, one in zip(rows, checked, strict=True)]
        extents = [found for _, found in checked]
        shape = engine.grid.shape(len(requests), [max(found[0] for found in extents)])
        engine.gather(lane, shape, rows, len(requests))
        del kept  # gathered: whatever becomes of the requests
        engine.executor.launch(lane, shape)
        self.flights.append((lane, shape, requests, extents))

    def land(self):
        lane, shape, requests, extents = self.flights.popleft()
        outputs = self.engine.results(lane, shape)[1]
        for i, request in enumerate(requests):
            check(self.engine.row(outputs, i, extents[i]), request)

    def run(self, batches):
        serials = itertools.count(1)
        sent = [[canary(next(serials), length) for length in lengths] for lengths in batches]
        for requests in sent:
            self.begin(requests)
        while self.flights:
            self.land()
        assert self.handler.wrong == []
        assert self.handler.batches == [[int(request["z"]) for request in requests] for requests in sent]


@pytest.fixture(params=[1, 2, 3])
def pipeline(request):
    pipeline = Pipeline(request.param)
    yield pipeline
    pipeline.engine.close()


@pytest.mark.parametrize(
    "batches",
    [
        [[100] * 8, [3] * 2, [100] * 8],
        [[100] * 8, [3] * 2, [100] * 7],
        [[LONGEST] * 8, [1], [2] * 3, [LONGEST], [1] * 8],
        [[1], [1] * 8, [LONGEST], [LONGEST] * 8, [1]],
        [[5, 100, 1, 8, 9, 16, 17, 130]] * 4 + [[3]] * 4,
    ],
)
def test_large_small_large(pipeline, batches):
    for _ in range(3):  # with all buffers as large as they get
        pipeline.handler.batches.clear()
        pipeline.run(batches)


@pytest.mark.parametrize("order", [1, -1])
def test_all_shapes_of_a_lane_are_views_of_one_buffer(pipeline, order):
    """Whichever comes first; other lanes have their own. What is tested here would be of no use otherwise."""
    executor, shapes = pipeline.engine.executor, pipeline.engine.grid.shapes()
    for lane in range(executor.depth):
        for shape in shapes[::order]:
            executor.inputs(lane, shape)
        views = [executor.inputs(lane, shape) for shape in shapes]
        for name, largest in views[0].items():
            assert all(view[name].ctypes.data == largest.ctypes.data and view[name].flags.c_contiguous for view in views)
            assert largest.ctypes.data % 64 == 0
            assert lane == 0 or not np.shares_memory(largest, executor.inputs(0, shapes[0])[name])


lengths = st.integers(1, LONGEST) | st.sampled_from([1, 7, 8, 9, 12, 128, LONGEST])


@SETTINGS
@given(depth=st.integers(1, 2), batches=st.lists(st.lists(lengths, min_size=1, max_size=MOST), min_size=2, max_size=12))
def test_any_sequence(depth, batches):
    pipeline = Pipeline(depth)
    try:
        pipeline.run(batches)
    finally:
        pipeline.engine.close()


def test_without_a_worker_too():
    """run_batch splits what is more than one batch."""
    handler = Watched()
    for sizes in ([100] * 70, [3] * 2, [100, 1] * 40):
        requests = [canary(k + 1, length) for k, length in enumerate(sizes)]
        for request, answer in zip(requests, handler.run_batch(requests), strict=True):
            check(answer, request)
    assert handler.wrong == []


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("room", [65536, 2048], ids=["in slots", "long ones in files"])
def test_a_worker_some_of_whose_requests_are_given_up(in_process, depth, room):
    """Of what runs, of what is gathered and of what is queued some is cancelled and some runs out of time; their slots are used again for others."""
    handler, dice, serials = Watched(), random.Random(depth), itertools.count(1)
    worker = in_process(handler, pipeline_depth=depth, max_batch_size=MOST, capacity=64, max_request_bytes=room, max_response_bytes=room)
    client = gpuworker.connect(worker.name)
    dropped, expired, answered = set(), set(), set()
    try:
        for _ in range(40):
            handler.gate.clear()
            waves = []
            for wave in range(2):
                sizes = [dice.choice([3, 100, dice.randint(1, LONGEST)]) for _ in range(dice.randint(1, 2 * MOST))]
                requests = [canary(next(serials), length, "F" if dice.random() < 0.1 else "C") for length in sizes]
                waves += [(request, client.enqueue(request, 60)) for request in requests]
                if not wave:
                    handler.wait_entered()
            dice.shuffle(waves)
            for request, pending in waves:
                fate = dice.random()
                if fate < 0.3:
                    assert pending.cancel()
                    dropped.add(int(request["z"]))
                elif fate < 0.5:
                    with pytest.raises(gpuworker.DeadlineExceeded):
                        pending.result(0)
                    expired.add(int(request["z"]))
            handler.gate.set()
            for request, pending in waves:
                if int(request["z"]) not in dropped | expired:
                    check(pending.result(), request)
                    answered.add(int(request["z"]))
            eventually(lambda: worker.stats().slots_in_use == 0)
            while handler.entered.acquire(blocking=False):
                pass
    finally:
        handler.gate.set()
    assert handler.wrong == []
    ran = [serial for batch in handler.batches for serial in batch]
    assert len(ran) == len(set(ran)), "none ran twice"
    assert answered <= set(ran)
    assert len(answered) > 200
    assert dropped & set(ran), "some were running"
    assert dropped - set(ran), "some were not"
    assert expired & set(ran)
    assert expired - set(ran)
    assert worker.stats().completed == len(answered)
