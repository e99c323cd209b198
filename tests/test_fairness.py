"""One client that asks for much does not keep the others waiting: the policy, its twin in C, and a real worker."""

import random
from collections import Counter

import pytest

import gpuworker
from gpuworker._native import ffi, lib
from gpuworker.scheduling import JointBudget, KnownRunTimes, Queued
from gpuworker.scheduling.fairness import fair_front
from gpuworker.segment import Geometry, Segment
from gpuworker.worker.backlog import Backlog
from gpuworker.worker.reaper import retire

MS = 1_000_000


def queue_of(*participants):
    return [Queued(ticket, ticket, participant=participant) for ticket, participant in enumerate(participants)]


def test_first_come_first_served_among_equals():
    queue = queue_of(1, 2, 1, 2, 2, 1)
    assert fair_front(queue, 4) == queue[:4]


def test_a_single_request_behind_a_flood_is_in_the_next_batch():
    queue = queue_of(*[1] * 1000, 2)
    assert queue[-1] in fair_front(queue, 32)


def test_who_comes_after_a_flood_gets_a_quarter_of_an_even_share():
    chosen = fair_front(queue_of(*[1] * 1000, *[2] * 100, 3), 48)
    assert Counter(request.participant for request in chosen) == {1: 48 - 4 - 1, 2: 4, 3: 1}
    assert [request.ticket for request in chosen] == [*range(43), *range(1000, 1004), 1100]


def test_more_clients_than_a_batch_holds_take_turns():
    queue = queue_of(*[1] * 1000, *range(2, 12))
    served = []
    while len(queue) > 16:
        chosen = fair_front(queue, 4)
        served += [request.participant for request in chosen]
        queue = [request for request in queue if request not in chosen]
    assert set(served[:16]) == set(range(1, 12))


def test_c_and_python_agree(name):
    seed = random.Random(7)
    segment = Segment.own(name, Geometry(64, 64, 512, 8, 0, -1))
    lib.gw_set_policy(segment.port, 0, 0, 64, 64, 0, 64)
    lib.gw_set_state(segment.port, lib.GW_SERVING)
    clients = [Segment.attach(name) for _ in range(5)]
    assert all(client.join() for client in clients)
    backlog, taken = Backlog(segment.port), ffi.new("uint64_t[]", 128)
    lib.gw_set_scheduling(segment.port, lib.GW_ADMIT_ALL, 0, 0, 0, 1, 0)
    differed = 0
    for _ in range(300):
        weights = [seed.choice([0, 1, 1, 40]) for _ in clients]
        while sum(weights) and backlog.length < seed.randint(1, 64):
            (client,) = seed.choices(clients, weights)
            assert lib.gw_submit(client.port, lib.GW_KIND_BYTES, b"", 0, b"", 0, 0, 0) >= 0
            backlog.length = lib.gw_collect(segment.port, 0)
        queue, count = list(backlog), seed.choice([1, 2, 4, 8, 40])
        expected = [request.ticket for request in fair_front(queue, count)]
        n = lib.gw_take(segment.port, count, 0, taken)
        assert ffi.unpack(taken, 2 * n)[::2] == expected
        differed += expected != [request.ticket for request in queue[:count]]
        lib.gw_finish(segment.port, taken, n)
        for client in clients:
            for ticket in expected:
                lib.gw_release(client.port, ticket)
        backlog.length = lib.gw_collect(segment.port, 0)
        assert [request.ticket for request in backlog] == sorted({r.ticket for r in queue} - set(expected), key=[r.ticket for r in queue].index)
    assert differed > 10
    for client in clients:
        client.close()
    retire(segment)
    segment.close()


@pytest.mark.parametrize("options", [{}, {"latency_budget_ms": 60_000.0, "max_wait_ms": 0, "cost_file": "off"}])
def test_a_real_worker_is_fair(name, options):
    batches = []

    def run_batch(requests):
        batches.append(list(requests))
        return requests

    gate = __import__("threading").Event()

    def held(requests):
        if requests == ["first"]:
            gate.wait()
        return run_batch(requests)

    with gpuworker.Worker(held, name=name, in_process=True, max_batch_size=4, **options) as worker:
        hot, other = worker.connect(), worker.connect()
        running = hot.enqueue("first")
        while not worker.stats().batch_running_s:
            pass
        flood = [hot.enqueue(f"hot {i}") for i in range(40)]
        single = other.enqueue("single")
        gate.set()
        assert single.result() == "single"
        assert [one.result() for one in (running, *flood)] == ["first", *(f"hot {i}" for i in range(40))]
    assert "single" in batches[1]


@pytest.mark.parametrize("fair_share", [True, False])
def test_the_budget_scheduler_is_fair_too(fair_share):
    scheduler = JointBudget(KnownRunTimes(lambda size, length: 5 * MS + size * MS, 8), max_batch_size=8, budget_ns=1000 * MS, fair_share=fair_share)
    for request in queue_of(*[1] * 100, 2):
        scheduler.add(request)
    assert (scheduler.decide(0).batch[-1].participant == 2) == fair_share
    assert len(scheduler) == 93
