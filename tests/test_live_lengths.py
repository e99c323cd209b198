"""Lengths, live: limits, buckets, token budgets, boundaries learned from the traffic."""

import itertools
import logging
import random
from bisect import bisect_left

import pytest

import gpuworker
from gpuworker.worker import scheduled_line
from tests.conftest import Gate, eventually
from tests.live_worker import LONG_MS, hold, known_costs, live_fixture, outcome, side_by_side  # noqa: F401


class Ruled(Gate):
    """Requests are strings; a length is that of the string, if it is one."""

    def length(self, request):
        return len(request)


def words(count, longest, seed):
    """`count` strings of random lengths."""
    drawn = random.Random(seed)
    return ["x" * drawn.randint(1, longest) for _ in range(count)]


# limits


def test_a_request_that_is_too_long_is_refused_before_it_is_sent(live):
    worker, gate = live(latency_budget_ms=None, length_buckets=(4, 8))
    client = worker.connect(length=len)
    for call in (client.submit, client.enqueue, lambda request: list(client.map([request]))):
        with pytest.raises(gpuworker.RequestTooLong, match="a request of length 9 is longer than the worker takes, 8;") as caught:
            call("x" * 9)
        assert (caught.value.length, caught.value.limit) == (9, 8)
        assert isinstance(caught.value, ValueError)
    assert client.submit("x" * 8) == "x" * 8
    assert (worker.stats().submitted, gate.batches) == (1, [["x" * 8]])


@pytest.mark.parametrize(
    ("options", "limit"),
    [({"length_buckets": (4, 8)}, 8), ({"length_buckets": "learn", "max_length": 8}, 8), ({"max_batch_tokens": 8}, 8), ({"max_length": 8}, 8)],
)
def test_the_owner_refuses_what_is_too_long_and_lives(live, options, limit):
    worker, gate = live(Ruled(), latency_budget_ms=None, **options)
    client = worker.connect()
    pending = [client.enqueue("x" * n) for n in (1, 9, 100, 8)]
    outcomes = [outcome(one) for one in pending]
    assert [outcomes[0], outcomes[3]] == ["x", "x" * 8]
    for error, length in zip(outcomes[1:3], (9, 100), strict=True):
        assert isinstance(error, gpuworker.RequestTooLong)
        assert (error.length, error.limit) == (length, limit)
        assert f"longer than the worker takes, {limit}" in str(error)
    assert sorted(len(request) for batch in gate.batches for request in batch) == [1, 8]
    eventually(lambda: worker.stats().slots_in_use == 0)


@pytest.mark.parametrize("answer", [ZeroDivisionError("on purpose"), "many", None, float("nan")], ids=str)
def test_a_length_that_cannot_be_told_fails_that_request_alone(live, answer):
    class Fickle(Gate):
        def length(self, request):
            if request == "bad":
                if isinstance(answer, Exception):
                    raise answer
                return answer
            return len(request)

    worker, gate = live(Fickle(), length_buckets=(4, 8))
    client = worker.connect()
    pending = [client.enqueue(request) for request in ("x", "bad", "xx", "bad", "xxx")]
    good = [one.result(60) for one in pending[::2]]
    assert good == ["x", "xx", "xxx"]
    for one in pending[1::2]:
        with pytest.raises(type(answer) if isinstance(answer, Exception) else (TypeError, ValueError)):
            one.result(60)
    assert client.submit("after") == "after"
    assert "bad" not in [request for batch in gate.batches for request in batch]
    eventually(lambda: worker.stats().slots_in_use == 0)


def test_an_unusable_length_of_a_client_is_its_own_error(live):
    worker, _ = live(length_buckets=(4, 8))
    for length, error in ((lambda request: 1 // 0, ZeroDivisionError), (lambda request: -1, ValueError), (lambda request: "many", TypeError)):
        with pytest.raises(error):
            worker.connect(length=length).submit("x")
    with pytest.raises(ValueError, match="length='many': give a callable"):
        worker.connect(length="many")
    assert worker.stats().submitted == 0
    assert worker.connect(length=len).submit("x") == "x"


# buckets


@pytest.mark.parametrize("seed", range(4))
def test_batches_never_mix_buckets(live, seed):
    """Without a budget nothing is ever about to be missed, so nothing is merged upward."""
    boundaries = (4, 8, 64)
    worker, gate = live(Ruled(), latency_budget_ms=None, length_buckets=boundaries, max_batch_size=8)
    client, requests = worker.connect(), words(120, 64, seed) + words(60, 8, seed)
    random.Random(seed).shuffle(requests)
    first = hold(client, gate)
    pending = [client.enqueue(request) for request in requests]
    gate.open()
    assert [one.result(60) for one in (first, *pending)] == ["first", *requests]
    mixed = [batch for batch in gate.batches if len({bisect_left(boundaries, len(request)) for request in batch}) > 1]
    assert mixed == []
    assert max(map(len, gate.batches)) == 8
    assert len(gate.batches) <= 1 + len(requests) // 8 + len(boundaries)


def test_a_bucket_about_to_be_missed_rides_with_a_longer_one(live, tmp_path):
    """As it cannot wait until that one has run: 10 s, of the 15 that it has."""

    def answer(request):
        if request == "fail":
            raise RuntimeError("so that nothing is learned from how long this took")
        return request

    costs = known_costs(tmp_path, 10_000, 4, lengths=(4, 8), of=Ruled)
    worker, gate = live(Ruled(answer), latency_budget_ms=LONG_MS, length_buckets=(4, 8), max_batch_size=4, cost_file=costs, admission="off")
    client = worker.connect()
    first = hold(client, gate, "fail")
    pending = [client.enqueue("xxxxxxx", latency_budget_ms=14_000), client.enqueue("x", latency_budget_ms=15_000)]
    gate.open()
    with pytest.raises(RuntimeError):
        first.result()
    assert [one.result(60) for one in pending] == ["xxxxxxx", "x"]
    assert [sorted(batch, key=len) for batch in gate.batches] == [["fail"], ["x", "xxxxxxx"]]


@pytest.mark.parametrize(("boundaries", "sizes", "padded"), [((512,), [2], 3 * 512), ((256, 512), [1, 1], 2 * 256 + 512)])
def test_lengths_around_a_boundary_share_a_batch_when_their_bucket_holds_both(live, boundaries, sizes, padded):
    worker, gate = live(Ruled(), latency_budget_ms=None, length_buckets=boundaries)
    client = worker.connect()
    first = hold(client, gate)
    pending = [client.enqueue("x" * n) for n in (270, 252)]
    gate.open()
    assert [len(one.result(60)) for one in (first, *pending)] == [5, 270, 252]
    assert [len(batch) for batch in gate.batches[1:]] == sizes
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert worker.stats().padding == round(padded / (5 + 270 + 252), 4)


@pytest.mark.parametrize(
    ("boundaries", "budget_ms"),
    [
        *itertools.product([None, (8, 32, 64), "learn"], [None, LONG_MS]),
        ((8, 32, 64), 5),
        pytest.param(None, 5),
        pytest.param("learn", 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("max_batch_tokens", [64, 150])
def test_no_batch_exceeds_the_token_budget(live, boundaries, budget_ms, max_batch_tokens):
    worker, gate = live(
        Ruled(),
        latency_budget_ms=budget_ms,
        late="serve" if budget_ms else "reject",
        length_buckets=boundaries,
        max_length=64,
        max_batch_tokens=max_batch_tokens,
        max_batch_size=16,
    )
    outcomes = []

    def calls(seed):
        client = worker.connect()
        for part in range(4):
            requests = words(40, random.Random(seed + part).choice([4, 16, 64]), seed + part)
            pending = [client.enqueue(request) for request in requests]
            outcomes.extend(one.result(60) == request for one, request in zip(pending, requests, strict=True))
        client.close()

    side_by_side(calls, [10 * seed for seed in range(3)])
    assert outcomes == [True] * 480
    assert sum(map(len, gate.batches)) == 480
    for batch in gate.batches:
        longest = max(map(len, batch))
        padded = boundaries[bisect_left(boundaries, longest)] if isinstance(boundaries, tuple) else longest
        assert len(batch) * padded <= max_batch_tokens or len(batch) == 1
        assert len(batch) <= 16
    assert max(map(len, gate.batches)) > 1


def test_sizes_that_the_handler_pads_to_leave_a_lone_request_alone(live):
    worker, gate = live(allowed_batch_sizes=(1, 4, 8), max_batch_size=32)
    assert worker.options.max_batch_size == 8
    client = worker.connect()
    assert client.submit("alone") == "alone"
    first = hold(client, gate)
    pending = [client.enqueue(i) for i in range(20)]
    gate.open()
    assert [one.result(60) for one in (first, *pending)] == ["first", *range(20)]
    assert [len(batch) for batch in gate.batches[:2]] == [1, 1]
    assert max(map(len, gate.batches)) == 8
    eventually(lambda: worker.stats().slots_in_use == 0)
    stats = worker.stats()
    assert stats.batch_sizes["1"] >= 2
    assert stats.batch_sizes["8"] >= 2
    assert sum(stats.dispatch_reasons.values()) == stats.batches == len(gate.batches)


# learning


def test_boundaries_are_learned_under_load_and_no_request_is_lost(live, monkeypatch, caplog):
    monkeypatch.setattr(scheduled_line, "LEARN_TICKS", 1)
    caplog.set_level(logging.INFO, "gpuworker")
    worker, gate = live(Ruled(), length_buckets="learn", max_length=640, max_length_buckets=3, max_batch_size=8)
    short, long = ["s" * 30, "m" * 190], ["l" * 380, "m" * 190]

    def learned():
        return [record.getMessage() for record in caplog.records if record.getMessage().startswith("length buckets are now")]

    def traffic(of):
        client = worker.connect(length=len)
        for _ in range(40):
            requests = [of[i % 2] for i in range(40)]
            assert list(client.map(requests, timeout=60)) == requests
        client.close()

    def serve_until(condition, of):
        for _ in range(20):
            side_by_side(traffic, [of for _ in range(2)])
            if condition():
                return
        raise AssertionError("it did not happen")

    serve_until(learned, short)
    assert learned()[0] == "length buckets are now 32, 192, 640"
    serve_until(lambda: learned()[-1] == "length buckets are now 192, 384, 640", long)
    eventually(lambda: worker.stats().slots_in_use == 0)
    stats = worker.stats()
    assert stats.completed == stats.submitted == sum(map(len, gate.batches))
    assert budgets(stats) == stats.submitted
    assert stats.padding > 1


def budgets(stats):
    return stats.on_time + stats.late
