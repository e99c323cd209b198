"""The clairvoyant optimum against brute force: every subset of what is left, in every order."""

import functools
import itertools
import random

import pytest

from gpuworker.scheduling import Queued
from gpuworker.testing import poisson
from gpuworker.testing.optimum import optimum


def brute_force(release, due, table):
    """The most requests in time, whatever batches are formed; table[n - 1]: what a batch of n takes."""

    @functools.cache
    def most(left, free):
        best = 0
        for size in range(1, min(len(table), len(left)) + 1):
            for batch in itertools.combinations(left, size):
                end = max(free, *(release[i] for i in batch)) + table[size - 1]
                if end <= min(due[i] for i in batch):
                    best = max(best, size + most(tuple(i for i in left if i not in batch), end))
        return best

    return most(tuple(range(len(release))), 0)


@pytest.mark.parametrize("seed", range(4))
def test_it_is_what_brute_force_finds(seed):
    chance = random.Random(seed)
    given_up = 0
    for _ in range(50):
        release = sorted(chance.randint(0, 14) for _ in range(chance.randint(1, 7)))
        table = sorted(chance.randint(1, 6) for _ in range(chance.randint(1, 4)))  # affine or not, steps too
        budget = chance.randint(1, 12)
        best = brute_force(tuple(release), tuple(at + budget for at in release), table)
        assert optimum(release, lambda size, length, table=table: table[size - 1], len(table), budget) == best, (release, table, budget)
        given_up += len(release) - best
    assert given_up > 20  # or the instances were too easy


def test_budgets_of_their_own_that_keep_the_order_are_exact_too():
    chance = random.Random(7)
    for _ in range(50):
        release = sorted(chance.randint(0, 14) for _ in range(6))
        due = sorted(at + chance.randint(2, 9) for at in release)
        requests = [Queued(i, at, budget_ns=end - at) for i, (at, end) in enumerate(zip(release, due, strict=True)) if end > at]
        best = brute_force([r.enqueue_ns for r in requests], [r.enqueue_ns + r.budget_ns for r in requests], [3, 4, 4])
        assert optimum(requests, lambda size, length: [3, 4, 4][size - 1], 3, 1) == best


def test_a_burst_leaves_in_full_batches():
    # 10 at once, at most 4 a batch of 5, until 14: 4 + 4 by 10, and nothing is in time after that.
    assert optimum([0] * 10, lambda size, length: 5, 4, 14) == 8
    assert optimum([0] * 10, lambda size, length: 5, 4, 15) == 10


def test_nothing_fits_a_budget_below_the_shortest_run_and_all_of_it_fits_a_light_load():
    assert optimum([0, 5, 9], lambda size, length: 3, 4, 2) == 0
    assert optimum(range(0, 3000, 3), lambda size, length: 3, 4, 3) == 1000
    assert optimum([], lambda size, length: 3, 4, 3) == 0


def test_time_may_be_scaled_and_shifted():
    arrivals = poisson(2000, 1500, seed=3)
    best = optimum(arrivals, lambda size, length: 5_000_000 + 250_000 * size, 16, 15_000_000)
    assert 500 < best < 1500
    assert optimum(arrivals * 7 + 10**15, lambda size, length: 7 * (5_000_000 + 250_000 * size), 16, 7 * 15_000_000) == best


@pytest.mark.parametrize(
    ("requests", "cost", "message"),
    [
        ([Queued(0, 0, budget_ns=9), Queued(1, 1, budget_ns=2)], lambda size, length: 1, "expire in the order of their arrival"),
        ([5, 4], lambda size, length: 1, "arrive in the order of their arrival"),
        ([Queued(0, 0, length=3), Queued(1, 1, length=4)], lambda size, length: length, "do not depend on the requests' lengths"),
        ([0, 1], lambda size, length: 9 - size, "do not fall as a batch grows"),
    ],
)
def test_where_it_would_be_no_bound_it_says_so(requests, cost, message):
    with pytest.raises(ValueError, match=message):
        optimum(requests, cost, 4, 5)
