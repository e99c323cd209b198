"""Turning requests away at enqueue: the C that frontends run against its twin in Python, and what it means."""

import errno
import random
import time

import pytest

from gpuworker._native import ffi, lib
from gpuworker.scheduling.forecast import PROBE_AFTER_NS, LaneView, forecast
from gpuworker.segment import Geometry, Segment, State
from gpuworker.worker.reaper import retire

MS = 1_000_000
NOW = time.monotonic_ns() + 3600_000 * MS  # of buckets that have run just now
SMALL = Geometry(16, 4096, 4096, 4, 1 << 20, -1)


@pytest.fixture
def segment(name):
    segment = Segment.own(name, SMALL)
    yield segment
    retire(segment)
    segment.close()


def publish(port, lanes, admission=lib.GW_ADMIT_IN_TIME, budget_ns=0):
    lib.gw_set_scheduling(port, admission, budget_ns, 0, 0, 0, 0)
    for i, lane in enumerate(lanes):
        lib.gw_publish_lane(port, i, lane.length, lane.cap, lane.run_one_ns, lane.run_full_ns)
        lib.gw_publish_queue(port, i, lane.queued, lane.gap_ns, 0, lane.ran_ns)
    lib.gw_publish_lanes(port, len(lanes))


def ask(port, budget_ns=0, length=0):
    out = ffi.new("gw_forecast *")
    late = lib.gw_is_late(port, budget_ns // 1000 << 32 | length << 8, out)
    return out.estimated_ns, out.depth, bool(late)


def test_c_and_python_agree(segment):
    seed = random.Random(4)
    outcomes = set()
    for _ in range(2000):
        lengths = sorted(seed.sample(range(16, 4096), seed.randint(1, 8)))
        lanes = []
        for length in lengths:
            one = seed.randint(1, 20) * 100_000
            lanes.append(
                LaneView(
                    length,
                    seed.randint(1, 32),
                    one,
                    one + seed.randint(0, 20) * 100_000,
                    seed.choice([0, 50_000, 10**7]),
                    seed.randint(0, SMALL.capacity),
                    NOW,
                )
            )
        always = seed.random() < 0.5
        publish(segment.port, lanes, lib.GW_ADMIT_IN_TIME if always else lib.GW_ADMIT_AUTO)
        budget_ns, length = seed.randint(1, 60_000) * 1000, seed.randint(1, 5000)
        expected = forecast(lanes, length, budget_ns, NOW, 0, always)
        assert ask(segment.port, budget_ns, length) == tuple(expected)
        outcomes.add(expected.is_late)
    assert outcomes == {False, True}


@pytest.fixture
def begin(segment):
    """Begins a batch of one request."""
    clients = []

    def begin():
        lib.gw_set_policy(segment.port, 0, 0, 16, 16, 0, 32)
        lib.gw_set_state(segment.port, State.SERVING)
        clients.append(Segment.attach(segment.name))
        assert clients[-1].join()
        assert lib.gw_submit(clients[-1].port, 0, b"", 0, b"x", 1, 0, 0) >= 0
        assert lib.gw_open_backlog(segment.port) == 0
        assert lib.gw_collect(segment.port, 0) == 1
        assert lib.gw_take(segment.port, 1, 0, ffi.new("uint64_t[2]")) == 1

    yield begin
    for client in clients:
        client.close()


def test_the_running_batch_counts(segment, begin):
    begin()
    publish(segment.port, [LaneView(0, 8, MS, MS, 0, 0, NOW)])
    assert not ask(segment.port, 3 * MS)[2]
    lib.gw_note_batch(segment.port, 3600_000 * MS, 0, 0)
    assert ask(segment.port, 3 * MS)[2]


def test_requests_published_since_the_owner_looked_count(segment):
    publish(segment.port, [LaneView(0, 2, MS, MS, 0, 4, NOW)])
    assert ask(segment.port, 100 * MS)[:2] == (3 * MS, 4)
    client = Segment.attach(segment.name)
    assert client.join()
    lib.gw_set_policy(segment.port, 0, 0, 16, 16, 0, 32)
    lib.gw_set_state(segment.port, State.SERVING)
    for _ in range(2):
        assert lib.gw_submit(client.port, 0, b"", 0, b"x", 1, 0, 100_000 << 32) >= 0
    assert ask(segment.port, 100 * MS)[:2] == (4 * MS, 6)
    assert lib.gw_submit(client.port, 0, b"", 0, b"x", 1, 0, 1_000 << 32) == -errno.ETIME
    client.close()


@pytest.mark.parametrize(
    ("admission", "budget_ms", "is_late"),
    [("off", 1, False), ("on", 1, True), ("on", 300, True), ("auto", 1, False), ("auto", 399, False), ("auto", 400, True), ("auto", 1000, False)],
)
def test_when_a_forecast_counts(segment, admission, budget_ms, is_late):
    """auto: only where the budget is four full batches or more (100 ms each here; five of them are queued)."""
    modes = {"off": lib.GW_ADMIT_ALL, "on": lib.GW_ADMIT_IN_TIME, "auto": lib.GW_ADMIT_AUTO}
    publish(segment.port, [LaneView(0, 3, 5 * MS, 100 * MS, 0, 15, NOW)], modes[admission])
    assert ask(segment.port, budget_ms * MS)[2] == is_late


def test_nothing_known_is_no_reason(segment):
    publish(segment.port, [])
    assert not ask(segment.port, 1000)[2]
    publish(segment.port, [LaneView(0, 8, 0, 0, 0, 50, NOW)])  # no run time known yet
    assert not ask(segment.port, 1000)[2]
    publish(segment.port, [LaneView(0, 0, MS, MS, 0, 50, NOW)])  # scribbled over
    assert not ask(segment.port, 1000)[2]


def test_some_are_let_through_when_nothing_has_run_for_a_while(segment, begin):
    publish(segment.port, [LaneView(0, 8, 100 * MS, 100 * MS, 0, 0, 0)])
    assert not ask(segment.port, MS)[2]  # no batch ever
    publish(segment.port, [LaneView(0, 8, 100 * MS, 100 * MS, 0, 0, NOW)])
    assert ask(segment.port, MS)[2]
    begin()
    publish(segment.port, [LaneView(0, 8, 100 * MS, 100 * MS, 0, 0, 0)])
    lib.gw_note_batch(segment.port, 3600_000 * MS, 0, 0)
    assert ask(segment.port, MS)[2]  # a batch that takes long is no idleness
    lane = [LaneView(0, 8, 100 * MS, 100 * MS, 0, 0, 0)]
    assert forecast(lane, 0, MS, PROBE_AFTER_NS - 1, 0, True).is_late
    assert not forecast(lane, 0, MS, PROBE_AFTER_NS, 0, True).is_late
    assert forecast(lane, 0, MS, PROBE_AFTER_NS, PROBE_AFTER_NS + 1, True).is_late


def test_who_has_a_priority_is_not_forecast(segment):
    publish(segment.port, [LaneView(0, 8, 100 * MS, 100 * MS, 0, 5, NOW)])
    assert lib.gw_is_late(segment.port, 1000 << 32, ffi.NULL)
    assert not lib.gw_is_late(segment.port, 1000 << 32 | 1, ffi.NULL)
