"""The parts of the scheduler beside the exact limits: late requests, priorities, length buckets, token budgets, probes."""

import random

import pytest

from gpuworker.scheduling import JointBudget, KnownRunTimes, Queued, Reason, Run, Wait
from gpuworker.scheduling.cost_model import CostModel
from gpuworker.testing import Outcome, poisson, simulate

MS = 1_000_000


def cost_ns(size, length=0):
    return 5 * MS + 250_000 * size


def by_tokens_ns(size, length):
    return 2 * MS + 1_000 * size * length


def joint(cost=cost_ns, size=32, **options):
    return JointBudget(KnownRunTimes(cost, size), max_batch_size=size, **options)


def ask(scheduler, now_ns, *requests):
    for request in requests:
        scheduler.add(request)
    return scheduler.decide(now_ns)


def tickets(requests):
    return [request.ticket for request in requests]


# What is too late


def test_late_requests_are_served_when_nothing_else_is_there():
    scheduler = joint(budget_ns=20 * MS, late="serve")
    decision = ask(scheduler, 30 * MS, Queued(1, 0), Queued(2, 29 * MS))
    assert (tickets(decision.batch), decision.rejected) == ([2], [])
    assert len(scheduler) == 1
    decision = scheduler.decide(36 * MS)
    assert (tickets(decision.batch), decision.reason) == ([1], Reason.LATE)


def test_serving_late_requests_answers_everybody():
    result = simulate(joint(budget_ns=26 * MS, late="serve"), poisson(3200, 3000, seed=1), cost_ns, budget_ns=26 * MS)
    assert result.rejected == 0
    assert result.on_time > 1500
    rejecting = simulate(joint(budget_ns=26 * MS), poisson(3200, 3000, seed=1), cost_ns, budget_ns=26 * MS)
    assert result.on_time > 0.9 * rejecting.on_time


def test_a_batch_of_late_requests_leaves_room_for_one_that_comes_just_after_it():
    scheduler = joint(budget_ns=12 * MS, late="serve")
    decision = ask(scheduler, 100 * MS, *(Queued(i, 0) for i in range(32)))
    assert decision.reason == Reason.LATE
    assert cost_ns(decision.size) + cost_ns(1) <= 12 * MS < cost_ns(decision.size + 1) + cost_ns(1)


def test_each_request_may_have_a_budget_of_its_own():
    scheduler = joint(budget_ns=20 * MS)
    decision = ask(scheduler, 10 * MS, Queued(1, 0, budget_ns=12 * MS), Queued(2, 0), Queued(3, 0, budget_ns=100 * MS))
    assert tickets(decision.rejected) == [1]
    assert tickets(decision.batch) == [2, 3]


def test_a_caller_that_leaves_earlier_is_due_earlier():
    scheduler = joint(budget_ns=20 * MS)
    decision = ask(scheduler, 10 * MS, Queued(1, 0, deadline_ns=12 * MS), Queued(2, 0, deadline_ns=30 * MS))
    assert tickets(decision.rejected) == [1]
    assert tickets(decision.batch) == [2]


def test_draining_waits_for_nobody():
    scheduler = joint(budget_ns=100 * MS, wait="until_deadline")
    assert isinstance(ask(scheduler, 0, Queued(1, 0)), Wait)
    decision = scheduler.decide(0, may_wait=False)
    assert (tickets(decision.batch), decision.reason) == ([1], Reason.DRAIN)


# A prediction that is too high


def test_a_prediction_that_is_too_high_is_found_out():
    """Cold batches of 500 ms have taught the model that nothing can be in time; really all could be."""
    model = CostModel(8)
    model.seed(1, 0, [500 * MS] * 5)
    scheduler = JointBudget(model, max_batch_size=8, budget_ns=20 * MS)
    result = simulate(scheduler, [i * 10 * MS for i in range(2000)], lambda size, length: 5 * MS, budget_ns=20 * MS)
    assert result.reasons[Reason.PROBE] >= 1
    assert result.on_time > 1500


def test_known_run_times_are_believed():
    result = simulate(joint(budget_ns=5 * MS), [i * 1000 * MS for i in range(20)], cost_ns, budget_ns=5 * MS)
    assert result.count(Outcome.REJECTED_AT_DISPATCH) == 20


# Priorities


def test_higher_priorities_go_first():
    scheduler = joint(size=2, budget_ns=1000 * MS, priority_ageing_ns=0)
    decision = ask(scheduler, 4, Queued(1, 0), Queued(2, 1, priority=5), Queued(3, 2), Queued(4, 3, priority=9))
    assert tickets(decision.batch) == [4, 2]
    assert tickets(scheduler.decide(5).batch) == [1, 3]


def test_lower_priorities_join_only_as_far_as_they_make_nobody_above_late():
    scheduler = joint(budget_ns=1000 * MS)
    urgent = Queued(99, 0, budget_ns=cost_ns(10), priority=1)
    decision = ask(scheduler, 0, urgent, *(Queued(i, 0) for i in range(31)))
    assert urgent in decision.batch
    assert decision.size == 10
    assert not decision.rejected


def test_without_priorities_the_urgent_one_is_given_up_for_the_others_if_they_cannot_follow_in_time():
    scheduler = joint(budget_ns=cost_ns(31))
    urgent = Queued(99, 0, budget_ns=cost_ns(10))
    decision = ask(scheduler, 0, urgent, *(Queued(i, 0) for i in range(31)))
    assert (decision.rejected, decision.size) == ([urgent], 31)


def test_and_goes_first_with_as_many_as_can_come_along_if_they_can():
    scheduler = joint(budget_ns=cost_ns(10) + cost_ns(22))
    urgent = Queued(99, 0, budget_ns=cost_ns(10))
    decision = ask(scheduler, 0, urgent, *(Queued(i, 0) for i in range(31)))
    assert (decision.rejected, decision.size) == ([], 10)
    assert urgent in decision.batch
    decision = scheduler.decide(cost_ns(10))
    assert (decision.rejected, decision.size) == ([], 22)


def test_who_may_take_longer_does_not_wait_longer():
    flat = lambda size, length=0: 10 * MS  # noqa: E731 (a budget of 15 ms leaves no room: batches leave at the last instant)
    decision = ask(joint(flat, budget_ns=15 * MS), 0, Queued(1, 0, budget_ns=10_000 * MS))
    assert decision.until_ns == 5 * MS


@pytest.mark.parametrize("wait", ["auto", "until_deadline"])
def test_while_no_run_time_is_known_nobody_waits_for_the_last_instant(wait):
    assert isinstance(ask(JointBudget(CostModel(8), max_batch_size=8, budget_ns=50 * MS, wait=wait), 0, Queued(1, 0)), Run)


def test_a_request_that_has_waited_rises_above_other_buckets_too():
    scheduler = joint(by_tokens_ns, size=4, max_wait_ns=0, length_buckets=(10, 100), priority_ageing_ns=50 * MS)
    scheduler.add(Queued(0, 0, length=100))
    now_ns = 0
    for i in range(1, 400):
        scheduler.add(Queued(i, now_ns, length=10, priority=2))
        decision = scheduler.decide(now_ns)
        if decision.batch[0].ticket == 0:
            break
        now_ns += by_tokens_ns(1, 10)
    assert 100 * MS <= now_ns <= 160 * MS


def test_each_bucket_is_probed_by_itself():
    """Requests of 512 are predicted six times too slow while those of 128 are served all the time."""
    model = CostModel(8)
    model.seed(1, 128, [5 * MS] * 5)
    model.seed(1, 512, [120 * MS] * 5)
    scheduler = JointBudget(model, max_batch_size=8, budget_ns=60 * MS, length_buckets=(128, 512))
    arrivals = [Queued(i, i * 15 * MS, length=512 if i % 4 == 0 else 128) for i in range(2000)]
    result = simulate(scheduler, arrivals, lambda size, length: 5 * MS if length == 128 else 20 * MS, budget_ns=60 * MS)
    assert result.reasons[Reason.PROBE] >= 1
    assert sum(outcome == Outcome.ON_TIME for request, outcome in zip(result.requests, result.outcome, strict=True) if request.length == 512) > 250


def test_one_long_request_does_not_take_the_whole_queue_with_it():
    cost = lambda size, length: 2 * MS + 2_000 * size * length  # noqa: E731
    scheduler = joint(cost, budget_ns=15 * MS, max_batch_tokens=8192)
    decision = ask(scheduler, 0, Queued(0, 0, length=8000), *(Queued(i, 0, length=16) for i in range(1, 21)))
    assert tickets(decision.rejected) == [0]
    assert decision.size == 20


def test_those_that_come_in_the_place_of_who_was_in_the_way_may_be_longer():
    cost = lambda size, length: 1 * MS + 1_000 * size * length  # noqa: E731
    scheduler = joint(cost, size=8, budget_ns=20 * MS, max_batch_tokens=100_000)
    shorts = [Queued(i, 0, length=16, budget_ns=1_100_000) for i in range(8)]
    longs = [Queued(10 + i, 1, length=4096, budget_ns=10 * MS) for i in range(8)]
    for request in (*shorts, *longs):
        scheduler.add(request)
    now_ns = 0
    while len(scheduler):
        decision = scheduler.decide(now_ns)
        if isinstance(decision, Run):
            now_ns += cost(decision.size, decision.length)
            assert all(now_ns <= scheduler.due_ns(request) for request in decision.batch)


def test_a_lost_head_does_not_keep_the_one_behind_it_from_joining():
    scheduler = joint(by_tokens_ns, size=8, budget_ns=1000 * MS, max_wait_ns=0, length_buckets=(100, 1000), fair_share=False)
    longs = [Queued(i, 0, length=1000, budget_ns=9_100_000) for i in range(6)]
    lost, joins = Queued(98, 0, length=100, budget_ns=8_900_000), Queued(99, 0, length=100, budget_ns=10 * MS)
    for request in (*longs, lost, joins):
        scheduler.add(request)
    decision = scheduler.decide(0)
    assert 99 in tickets(decision.batch)


@pytest.mark.parametrize("ageing_ms", [0, 50])
def test_a_request_that_has_waited_rises(ageing_ms):
    scheduler = joint(size=1, max_wait_ns=0, budget_ns=10_000 * MS, priority_ageing_ns=ageing_ms * MS)
    scheduler.add(Queued(0, 0))
    left_ns, now_ns = None, 0
    for i in range(1, 200):
        scheduler.add(Queued(i, now_ns, priority=2))
        scheduler.add(Queued(1000 + i, now_ns, priority=2))
        decision = scheduler.decide(now_ns)
        if decision.batch[0].ticket == 0:
            left_ns = now_ns
            break
        now_ns += cost_ns(1)
    assert left_ns is None if not ageing_ms else 100 * MS <= left_ns <= 100 * MS + 50 * cost_ns(1)


def test_empty_priorities_are_forgotten():
    scheduler = joint(size=4, budget_ns=1000 * MS)
    for priority in range(256):
        scheduler.add(Queued(priority, 0, priority=priority))
    for _ in range(64):
        assert scheduler.decide(0).size == 4
    assert isinstance(scheduler.decide(0), Wait)
    assert len(scheduler.buckets[0]._lanes) == 1


# Length buckets


def test_a_batch_holds_one_bucket():
    scheduler = joint(by_tokens_ns, size=4, budget_ns=1000 * MS, max_wait_ns=0, length_buckets=(100, 1000))
    decisions = [ask(scheduler, 0, *(Queued(i, 0, length=[10, 900][i % 2]) for i in range(8))), scheduler.decide(0)]
    assert {decision.length for decision in decisions} == {100, 1000}
    for decision in decisions:
        assert len({request.length for request in decision.batch}) == 1


def test_the_bucket_that_would_be_missed_first_goes_first():
    scheduler = joint(by_tokens_ns, budget_ns=1000 * MS, max_wait_ns=0, length_buckets=(100, 1000))
    decision = ask(scheduler, 0, Queued(1, 0, length=10, budget_ns=50 * MS), Queued(2, 0, length=900, budget_ns=40 * MS))
    assert tickets(decision.batch) == [2]
    assert tickets(scheduler.decide(3 * MS).batch) == [1]


def test_it_lets_another_go_first_that_would_be_missed_if_it_can_afford_to():
    scheduler = joint(by_tokens_ns, size=8, max_wait_ns=0, budget_ns=1000 * MS, length_buckets=(100, 1000))
    longs = [Queued(i, 0, length=1000, budget_ns=16 * MS) for i in range(8)]  # 10 ms together: must start by 6 ms
    short = Queued(99, 0, length=100, budget_ns=8_200_000)  # 2.1 ms: must start by 6.1 ms
    decision = ask(scheduler, 0, short, *longs)
    assert tickets(decision.batch) == [99]
    assert len(scheduler.decide(2_100_000).batch) == 8


def test_a_short_request_that_would_be_missed_joins_a_longer_batch():
    scheduler = joint(by_tokens_ns, size=8, budget_ns=1000 * MS, max_wait_ns=0, length_buckets=(100, 1000), fair_share=False)
    longs = [Queued(i, 0, length=1000, budget_ns=9_100_000) for i in range(6)]  # 8 ms together: must start by 1.1 ms, no time for anybody else
    short = Queued(99, 0, length=100, budget_ns=10 * MS)  # must start by 7.9 ms: too late after those 8
    decision = ask(scheduler, 0, short, *longs)
    assert sorted(tickets(decision.batch)) == [0, 1, 2, 3, 4, 5, 99]
    assert decision.length == 1000
    assert not decision.rejected


def test_it_does_not_join_where_it_would_make_them_late():
    scheduler = joint(by_tokens_ns, size=8, budget_ns=1000 * MS, max_wait_ns=0, length_buckets=(100, 1000), fair_share=False)
    longs = [Queued(i, 0, length=1000, budget_ns=8_100_000) for i in range(6)]
    short = Queued(99, 0, length=100, budget_ns=9_900_000)
    decision = ask(scheduler, 0, short, *longs)
    assert sorted(tickets(decision.batch)) == [0, 1, 2, 3, 4, 5]


def test_new_boundaries_take_what_is_queued_along():
    scheduler = joint(by_tokens_ns, size=4, budget_ns=1000 * MS)
    for i in range(9):
        scheduler.add(Queued(i, i, length=100 * (i + 1)))
    scheduler.set_boundaries((300, 1000))
    assert len(scheduler) == 9
    assert [len(bucket) for bucket in scheduler.buckets] == [3, 6]


@pytest.mark.parametrize("length_buckets", [(), (64, 256, 1024)])
def test_no_batch_holds_more_tokens_than_allowed(length_buckets):
    seed = random.Random(5)
    requests = [Queued(i, int(at), length=min(int(seed.expovariate(1 / 150)) + 1, 1024)) for i, at in enumerate(poisson(1500, 3000, seed=2))]
    scheduler = joint(by_tokens_ns, budget_ns=100 * MS, length_buckets=length_buckets, max_batch_tokens=2048)
    result = simulate(scheduler, requests, by_tokens_ns, budget_ns=100 * MS)
    assert result.on_time > 2000
    assert result.late == 0
    for batch in result.batches:
        longest = max(requests[i].length for i in batch.requests)
        assert len(batch.requests) == 1 or len(batch.requests) * longest <= 2048
        assert batch.padded_length >= longest
    assert max(len(batch.requests) for batch in result.batches) > 8


def test_a_request_that_is_alone_more_than_a_batch_may_hold_runs_alone():
    scheduler = joint(by_tokens_ns, budget_ns=1000 * MS, max_wait_ns=0, max_batch_tokens=100)
    decision = ask(scheduler, 0, Queued(1, 0, length=500), Queued(2, 0, length=10))
    assert tickets(decision.batch) == [1]


def test_allowed_batch_sizes_are_filled_for_free():
    """Padded to 4 or 8, the fifth request makes the batch as long as the eighth: while it can wait, it is worth more."""
    model = CostModel(8, allowed_batch_sizes=(4, 8))
    model.seed(4, 0, [4 * MS] * 5)
    model.seed(8, 0, [8 * MS] * 5)
    scheduler = JointBudget(model, max_batch_size=8, budget_ns=1000 * MS)
    assert list(model.table(0)) == [0, *[4 * MS] * 4, *[8 * MS] * 4]
    decision = ask(scheduler, 3, *(Queued(i, i) for i in range(3)))
    assert isinstance(decision, Wait)
    decision = ask(scheduler, 4, Queued(3, 3))
    assert isinstance(decision, Run)
    assert decision.size == 4
