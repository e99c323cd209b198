"""The simulator, and the schedulers that it compares. Every run ends with the same question: did every request end exactly once?"""

import json
import math

import numpy as np
import pytest

from gpuworker.scheduling import JointBudget, KnownRunTimes, Queued, Reason, Run, SizeOrTimeout, Wait
from gpuworker.testing import FakeClock, FakeGpu, Outcome, mmpp, optimum, poisson, rivals, simulate
from gpuworker.testing.comparison import POLICIES, Setting, compare

MS = 1_000_000
MAX_BATCH_SIZE = 32


def affine(size, length):
    """5 ms for a batch, and a quarter for each request of it."""
    return 5 * MS + size * MS // 4


FULL_NS = affine(MAX_BATCH_SIZE, 0)
CAPACITY_PER_S = MAX_BATCH_SIZE / FULL_NS * 1e9
TABLE = [0, *(affine(size, 0) for size in range(1, MAX_BATCH_SIZE + 1))]


def conserved(simulation):
    """-> the simulation, if every request ended exactly once."""
    answered = sorted(i for batch in simulation.batches for i in batch.requests)
    rejected = np.flatnonzero(simulation.outcome > Outcome.LATE).tolist()
    assert sorted(answered + rejected) == list(range(len(simulation.requests)))
    assert sum(map(simulation.count, Outcome)) == len(simulation.requests)
    assert (simulation.told_ns >= simulation.enqueue_ns).all()
    for before, after in zip(simulation.batches, simulation.batches[1:], strict=False):
        assert before.start_ns < before.end_ns <= after.start_ns
    for batch in simulation.batches:
        assert all(simulation.told_ns[i] == batch.end_ns for i in batch.requests)
        assert all(simulation.requests[i].enqueue_ns <= batch.start_ns for i in batch.requests)
    return simulation


# the simulator


def test_outcomes_and_figures_by_hand():
    # 10 ms runs, at most 2: 0 runs alone until 10, then 1 and 2 until 20, then 3 until 30.
    simulation = conserved(simulate(SizeOrTimeout(2, 0), [0, MS, 2 * MS, 3 * MS], lambda size, length: 10 * MS, budget_ns=19 * MS))
    assert [(batch.start_ns, batch.end_ns, batch.requests) for batch in simulation.batches] == [
        (0, 10 * MS, (0,)), (10 * MS, 20 * MS, (1, 2)), (20 * MS, 30 * MS, (3,))
    ]  # fmt: skip
    assert simulation.outcome.tolist() == [Outcome.ON_TIME] * 3 + [Outcome.LATE]  # number 1 took exactly 19 ms
    assert simulation.latency_ns.tolist() == [10 * MS, 19 * MS, 18 * MS, 27 * MS]
    assert simulation.rejection_ns.tolist() == []
    assert (simulation.on_time, simulation.late, simulation.rejected, simulation.goodput) == (3, 1, 0, 0.75)
    assert simulation.mean_latency_ns == 18.5 * MS
    assert simulation.latency_percentile_ns(50) == 18.5 * MS
    assert simulation.latency_percentile_ns(100) == 27 * MS
    assert (simulation.mean_batch_size, simulation.busy_share, simulation.span_ns) == (4 / 3, 1.0, 30 * MS)
    assert simulation.reasons == {Reason.AGE: 2, Reason.FULL: 1}


def test_a_budget_of_its_own_goes_before_the_common_one():
    requests = [Queued(7, 0, budget_ns=4), Queued(7, 0, budget_ns=5), Queued(7, 0)]
    simulation = conserved(simulate(SizeOrTimeout(4, 0), requests, lambda size, length: 5, budget_ns=3))
    assert simulation.outcome.tolist() == [Outcome.LATE, Outcome.ON_TIME, Outcome.LATE]
    assert [request.ticket for request in simulation.requests] == [0, 1, 2]


class Script:
    """A policy that says what it is told to, and remembers what it was asked."""

    def __init__(self, *decisions):
        self.decisions, self.asked, self.observed = list(decisions), [], []

    def decide(self, queue, now_ns):
        self.asked.append((now_ns, len(queue)))
        return self.decisions.pop(0)

    def observe(self, batch, started_ns, ended_ns):
        self.observed.append((len(batch), started_ns, ended_ns))


def test_the_scheduler_is_asked_at_arrivals_at_its_own_times_and_after_batches():
    policy = Script(Wait(50), Wait(60), Run(2, Reason.AGE), Run(1, Reason.AGE))
    conserved(simulate(policy, [10, 20, 65], lambda size, length: 30))
    assert policy.asked == [(10, 1), (20, 2), (60, 2), (90, 1)]
    assert policy.observed == [(2, 60, 90), (1, 90, 120)]


def test_who_is_rejected_at_dispatch_is_told_then():
    queue = [Queued(i, at) for i, at in enumerate((10, 20))]
    policy = Script(Wait(None), Wait(20, [queue[0]]), Wait(25), Run(1, Reason.AGE))
    simulation = conserved(simulate(policy, [10, 20], lambda size, length: 30))
    assert simulation.outcome.tolist() == [Outcome.REJECTED_AT_DISPATCH, Outcome.ON_TIME]
    assert simulation.told_ns.tolist() == [20, 55]
    assert policy.asked == [(10, 1), (20, 2), (20, 1), (25, 1)]  # having rejected something it may be asked again at once
    assert simulation.rejection_ns.tolist() == [10]


def test_admission_is_asked_at_each_arrival_with_the_end_of_the_running_batch():
    asked = []

    def admit(request, now_ns, busy_until_ns):
        asked.append((request.ticket, now_ns, busy_until_ns))
        return now_ns >= busy_until_ns

    simulation = conserved(simulate(SizeOrTimeout(4, 0), [5, 20, 35, 36], lambda size, length: 30, admit=admit))
    assert asked == [(0, 5, 5), (1, 20, 35), (2, 35, 35), (3, 36, 65)]
    assert simulation.outcome.tolist() == [Outcome.ON_TIME, Outcome.REJECTED_AT_ENQUEUE, Outcome.ON_TIME, Outcome.REJECTED_AT_ENQUEUE]
    assert simulation.told_ns.tolist() == [35, 20, 65, 36]


def test_sizes_and_lengths_are_padded_and_cost_so():
    costs = []

    def cost_ns(size, length):
        costs.append((size, length))
        return 10

    requests = [Queued(i, 0, length=length) for i, length in enumerate((3, 5, 9))]
    simulation = conserved(simulate(SizeOrTimeout(8, 0), requests, cost_ns, length_buckets=(4, 8, 12), allowed_batch_sizes=(1, 4, 8)))
    assert (simulation.batches[0].padded_size, simulation.batches[0].padded_length) == (4, 12)
    assert set(costs) == {(4, 12)}
    assert simulation.padding == 48 / 17


def test_the_schedulers_own_padding_is_used():
    scheduler = JointBudget(KnownRunTimes(lambda size, length: length, 8), max_batch_size=8, budget_ns=100, length_buckets=(16, 32))
    simulation = conserved(simulate(scheduler, [Queued(0, 0, length=20)], lambda size, length: length, budget_ns=100))
    assert simulation.batches[0].padded_length == simulation.told_ns[0] == 32


class Loser(Script):
    """A scheduler with a queue that loses the first request."""

    def __len__(self):
        return 0

    def add(self, request):
        pass


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (Script(Run(1, Reason.AGE), Run(1, Reason.AGE, [Queued(0, 0)])), "ended twice: ON_TIME, then ON_TIME"),
        (Script(Run(1, Reason.AGE, rejected=[Queued(0, 0)])), "ended twice: REJECTED_AT_DISPATCH, then ON_TIME"),
        (Script(Wait(3), Wait(3)), "leaves 2 requests waiting for a time that has passed"),
        (Script(Wait(None)), "leaves 2 requests waiting for ever"),
        (Loser(), "2 requests were lost, the first of them number 0"),
    ],
)
def test_a_scheduler_that_does_not_do_its_work_is_found_out(scheduler, message):
    with pytest.raises(AssertionError, match=message):
        simulate(scheduler, [0, 0], lambda size, length: 1)


def test_arrivals_out_of_order_are_refused_and_none_are_fine():
    with pytest.raises(ValueError, match="5 ns comes after 6 ns"):
        simulate(SizeOrTimeout(2, 0), [6, 5], affine)
    assert conserved(simulate(SizeOrTimeout(2, 0), [], affine)).goodput == 1.0


def test_noise_is_the_same_for_the_same_seed_and_has_mean_one():
    def runs(seed, noise=0.3):
        clock = FakeClock()
        gpu = FakeGpu(clock, lambda size, length: MS, noise, seed)
        return np.diff([0, *(gpu.run(1) for _ in range(4000))])

    assert (runs(1) == runs(1)).all()
    assert (runs(1) != runs(2)).any()
    assert runs(1).mean() == pytest.approx(MS, rel=0.02)
    assert np.log(runs(1)).std() == pytest.approx(0.3, rel=0.05)
    assert set(runs(1, noise=0)) == {MS}


def test_figures_are_json_also_when_nothing_was_answered():
    simulation = conserved(simulate(SizeOrTimeout(2, 0), [0, 1], affine, admit=lambda *_: False))
    assert math.isnan(simulation.mean_latency_ns)
    figures = json.loads(json.dumps(simulation.to_dict(), allow_nan=False))
    assert figures["rejected_at_enqueue"] == 2
    assert figures["mean_latency_ms"] is None


# the schedulers


@pytest.fixture(params=["poisson", "mmpp"])
def arrivals(request):
    return {"poisson": poisson, "mmpp": mmpp}[request.param](0.95 * CAPACITY_PER_S, 3000, seed=5)


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_ends_every_request_once(policy, arrivals, noise):
    setting = Setting(affine, MAX_BATCH_SIZE, 2 * FULL_NS, noise=noise)
    simulation = conserved(setting.simulate(policy, [Queued(i, at) for i, at in enumerate(arrivals.tolist())]))
    assert all(len(batch.requests) <= MAX_BATCH_SIZE for batch in simulation.batches)
    if policy in ("clockwork", "nexus", "edf-head", "ours") and not noise:
        assert not simulation.late  # they run only what they know to be in time


@pytest.mark.parametrize(
    ("process", "budgets", "load", "at_least"),
    [(poisson, 2, 1.0, 0.99), (mmpp, 2, 0.8, 0.985), (poisson, 1.2, 0.8, 0.97)],
    ids=["2T", "bursts", "1.2T"],
)
def test_ours_comes_near_the_optimum_where_the_obvious_rule_collapses(process, budgets, load, at_least):
    budget_ns = round(budgets * FULL_NS)
    for seed in (1, 2):
        arrivals = process(load * CAPACITY_PER_S, 8000, seed=seed)
        best = optimum(arrivals, affine, MAX_BATCH_SIZE, budget_ns)
        ours = JointBudget(KnownRunTimes(affine, MAX_BATCH_SIZE), max_batch_size=MAX_BATCH_SIZE, budget_ns=budget_ns)
        on_time = [
            conserved(simulate(scheduler, arrivals, affine, budget_ns=budget_ns)).on_time
            for scheduler in (ours, rivals.Clockwork(TABLE, budget_ns), rivals.EdfHead(TABLE, budget_ns))
        ]
        assert max(on_time) <= best
        assert on_time[0] >= at_least * best
        assert on_time[1] >= at_least * best
        assert on_time[2] < 0.85 * best


def queue(*enqueue_ns):
    return [Queued(i, at) for i, at in enumerate(enqueue_ns)]


def test_clockwork_gives_up_the_head_for_a_larger_batch():
    policy, waiting = rivals.Clockwork([0, 6, 7, 8], 10), queue(0, 1, 5, 5)
    assert policy.decide(waiting, 3) == Run(3, Reason.OVERLOAD, waiting[1:], waiting[:1])  # three would end at 11: the head is due at 10
    assert policy.decide(waiting, 2) == Run(3, Reason.FULL, waiting[:3], [])
    assert policy.decide(waiting[:1], 5) == Wait(None, waiting[:1])


def test_edf_head_shrinks_the_batch_to_what_the_head_needs():
    policy, waiting = rivals.EdfHead([0, 6, 7, 8], 10), queue(0, 1, 5, 5)
    assert policy.decide(waiting, 3) == Run(2, Reason.AGE, waiting[:2], [])
    assert policy.decide(waiting, 5) == Run(1, Reason.OVERLOAD, waiting[1:2], waiting[:1])


def test_reject_expired_drops_only_what_has_expired():
    policy, waiting = rivals.RejectExpired([0, 6, 7, 8], 10, max_wait_ms=5e-6), queue(0, 9, 9)
    assert policy.decide(waiting, 10) == Run(3, Reason.FULL, waiting, [])
    assert policy.decide(waiting, 11) == Wait(14, waiting[:1])
    assert policy.decide(waiting, 14) == Run(2, Reason.OVERLOAD, waiting[1:], waiting[:1])


def test_clipper_grows_by_one_and_shrinks_by_a_tenth():
    policy, waiting = rivals.ClipperAimd([0] * 33, 10), queue(*range(40))
    sizes = []
    for took in [10] * 12 + [11, 11, 10]:
        size = policy.decide(waiting, 40).size
        sizes.append(size)
        policy.observe(waiting[:size], 40, 40 + took)
    assert sizes == [*range(1, 13), 13, 11, 10]


def test_clipper_on_end_to_end_latency_falls_to_batches_of_one():
    arrivals = poisson(CAPACITY_PER_S, 3000, seed=1)
    own, end_to_end = (
        conserved(simulate(rivals.ClipperAimd(TABLE, 2 * FULL_NS, kind), arrivals, affine, budget_ns=2 * FULL_NS)) for kind in (False, True)
    )
    assert own.mean_batch_size > 20
    assert end_to_end.mean_batch_size < 1.5


def test_bentoml_learns_the_line_and_then_drops_for_the_whole_queue():
    policy = rivals.BentoMl(TABLE, 26 * MS)
    for size in (1, 4, 9, 16):
        policy.observe([Queued(0, 0)] * size, 0, affine(size, 0))
    waiting = queue(*[0] * 40)  # as one batch they would take 15 ms
    assert policy.decide(waiting, 10 * MS).rejected == []
    assert policy.decide(waiting, 12_100_000).rejected == waiting[:5]  # with 36 of them it would end at 26.1 ms


def test_nexus_plans_smaller_batches_when_requests_come_slowly():
    planned = []
    for gap_ns in (30 * MS, 5 * MS, MS, MS // 10):
        policy = rivals.NexusWindow(TABLE, 2 * FULL_NS)
        waiting = queue(*range(0, 1000 * gap_ns, gap_ns))
        planned.append(policy.decide(waiting, waiting[-1].enqueue_ns).size)
    assert planned == [1, 4, 16, 32]  # T(b) + b gaps <= 26 ms: 6 + 20, 9 + 16


def test_a_forecast_rejects_at_once_what_dispatch_would_reject_later():
    requests = [Queued(i, at) for i, at in enumerate(poisson(1.3 * CAPACITY_PER_S, 4000, seed=6).tolist())]
    on, off = (conserved(Setting(affine, MAX_BATCH_SIZE, 3 * FULL_NS, admission=choice).simulate("ours", requests)) for choice in ("on", "off"))
    assert on.count(Outcome.REJECTED_AT_DISPATCH) == 0 == off.count(Outcome.REJECTED_AT_ENQUEUE)
    assert not on.rejection_ns.any()
    assert np.median(off.rejection_ns) > FULL_NS
    assert on.goodput == pytest.approx(off.goodput, abs=0.01)


# comparisons


def test_a_comparison_has_the_optimum_as_its_ceiling():
    setting = Setting(affine, MAX_BATCH_SIZE, 2 * FULL_NS)
    requests = [Queued(i, at) for i, at in enumerate(poisson(CAPACITY_PER_S, 2000, seed=2).tolist())]
    compared = compare(setting, requests, ["ours", "eager"], 1.0, CAPACITY_PER_S)
    assert 0.98 < compared.ratio("ours") <= 1
    assert json.loads(json.dumps(compared.to_dict(), allow_nan=False))["policies"]["eager"]["requests"] == 2000


def test_there_is_no_ceiling_with_noise_or_lengths():
    requests = [Queued(i, 6 * i * MS, length=i + 1) for i in range(20)]
    setting = Setting(lambda size, length: MS + size * length, 8, 10 * MS, longest=20)
    assert setting.optimum(requests) is None
    assert Setting(affine, 8, 10 * MS, longest=20).optimum(requests) == 20
    assert Setting(affine, 8, 10 * MS, noise=0.1).optimum(requests) is None


def test_lengths_are_planned_with_the_longest_by_who_does_not_know_them():
    setting = Setting(lambda size, length: size * length * MS, 4, 30 * MS, longest=8, length_buckets=(5, 10))
    assert setting.table_ns == [0, 10 * MS, 20 * MS, 30 * MS, 40 * MS]
    requests = [Queued(i, 0, length=5) for i in range(8)]
    conserved(setting.simulate("clockwork", requests))
    assert conserved(setting.simulate("ours", requests)).on_time == 6  # 4 until 20, and 2 until 30


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("limit", [{"length_buckets": (4, 6)}, {"max_batch_tokens": 6}])
def test_what_is_too_long_is_refused_at_enqueue_and_moves_nothing_else(policy, limit):
    setting = Setting(lambda size, length: (5 + size) * MS, 4, 30 * MS, longest=9, **limit)
    assert setting.longest == 6
    requests = [Queued(i, i * MS, length=1 + i % 9) for i in range(90)]
    simulation = conserved(setting.simulate(policy, requests))
    refused = [request.length > 6 for request in requests]
    assert (simulation.outcome[refused] == Outcome.REJECTED_AT_ENQUEUE).all()
    assert simulation.told_ns[refused].tolist() == simulation.enqueue_ns[refused].tolist()
    others = [request for request in requests if request.length <= 6]
    assert setting.simulate(policy, others).outcome.tolist() == simulation.outcome[np.logical_not(refused)].tolist()
    assert setting.optimum(requests) == setting.optimum(others) >= simulation.on_time


def test_the_simulated_worker_has_profiled_what_a_worker_would():
    setting = Setting(lambda size, length: size * length, 8, 30 * MS, max_batch_tokens=24, longest=10, allowed_batch_sizes=(2, 4, 8))
    shapes = {(size, length) for size in (2, 4, 8) for length in (1, 2, 4, 8, 16)} - {(8, 4), (4, 8), (8, 8), (4, 16), (8, 16)}
    assert setting.profile((2, 4, 8)) == {(size, length): size * min(length, 10) for size, length in shapes}
    assert set(Setting(affine, 8, 30 * MS).profile((1, 8))) == {(1, 0), (8, 0)}
    assert set(Setting(affine, 8, 30 * MS, longest=9, length_buckets=(5, 12)).profile((1, 8))) == {(1, 5), (8, 5), (1, 12), (8, 12)}


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("buckets", [(), (16, 64, 200)])
def test_no_batch_holds_more_tokens_than_max_batch_tokens_and_every_request_ends_once(policy, buckets, noise):
    def cost_ns(size, length):
        return MS + size * length * MS // 100

    lengths = np.random.default_rng(3).integers(1, 200, 800).tolist()
    requests = [Queued(i, at, length=length) for i, (at, length) in enumerate(zip(mmpp(500, 800, seed=1).tolist(), lengths, strict=True))]
    setting = Setting(cost_ns, 16, 30 * MS, length_buckets=buckets, max_batch_tokens=400, longest=max(lengths), noise=noise)
    simulation = conserved(setting.simulate(policy, requests))
    assert all(batch.padded_size * batch.padded_length <= 400 for batch in simulation.batches)
    most = max(len(batch.requests) for batch in simulation.batches)
    assert most > 2 if policy == "ours" else most <= 2, "who knows lengths can batch more of the short ones"


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_ours_without_buckets_takes_every_request_for_one_of_the_longest(noise):
    requests = [Queued(i, 0, length=1 + 9 * (i == 3)) for i in range(4)]
    setting = Setting(lambda size, length: size * length * MS, 4, 30 * MS + 100, longest=10, noise=noise)
    simulation = conserved(setting.simulate("ours", requests))
    assert [len(batch.requests) for batch in simulation.batches] == [3, 1]  # four long ones would take 40 ms
    assert simulation.on_time == 4


def test_with_noise_ours_learns_a_margin_and_is_seldom_late():
    requests = [Queued(i, at) for i, at in enumerate(poisson(CAPACITY_PER_S, 8000, seed=3).tolist())]
    setting = Setting(affine, MAX_BATCH_SIZE, 2 * FULL_NS, noise=0.1)
    ours, clockwork = (conserved(setting.simulate(name, requests)) for name in ("ours", "clockwork"))
    assert ours.late < clockwork.late / 2
    assert ours.goodput > 0.9
