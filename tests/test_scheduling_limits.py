"""What batching under a latency budget must do exactly, in integer nanoseconds. T(b) = 5 + 0.25 b ms and at most 32 in a batch, unless said otherwise."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuworker.scheduling import Fifo, JointBudget, KnownRunTimes, Queued, Reason, Run, SizeOrTimeout, Wait
from gpuworker.scheduling.waiting import Arrivals, Waits, departure
from gpuworker.testing import Outcome, optimum, poisson, simulate

US, MS = 1_000, 1_000_000
B = 32


def cost_ns(size, length=0):
    return 5 * MS + 250 * US * size


T = [0, *(cost_ns(size) for size in range(1, B + 1))]


def joint(budget_ns, cost=cost_ns, size=B, **options):
    return JointBudget(KnownRunTimes(cost, size), max_batch_size=size, budget_ns=budget_ns, **options)


def test_1_a_lone_request_leaves_when_it_comes():
    slowly = [i * cost_ns(1) for i in range(100)]  # the device is free again; waiting would save 4.75 ms a pair, and the next comes after 5.25
    result = simulate(joint(1000 * MS), slowly, cost_ns)
    assert [batch.start_ns for batch in result.batches] == slowly
    rising = lambda size, length: size * 10 * MS  # noqa: E731 (alpha <= beta: waiting never pays, however fast they come)
    result = simulate(joint(1000 * MS, rising), [0, 1, 2 * US, 3 * US], rising)
    assert result.batches[0].start_ns == 0


@pytest.mark.parametrize("max_wait_ns", [0, MS, None])
def test_2_a_full_batch_leaves_at_once(max_wait_ns):
    scheduler = joint(1000 * MS, max_wait_ns=max_wait_ns, wait="until_deadline")
    for i in range(B):
        scheduler.add(Queued(i, 0))
    decision = scheduler.decide(0)
    assert (decision.size, decision.reason) == (B, Reason.FULL)


@given(age_ns=st.integers(0, 100 * MS), count=st.integers(1, B - 1), max_wait_ns=st.integers(0, 50 * MS), budget_ns=st.integers(14 * MS, 80 * MS))
def test_3_the_wait_that_is_left(age_ns, count, max_wait_ns, budget_ns):
    def left_ns(age_ns, count):
        leaves_ns, _ = departure(count, -age_ns, budget_ns - age_ns, T, Waits(max_wait_ns), Arrivals(), 0)
        return max(0, leaves_ns)

    assert left_ns(age_ns, count) == max(0, min(max_wait_ns, budget_ns - T[count + 1]) - age_ns)
    assert left_ns(age_ns + 1, count) == max(0, left_ns(age_ns, count) - 1)
    if count + 1 < B:
        assert left_ns(age_ns, count + 1) <= left_ns(age_ns, count)


@given(
    gaps_ns=st.lists(st.integers(0, 3 * MS), min_size=1, max_size=B - 2), max_wait_ns=st.integers(0, 20 * MS), budget_ns=st.integers(14 * MS, 60 * MS)
)
def test_4_one_more_request_never_makes_the_others_wait_longer(gaps_ns, max_wait_ns, budget_ns):
    scheduler = joint(budget_ns, max_wait_ns=max_wait_ns, wait="until_deadline")
    now_ns, before_ns = 0, None
    for i, gap_ns in enumerate(gaps_ns):
        now_ns += gap_ns
        if before_ns is not None and now_ns >= before_ns:
            break
        scheduler.add(Queued(i, now_ns))
        decision = scheduler.decide(now_ns)
        if isinstance(decision, Run):
            break
        assert before_ns is None or decision.until_ns <= before_ns
        before_ns = decision.until_ns


@given(gaps_ns=st.lists(st.integers(0, 8 * MS), min_size=1, max_size=60), max_wait_ms=st.integers(0, 10))
def test_5_without_a_budget_it_is_the_size_or_timeout_rule(gaps_ns, max_wait_ms):
    arrivals, now_ns = [], 0
    for gap_ns in gaps_ns:
        arrivals.append(now_ns := now_ns + gap_ns)
    plain = simulate(Fifo(SizeOrTimeout(4, max_wait_ms)), arrivals, cost_ns).batches
    ours = simulate(joint(None, size=4, max_wait_ns=max_wait_ms * MS), arrivals, cost_ns).batches
    assert [batch[:2] + batch[3:4] for batch in ours] == [batch[:2] + batch[3:4] for batch in plain]


@given(gaps_ns=st.lists(st.integers(0, 8 * MS), min_size=1, max_size=60))
def test_5_with_no_wait_it_is_eager_but_for_what_is_rejected(gaps_ns):
    arrivals, now_ns = [], 0
    for gap_ns in gaps_ns:
        arrivals.append(now_ns := now_ns + gap_ns)
    ours = simulate(joint(10_000 * MS, size=4, max_wait_ns=0), arrivals, cost_ns).batches
    eager = simulate(Fifo(SizeOrTimeout(4, 0)), arrivals, cost_ns).batches
    assert [batch.requests for batch in ours] == [batch.requests for batch in eager]


def test_6_the_last_instant_depends_on_the_batch_only_as_its_run_does():
    flat = [0, *[5 * MS] * B]
    assert len({departure(count, 0, 60 * MS, flat, Waits(), Arrivals(), 0) for count in range(1, B)}) == 1
    arrivals = Arrivals()
    for i in range(10):
        arrivals.add(i)
    no_setup = [size * MS for size in range(B + 1)]
    assert all(departure(count, 0, 60 * MS, no_setup, Waits(worth_ns=60 * MS), arrivals, 9)[0] == 9 for count in range(1, B))


def test_7_a_budget_below_one_run_rejects_everything_and_never_runs():
    result = simulate(joint(cost_ns(1) - 1), poisson(200, 500, seed=1), cost_ns, budget_ns=cost_ns(1) - 1)
    assert result.rejected == 500
    assert not result.batches
    assert result.rejection_ns.max() == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), load=st.sampled_from([0.5, 0.9, 1.3, 2.0]), budget=st.sampled_from([1.1, 1.5, 2.0, 4.0]))
def test_8_nobody_is_dispatched_who_would_be_late(seed, load, budget):
    budget_ns = round(budget * T[B])
    result = simulate(joint(budget_ns), poisson(load * B / T[B] * 1e9, 400, seed=seed), cost_ns, budget_ns=budget_ns)
    assert result.late == 0
    assert result.on_time + result.rejected == 400


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 65, 100, 200])
@pytest.mark.parametrize("budget", [1.0, 1.9, 2.0, 3.5])
def test_9_a_burst_is_served_as_well_as_possible(count, budget):
    budget_ns = round(budget * T[B])
    result = simulate(joint(budget_ns), [0] * count, cost_ns, budget_ns=budget_ns)
    assert result.on_time == optimum([Queued(i, 0) for i in range(count)], cost_ns, B, budget_ns)
    full = [len(batch.requests) for batch in result.batches[:-1]]
    assert full == [B] * len(full)


def test_10_spaced_requests_go_alone_and_a_small_burst_together():
    result = simulate(joint(20 * MS), [i * cost_ns(1) for i in range(50)], cost_ns, budget_ns=20 * MS)
    assert len(result.batches) == 50
    assert set(result.latency_ns) == {cost_ns(1)}
    result = simulate(joint(cost_ns(20)), [0] * 20, cost_ns, budget_ns=cost_ns(20))
    assert [len(batch.requests) for batch in result.batches] == [20]
    assert result.on_time == 20


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), factor=st.sampled_from([2, 7]), shift_ns=st.integers(0, 10**15))
def test_11_decisions_depend_on_proportions_only(seed, factor, shift_ns):
    arrivals = [int(at) for at in poisson(0.9 * B / T[B] * 1e9, 300, seed=seed)]

    def batches(factor, shift_ns):
        cost = lambda size, length=0: factor * cost_ns(size)  # noqa: E731
        result = simulate(joint(26 * MS * factor, cost), [at * factor + shift_ns for at in arrivals], cost, budget_ns=26 * MS * factor)
        return [(batch.requests, batch.start_ns - shift_ns) for batch in result.batches]

    plain = batches(1, 0)
    assert batches(1, shift_ns) == plain
    scaled = batches(factor, 0)
    assert [requests for requests, _ in scaled] == [requests for requests, _ in plain]
    assert all(
        abs(start - factor * before) <= factor for (_, start), (_, before) in zip(scaled, plain, strict=True)
    )  # a gate rounds down to whole ns


@pytest.mark.parametrize("late", ["reject", "serve"])
@pytest.mark.parametrize("buckets", [(), (64, 256)])
def test_11_at_every_step_everybody_is_somewhere(late, buckets):
    seed = random.Random(3)
    scheduler = joint(14 * MS, late=late, length_buckets=buckets)
    added = served = rejected = withdrawn = now_ns = 0
    for _ in range(3000):
        now_ns += seed.randint(0, 2 * MS)
        for _ in range(seed.randint(0, 60)):
            scheduler.add(Queued(added, now_ns, length=seed.randint(1, 256), participant=seed.randint(1, 3), priority=seed.randint(0, 1)))
            added += 1
        if seed.random() < 0.2 and len(scheduler):
            ticket = seed.choice([request.ticket for bucket in scheduler.buckets for request in bucket])
            scheduler.discard(ticket)
            withdrawn += 1
        decision = scheduler.decide(now_ns)
        rejected += len(decision.rejected)
        if isinstance(decision, Run):
            assert decision.size == len(decision.batch) <= B
            served += decision.size
            now_ns += cost_ns(decision.size)
        assert added == served + rejected + withdrawn + len(scheduler)
    assert served
    assert withdrawn
    assert bool(rejected) == (late == "reject")


def flood(scheduler, victim_ms, flood_gap_ns, until_ns, cost, lengths=(100, 10)):
    """One request now and then in one bucket, beside a flood of the other. -> per victim: (enqueued, left, how)."""
    now_ns = ticket = 0
    fates, next_flood_ns, victims = {}, 0, [round(at * MS) for at in victim_ms]
    queue = []
    while now_ns < until_ns:
        while next_flood_ns <= now_ns:
            scheduler.add(Queued(ticket := ticket + 1, next_flood_ns, length=lengths[1], participant=1))
            next_flood_ns += flood_gap_ns
        while victims and victims[0] <= now_ns:
            at = victims.pop(0)
            scheduler.add(Queued(ticket := ticket + 1, at, length=lengths[0], participant=2))
            queue.append(ticket)
            fates[ticket] = (at, None, None)
        decision = scheduler.decide(now_ns)
        for request in decision.rejected:
            if request.ticket in fates:
                fates[request.ticket] = (request.enqueue_ns, now_ns, "rejected")
        if isinstance(decision, Run):
            for request in decision.batch:
                if request.ticket in fates:
                    fates[request.ticket] = (request.enqueue_ns, now_ns, "ran")
            now_ns += cost(decision.size, decision.length)
        else:
            wakes = [next_flood_ns, *victims[:1], *([decision.until_ns] if decision.until_ns is not None else [])]
            now_ns = max(now_ns + 1, min(wakes))
    return fates


@pytest.mark.parametrize("flooded", ["the shorter", "the longer"])
@pytest.mark.parametrize("flood_gap_us", [50, 200, 400])
@pytest.mark.parametrize("budget_ms", [20, 40])
def test_13_everybody_leaves_by_its_deadline_whatever_floods_the_other_bucket(flooded, flood_gap_us, budget_ms):
    cost = lambda size, length: cost_ns(size)  # noqa: E731
    scheduler = joint(budget_ms * MS, cost, length_buckets=(10, 100))
    lengths = (100, 10) if flooded == "the shorter" else (10, 100)
    fates = flood(scheduler, [i * 27.3 for i in range(100)], flood_gap_us * US, 2800 * MS, cost, lengths)
    assert len(fates) == 100
    for enqueued_ns, left_ns, how in fates.values():
        assert left_ns is not None
        assert left_ns <= enqueued_ns + budget_ms * MS
        assert how == "ran", "fair shares: it is its bucket's turn, though the flood has the less laxity"


def test_13_nor_without_a_budget():
    cost = lambda size, length: cost_ns(size)  # noqa: E731
    scheduler = joint(None, cost, length_buckets=(10, 100), max_wait_ns=5 * MS)
    fates = flood(scheduler, [i * 7.3 for i in range(100)], 500 * US, 1000 * MS, cost)
    for enqueued_ns, left_ns, _ in fates.values():
        assert left_ns <= enqueued_ns + 5 * MS + 2 * T[B]


def test_a_wait_that_is_over_is_no_wait():
    scheduler = joint(100 * MS, wait="until_deadline")
    scheduler.add(Queued(1, 0))
    decision = scheduler.decide(0)
    assert decision == Wait(100 * MS - cost_ns(2), [])
    assert isinstance(scheduler.decide(decision.until_ns - 1), Wait)
    assert scheduler.decide(decision.until_ns).reason == Reason.BUDGET


def test_the_last_instant_spares_the_time_to_wake_up():
    scheduler = joint(100 * MS, wait="until_deadline", slack_ns=MS)
    scheduler.add(Queued(1, 0))
    assert scheduler.decide(0).until_ns == 100 * MS - cost_ns(2) - MS
    assert scheduler.decide(100 * MS - cost_ns(2)).size == 1  # it was called late, and nothing is lost


def test_where_nobody_who_comes_during_a_run_can_be_in_time_batches_leave_at_the_last_instant():
    flat = lambda size, length=0: 10 * MS + 50 * US * size  # noqa: E731
    for budget_ms, waits in ((20, True), (21, False)):  # one alone takes 10.05 ms
        scheduler = joint(budget_ms * MS, flat)
        scheduler.add(Queued(1, 0))
        decision = scheduler.decide(0)
        assert isinstance(decision, Wait) == waits
        if waits:
            assert decision.until_ns == budget_ms * MS - flat(2)


def test_outcomes_are_counted_once():
    result = simulate(joint(14 * MS), [0] * 100, cost_ns, budget_ns=14 * MS)
    assert [result.count(outcome) for outcome in Outcome] == [32, 0, 0, 68]
