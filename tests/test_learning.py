"""Learned boundaries: on real lengths, on traffic that stays, changes and alternates, and beside a thread that serves."""

import json
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from gpuworker.scheduling.boundaries import BatchCost, padding
from gpuworker.scheduling.decision import Queued
from gpuworker.scheduling.joint_budget import JointBudget
from gpuworker.scheduling.learning import BoundaryLearner
from gpuworker.scheduling.run_times import KnownRunTimes
from gpuworker.testing import Outcome, simulate

HISTOGRAMS = json.loads((Path(__file__).parent / "data" / "length_histograms.json").read_text())
"""Of the first and the second half of public traces; where they come from is in data/README.md."""


def lognormal(seed, median, sigma=0.7):
    """Endless lengths, as those of prompts are."""
    chance = random.Random(seed)
    while True:
        yield max(1, round(median * chance.lognormvariate(0, sigma)))


def feed(learner, lengths, count):
    for _ in range(count):
        learner.observe(next(lengths))


def settle(learner, lengths, boundaries, rounds, each=500):
    """Boundaries and how often they changed in so many rounds of traffic."""
    changes = 0
    for _ in range(rounds):
        feed(learner, lengths, each)
        proposed = learner.propose(boundaries)
        if proposed is not None:
            boundaries, changes = proposed, changes + 1
    return boundaries, changes


def learner_of(first, second):
    """One that has seen the first half, and knows of both the longest length."""
    learner = BoundaryLearner(8, max_length=max(first["lengths"][-1], second["lengths"][-1]))
    for length, count in zip(first["lengths"], first["counts"], strict=True):
        feed(learner, iter([length] * count), count)
    return learner


@pytest.mark.parametrize(
    ("trace", "target"),
    [("AzureLLMInferenceTrace_code", 1.20), ("AzureLLMInferenceTrace_conv", 1.28), ("mooncake_conversation_trace", 1.32)],
)
def test_eight_boundaries_of_the_first_half_waste_little_in_the_second(trace, target):
    first, second = HISTOGRAMS[trace]
    boundaries = learner_of(first, second).propose()
    assert len(boundaries) == 8
    tokens = padding(second["lengths"], second["counts"], boundaries) * np.dot(second["lengths"], second["counts"])
    assert 1 < tokens / second["tokens"] <= target


def test_where_batches_are_dear_their_cost_saves_what_eight_boundaries_would_lose():
    """A batch costs as much as 20 requests, and the budget is two full batches: eight queues do not fill."""
    first, second = HISTOGRAMS["AzureLLMInferenceTrace_code"]
    learner, chance = learner_of(first, second), random.Random(1)
    mean = second["tokens"] / sum(second["counts"])
    token_ns = 0.25e6 / mean
    batch_ns, max_batch_size = 20 * 0.25e6, 32
    full_ns = batch_ns + 0.25e6 * max_batch_size
    budget_ns = round(2 * full_ns + token_ns * learner.max_length)
    per_ns = 0.5 * max_batch_size / full_ns
    enqueue_ns, requests = 0.0, []
    for ticket, length in enumerate(chance.choices(second["lengths"], second["counts"], k=1500)):
        enqueue_ns += chance.expovariate(per_ns)
        requests.append(Queued(ticket, round(enqueue_ns), length=length))

    def goodput(boundaries):
        scheduler = JointBudget(KnownRunTimes(cost_ns, max_batch_size), max_batch_size=max_batch_size, budget_ns=budget_ns, length_buckets=boundaries)
        done = simulate(scheduler, requests, cost_ns, budget_ns=budget_ns)
        assert sum(done.count(outcome) for outcome in Outcome) == len(requests)
        return done.goodput

    def cost_ns(size, length):
        return round(batch_ns + size * length * token_ns)

    batch_cost = BatchCost(batch_ns / token_ns, per_ns * budget_ns, max_batch_size)
    eight = learner.propose()
    fewer = learner.propose(eight, batch_cost)
    assert len(fewer) < len(eight) == 8
    assert learner.propose(fewer, batch_cost) is None
    assert goodput(fewer) > goodput(eight) + 0.15


def test_nothing_is_proposed_of_too_little():
    learner = BoundaryLearner(4, min_count=100)
    feed(learner, iter([50] * 99), 99)
    assert learner.propose() is None
    feed(learner, iter([50] * 2), 2)
    assert learner.propose() == (64,)


def test_every_length_is_counted_in_the_bin_that_holds_it_tightly():
    for length in [*range(1, 5000), *(2**n + d for n in range(12, 32) for d in (-1, 0, 1))]:
        learner = BoundaryLearner(1)
        learner.observe(length)
        ends, counts = learner.histogram()
        assert counts.tolist() == [1]
        assert length <= ends[0] <= max(length + 15, length * 1.016)


def test_lengths_that_are_missing_or_too_long_are_left_out():
    learner = BoundaryLearner(4, max_length=100, min_count=1)
    for length in (0, -5, 101, 2**40):
        learner.observe(length)
    assert learner.propose() is None
    learner.observe(100)
    assert learner.propose() == (100,)


def test_the_last_boundary_is_max_length_or_else_the_longest_ever_seen():
    learners = BoundaryLearner(2, max_length=8192, min_count=10, half_life=20), BoundaryLearner(2, min_count=10, half_life=20)
    for learner in learners:
        learner.observe(3000)
        for _ in range(300):  # then 5 half-lives at a time, until the long one weighs nothing at all
            feed(learner, iter([100] * 100), 100)
            ends, _ = learner.histogram()
        assert ends.tolist() == [112]
    assert learners[0].propose() == (112, 8192)
    assert learners[1].propose() == (112, 3008)


def test_boundaries_that_cannot_hold_the_traffic_are_replaced_whatever_the_gain():
    learner = BoundaryLearner(2, min_gain=0.9, min_count=10)
    for length in [100] * 1000 + [500]:
        learner.observe(length)
    assert learner.propose((112, 256)) == (112, 512)
    assert learner.propose((112, 512)) is None


def test_a_gain_below_the_threshold_changes_nothing_and_one_above_it_does():
    for min_gain, changed in ((0.25, True), (0.35, False)):
        learner = BoundaryLearner(2, max_length=256, min_gain=min_gain)
        feed(learner, iter([100] * 2000), 2000)
        assert learner.propose() == (112, 256)
        assert (learner.propose((160, 256)) == (112, 256)) == changed  # 112 instead of 160: 30 % less


def test_steady_traffic_settles_close_to_the_best():
    learner, traffic = BoundaryLearner(8, max_length=8192, half_life=20_000), lognormal(1, 800)
    boundaries, first_changes = settle(learner, traffic, (), rounds=40)
    boundaries, later_changes = settle(learner, traffic, boundaries, rounds=200)
    assert 1 <= first_changes <= 4
    assert later_changes <= 1
    ends, weights = learner.histogram()
    assert padding(ends, weights, boundaries) < 1.03 * padding(ends, weights, learner.propose())


def test_boundaries_of_little_data_are_refined_for_less_than_the_threshold_and_then_stay():
    learner, traffic = BoundaryLearner(8, max_length=8192), lognormal(1, 800)
    feed(learner, traffic, 1_500)
    rough = learner.propose()
    feed(learner, traffic, 30_000)
    refined = learner.propose(rough)
    ends, weights = learner.histogram()
    assert 0.97 < padding(ends, weights, refined) / padding(ends, weights, rough) < 1
    feed(learner, traffic, 1000)
    assert learner.propose(refined) is None


def test_changed_traffic_is_followed_within_two_half_lives():
    learner = BoundaryLearner(8, max_length=8192, half_life=5_000)
    boundaries, _ = settle(learner, lognormal(1, 200), (), rounds=40)
    fresh = lognormal(2, 3000, 0.3)
    lengths = [min(next(fresh), 8192) for _ in range(2000)]
    before = padding(lengths, np.ones(2000), boundaries)
    boundaries, _ = settle(learner, iter(lengths * 5), boundaries, rounds=20)
    assert padding(lengths, np.ones(2000), boundaries) < 1.2 < before


def test_alternating_traffic_does_not_thrash():
    """Faster than the half-life it is one mixture. Slower, there may be a few changes each time, which pay, but not one with every proposal."""
    kinds = lognormal(1, 200), lognormal(2, 2000)
    for rounds_each, most_changes in ((1, 4), (4, 6)):
        learner, boundaries, changes = BoundaryLearner(8, max_length=16384, half_life=20_000), (), 0
        for turn in range(240 // rounds_each):
            boundaries, more = settle(learner, kinds[turn % 2], boundaries, rounds=rounds_each)
            changes += more
        assert 1 <= changes <= most_changes
    learner, boundaries, changes = BoundaryLearner(8, max_length=16384, half_life=5_000), (), []
    for turn in range(8):
        boundaries, more = settle(learner, kinds[turn % 2], boundaries, rounds=60)
        changes.append(more)
    assert 1 <= max(changes) <= 6


def test_a_thread_that_serves_is_neither_held_up_nor_miscounted():
    learner, proposals, done = BoundaryLearner(8, max_length=4096, half_life=10**12), [], threading.Event()

    def propose():
        while not done.is_set():
            proposals.append(learner.propose())

    proposer = threading.Thread(target=propose)
    proposer.start()
    traffic = lognormal(3, 300)
    feed(learner, iter([min(next(traffic), 4096) for _ in range(100_000)]), 100_000)
    done.set()
    proposer.join()
    assert proposals
    assert learner.histogram()[1].sum() == pytest.approx(100_000, abs=0.1)  # with that half-life next to nothing fades


@pytest.mark.parametrize(
    "wrong", [{"k": 0}, {"half_life": 0}, {"min_gain": 1.0}, {"min_gain": -0.1}, {"min_count": 0}, {"max_length": 0}, {"max_length": 2**33}]
)
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BoundaryLearner(**{"k": 8, **wrong})
