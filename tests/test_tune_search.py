"""The search for options, on devices that are formulas."""

import random

import pytest

from gpuworker.scheduling import SizeOrTimeout
from gpuworker.testing import costs, poisson, simulate
from gpuworker.tuning.measure import Profile, RunBatchFailed, examples_by_length, measure, spread, stages
from gpuworker.tuning.prediction import Simulator, Traffic, at_load, capacity, most_in_flight
from gpuworker.tuning.recommendation import Impossible, recommend
from gpuworker.tuning.search import Candidate, Space, Trial, best, grid, on_grid, search

MS = 1_000_000


def trial(goodput=0.9, late=0.0, mean_ms=20.0, busy=0.5, **options):
    return Trial(Candidate(**options), goodput, late, mean_ms * MS, busy)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (trial(0.95, mean_ms=50, max_batch_size=4), trial(0.90, mean_ms=20)),
        (trial(late=0.0, mean_ms=50, max_batch_size=4), trial(late=0.05)),
        (trial(mean_ms=19, busy=0.9, max_batch_size=4), trial(mean_ms=20)),
        (trial(busy=0.4, max_batch_size=4), trial(busy=0.5)),
        (trial(max_wait_ms=0.0), trial(max_wait_ms=0.0, wait="until_deadline")),
        (trial(), trial(0.901, mean_ms=19.95, busy=0.495, max_batch_size=4)),
        (trial(max_batch_size=8), trial(max_batch_size=4)),
        (trial(max_batch_size=45), trial(max_batch_size=64)),
        (trial(0.0, mean_ms=1.0), trial(0.0, mean_ms=float("nan"))),
    ],
    ids=[
        "goodput",
        "late",
        "mean",
        "busy",
        "fewer options",
        "chance does not count",
        "room for bursts",
        "no more than is of use",
        "nothing answered",
    ],
)
def test_what_is_better(better, worse):
    assert best([better, worse]) is best([worse, better]) is better


def test_the_best_does_not_depend_on_the_order():
    rng = random.Random(1)
    trials = [trial(rng.choice([0.9, 0.902, 0.904]), 0, rng.choice([20, 20.1, 20.3]), 0.5, max_batch_size=size) for size in range(1, 33)]
    chosen = best(trials)
    for _ in range(20):
        rng.shuffle(trials)
        assert best(trials) is chosen


def hill(peak, seen):
    """Evaluates candidates by how near they are to `peak`."""

    def evaluate(candidate, on_all):
        seen.append((candidate, on_all))
        off = abs(candidate.max_batch_size - peak.max_batch_size) / 100
        off += abs((candidate.max_wait_ms or 0) - (peak.max_wait_ms or 0)) / 100
        off += 0.2 * (candidate.length_buckets != peak.length_buckets) + 0.2 * (candidate.wait != peak.wait)
        return Trial(candidate, max(1 - off, 0), 0, 20 * MS, 0.5)

    return evaluate


@pytest.mark.parametrize(
    "peak",
    [Candidate(), Candidate(45), Candidate(1), Candidate(64, wait="until_deadline"), Candidate(22, length_buckets=(64, 512)), Candidate(16, 6.0)],
)
def test_the_peak_of_a_hill_is_found(peak):
    seen = []
    trials = search(Space(64, 50, ((64, 512), (64, 128, 512))), hill(peak, seen))
    found = trials[0].candidate
    assert abs(found.max_batch_size - peak.max_batch_size) <= 0.05 * peak.max_batch_size
    assert (found.wait, found.length_buckets) == (peak.wait, peak.length_buckets)
    assert abs((found.max_wait_ms or 0) - (peak.max_wait_ms or 0)) <= 1.5
    assert len(seen) == len(set(seen)), "nothing is simulated twice"
    assert len(seen) < 180
    assert len({one.candidate for one in trials}) == len(trials)


@pytest.mark.parametrize("most", [1, 2, 3, 20])
def test_no_candidate_is_larger_than_allowed(most):
    seen = []
    assert search(Space(most, 50), hill(Candidate(64), seen))[0].candidate.max_batch_size == most
    assert {candidate.max_batch_size for candidate, _ in seen} <= set(range(1, most + 1))


def test_options_are_those_that_differ():
    assert Candidate().options() == {}
    assert Candidate(16, 0.0, length_buckets=(8, 64)).options() == {"max_batch_size": 16, "max_wait_ms": 0.0, "length_buckets": (8, 64)}


@pytest.mark.parametrize(
    ("most", "ratio", "sizes"),
    [(1, 2, (1,)), (8, 2, (1, 2, 4, 8)), (20, 2, (1, 2, 4, 8, 16, 20)), (10, 1.5, (1, 2, 3, 4, 6, 9, 10)), (6, 1.25, (1, 2, 3, 4, 5, 6))],
)
def test_grids(most, ratio, sizes):
    assert grid(most, ratio) == sizes


@pytest.mark.parametrize(
    ("goodput_of_2", "mean_of_2", "chosen"),
    [(0.897, 20.9, 2.0), (0.89, 20, 1.5), (0.9, 21.1, 1.5)],
    ids=["costs little", "costs requests", "costs latency"],
)
def test_the_coarsest_grid_that_costs_little(goodput_of_2, mean_of_2, chosen):
    def evaluate(candidate, on_all):
        is_coarsest = candidate.allowed_batch_sizes == grid(32, 2.0)
        return Trial(candidate, goodput_of_2 if is_coarsest else 0.9, 0, (mean_of_2 if is_coarsest else 20) * MS, 0.5)

    assert on_grid(trial(), evaluate).candidate == Candidate(allowed_batch_sizes=grid(32, chosen))


def test_no_grid_where_every_one_costs_much():
    assert on_grid(trial(), lambda candidate, on_all: Trial(candidate, 0.8, 0, 20 * MS, 0.5)) is None


def simulator(formula, budget_ms=50):
    return Simulator(costs.formula(formula), (1, 2, 4, 8, 16, 32, 64), 0.0, budget_ms * MS, 0)


def recommended(formula, rate_per_s, budget_ms=50.0, lengths=(), most=64, pads=False, seed=0):
    cost_ns = costs.formula(formula)
    runs = {(size, length): [cost_ns(size, length)] for sizes in stages(most) for size in sizes for length in spread(lengths) or [0]}
    traffic = Traffic.of_rate(rate_per_s, 2000, lengths, seed)
    return recommend(Profile(runs), traffic, budget_ms, max_batch_size=most, target=0.99, pads=pads, seed=seed)


def test_a_light_load_needs_no_options():
    found = recommended("5+0.25b", 50)
    assert found.options == {"latency_budget_ms": 50.0}
    assert found.predicted.goodput == 1
    assert found.capacity_per_s > 1000


def test_what_fixed_costs_dominate_gets_large_batches():
    assert recommended("20+0.01b", 2500, budget_ms=60).options["max_batch_size"] > 40


def test_lengths_that_cost_get_buckets():
    lengths = (10,) * 9 + (1000,)
    found = recommended("2+0.01t", 300, budget_ms=60.0, lengths=lengths)
    assert found.options["length_buckets"] == (10, 1000)
    assert "length_buckets" not in recommended("2+0.01b", 300, budget_ms=60.0, lengths=lengths).options


def test_the_same_seed_gives_the_same_recommendation():
    first, again, other = (recommended("5+0.25b", 1500, seed=seed).to_dict() for seed in (3, 3, 4))
    assert first == again != other


def test_a_handler_that_pads_gets_sizes():
    assert recommended("20+0.01b", 100, pads=True).options["allowed_batch_sizes"] == (1, 2, 4, 8, 16, 32)
    assert "allowed_batch_sizes" not in recommended("20+0.01b", 100).options


def test_many_on_their_way_need_slots():
    found = recommended("100+0.01b", 4000, budget_ms=400.0)
    assert found.options["capacity"] >= 2 * most_in_flight(found.predicted) > 256


def test_a_budget_that_nothing_can_meet():
    with pytest.raises(Impossible, match=r"one request alone takes 5\.25 ms"):
        recommended("5+0.25b", 50, budget_ms=5.0)


def test_what_is_predicted_was_not_chosen_by():
    found = recommended("5+0.25b", 100)
    traffic = Traffic.of_rate(100, 2000, (), 0)
    assert [one.enqueue_ns for one in found.predicted.requests] == [one.enqueue_ns for one in traffic.held_out]
    assert traffic.held_out != traffic.chosen_by


def test_capacity_is_where_goodput_crosses_the_target():
    run, requests = simulator("10+0.5b"), Traffic.of_rate(100, 2000, (), 0).held_out
    most_per_s = capacity(run, Candidate(), requests, 100, 0.9)
    for factor, is_enough in ((0.97, True), (1.03, False)):
        assert (run.run(Candidate(), at_load(requests, most_per_s * factor / 100)).goodput >= 0.9) == is_enough
    assert capacity(simulator("60+1b"), Candidate(), requests, 100, 0.9) is None


def test_requests_in_flight():
    arrivals = [0, 1 * MS, 2 * MS, 50 * MS]
    simulation = simulate(SizeOrTimeout(1, 0), arrivals, lambda size, length: 10 * MS)
    assert most_in_flight(simulation) == 3


class Clock:
    """Moves only by what is run."""

    def __init__(self, cost_ns, fails_above=1000):
        self.now_ns, self.batches = 0, []
        self._cost_ns, self._fails_above = cost_ns, fails_above

    def __call__(self):
        return self.now_ns

    def run_batch(self, requests):
        if len(requests) > self._fails_above:
            raise MemoryError("too many")
        self.batches.append(len(requests))
        self.now_ns += self._cost_ns(len(requests), max(requests))
        return requests


def test_the_profile_has_every_size_and_predicts_all_others():
    cost_ns = costs.formula("5+0.25b+0.01t")
    clock = Clock(cost_ns)
    profile = measure(clock.run_batch, {10: [10], 100: [100, 80]}, 20, 60, clock)
    assert profile.sizes == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert profile.lengths == [10, 100]
    assert profile.noise == 0
    predicted_ns = profile.cost(20)
    for size in range(1, 21):
        for length in (10, 55, 100):
            assert predicted_ns(size, length) == pytest.approx(cost_ns(size, length), rel=0.001)


def test_without_time_for_all_the_ends_come_first():
    clock = Clock(lambda size, length: size * MS)
    assert measure(clock.run_batch, {0: [0]}, 16, 0.12, clock).sizes == [1, 8, 16]
    with pytest.raises(TimeoutError, match="not even time"):
        measure(clock.run_batch, {0: [0]}, 16, 0.02, clock)


def test_a_failure_names_the_size():
    clock = Clock(lambda size, length: size * MS, fails_above=8)
    with pytest.raises(RunBatchFailed, match="run_batch failed with 16 requests: MemoryError: too many"):
        measure(clock.run_batch, {0: [0]}, 16, 60, clock)


def test_noise_is_how_much_runs_vary_without_outliers():
    profile = Profile({(1, 0): [100, 110, 90, 100, 5000], (2, 0): [200, 220, 180, 200, 200]})
    assert 0.05 < profile.noise < 0.1


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [((), []), ((5, 5, 3), [3, 5]), (range(1, 7), [1, 2, 3, 4, 5, 6]), ([1, 2, 4, 8, 16, 32, 1024], [1, 4, 16, 32, 1024])],
)
def test_lengths_are_spread(lengths, chosen):
    assert spread(lengths) == chosen


def test_examples_are_kept_by_length_or_made():
    assert examples_by_length(["a", "bb", "cc"], len, None, [1, 2]) == {1: ["a"], 2: ["bb", "cc"]}
    assert examples_by_length(["a", "bb"], len, lambda n: "x" * n, [3, 9]) == {3: ["xxx"], 9: ["x" * 9]}
    assert examples_by_length(["a", "bb"], len, None, []) == {0: ["a", "bb"]}
    assert examples_by_length(["a"], None, None, [3]) == {0: ["a"]}
    assert examples_by_length([], None, None, []) == {}


def test_traffic_at_a_rate_is_poisson_with_the_lengths_given():
    traffic = Traffic.of_rate(100, 1001, (3, 3, 7), 5)
    assert [len(half) for half in traffic[:2]] == [500, 501]
    assert [one.enqueue_ns for one in traffic.chosen_by] == poisson(100, 500, 5).tolist()
    assert set(traffic.lengths.tolist()) == {3, 7}
    assert 0.55 < (traffic.lengths == 3).mean() < 0.78
    assert traffic.longest == 7
