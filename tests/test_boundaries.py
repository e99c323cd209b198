"""Length boundaries: the search against every other choice, and against what it must hold."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuworker.scheduling.boundaries import BatchCost, best_boundaries, cost_ratio, padding


def padded(lengths, counts, boundaries):
    """Padded tokens, the slow way."""
    return sum(count * min(bound for bound in boundaries if bound >= length) for length, count in zip(lengths, counts, strict=True) if count)


def by_brute_force(lengths, counts, k, top):
    values = sorted({length for length, count in zip(lengths, counts, strict=True) if count})
    return min(padded(lengths, counts, (*chosen, top)) for size in range(k) for chosen in itertools.combinations(values, size))


histograms = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=9).filter(lambda rows: any(count for _, count in rows))


@given(histograms, st.integers(1, 5), st.none() | st.integers(40, 60))
@settings(max_examples=300, deadline=None)
def test_nothing_pads_less(rows, k, top):
    lengths, counts = zip(*rows, strict=True)
    found = best_boundaries(lengths, counts, k, top)
    longest = max(length for length, count in rows if count)
    assert found[-1] == (top or longest)
    assert len(found) <= k
    assert list(found) == sorted(set(found))
    assert padded(lengths, counts, found) == by_brute_force(lengths, counts, k, found[-1])
    assert padding(lengths, counts, found) == pytest.approx(padded(lengths, counts, found) / np.dot(lengths, counts))


def whole_cost(rows, boundaries, batch_cost):
    """Padded tokens and the batches' part, the slow way."""
    total, cost, shorter = sum(count for _, count in rows), 0.0, 0
    for bound in boundaries:
        held = sum(count for length, count in rows if shorter < length <= bound)
        batch_size = min(1 + batch_cost.arrivals * held / total, batch_cost.max_batch_size)
        cost, shorter = cost + held * (bound + batch_cost.tokens / batch_size), bound
    return cost


@given(histograms, st.integers(1, 5), st.builds(BatchCost, st.floats(0, 200), st.floats(0, 50), st.integers(1, 16)))
@settings(max_examples=300, deadline=None)
def test_nothing_costs_less_with_batches_reckoned_in(rows, k, batch_cost):
    lengths, counts = zip(*rows, strict=True)
    found = best_boundaries(lengths, counts, k, batch_cost=batch_cost)
    values = sorted({length for length, count in rows if count})
    choices = [(*chosen, values[-1]) for size in range(k) for chosen in itertools.combinations(values[:-1], size)]
    assert found in choices
    assert whole_cost(rows, found, batch_cost) == pytest.approx(min(whole_cost(rows, choice, batch_cost) for choice in choices))
    assert cost_ratio(lengths, counts, found, batch_cost) == pytest.approx(whole_cost(rows, found, batch_cost) / np.dot(lengths, counts))


def test_the_dearer_the_batches_the_fewer_buckets():
    lengths, counts = range(16, 1025, 16), [1] * 64
    found = [len(best_boundaries(lengths, counts, 8, batch_cost=BatchCost(tokens, 20, 64))) for tokens in (0, 300, 1_000, 3_000, 30_000)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 8
    assert found[-1] == 1
    assert len(set(found)) >= 4


def test_batches_that_never_fill_or_fill_in_every_bucket_do_not_count():
    lengths, counts = range(16, 1025, 16), [1] * 64
    for batch_cost in (BatchCost(1e6, 0, 64), BatchCost(1e6, 1e9, 64), BatchCost(0, 20, 64)):
        assert best_boundaries(lengths, counts, 8, batch_cost=batch_cost) == best_boundaries(lengths, counts, 8)


def test_batches_of_no_traffic_cost_nothing_and_nothing_is_divided_by_zero():
    assert best_boundaries([], [], 4, 512, BatchCost(100, 20, 8)) == (512,)
    assert best_boundaries([1, 2, 3], [1, 2, 1], 3, None, BatchCost(0.1, 2, 8)) == (1, 2, 3)  # "share" -0.5 where no bucket can be


@given(histograms)
@settings(max_examples=50, deadline=None)
def test_more_boundaries_never_pad_more_and_enough_of_them_not_at_all(rows):
    lengths, counts = zip(*rows, strict=True)
    ratios = [padding(lengths, counts, best_boundaries(lengths, counts, k)) for k in range(1, 11)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == 1


def test_one_boundary_is_the_longest_length_and_counts_of_zero_do_not_matter():
    assert best_boundaries([3, 9, 70], [5, 1, 0], 1) == (9,)
    assert best_boundaries([3, 9, 70], [5, 1, 0], 2) == (3, 9)


def test_fewer_lengths_than_boundaries():
    assert best_boundaries([7, 7, 7], [1, 1, 1], 8) == (7,)
    assert best_boundaries([7, 3], [1, 1], 8, top=16) == (3, 7, 16)


def test_fractional_counts_weigh():
    assert best_boundaries([1, 2, 10], [0.5, 4.0, 1.0], 2) == (2, 10)
    assert best_boundaries([1, 9, 10], [0.5, 0.01, 1.0], 2) == (1, 10)


def test_a_top_above_every_length_takes_a_boundary_of_its_own():
    assert best_boundaries([10, 20], [1, 1], 1, top=512) == (512,)
    assert best_boundaries([10, 20], [1, 1], 2, top=512) == (20, 512)
    assert best_boundaries([], [], 4, top=512) == (512,)


def test_a_length_of_zero_is_padded_as_one():
    assert best_boundaries([0], [3], 2) == (1,)
    assert best_boundaries([0, 5], [3, 1], 2) == (1, 5)


@pytest.mark.parametrize(
    ("lengths", "counts", "k", "top", "why"),
    [
        ([5], [1], 0, None, "k is 0"),
        ([5], [1], 2, 4, "above the top"),
        ([], [], 2, None, "no lengths"),
        ([5], [0], 2, None, "no lengths"),
        ([-1], [1], 2, None, "negative"),
    ],
)
def test_what_cannot_be_done_is_said(lengths, counts, k, top, why):
    with pytest.raises(ValueError, match=why):
        best_boundaries(lengths, counts, k, top)


@pytest.mark.parametrize("longest", [600, 5_000, 200_000, 2**31, 2**40])
def test_any_range_is_searched_in_little_memory_and_every_length_is_held(longest):
    lengths = np.unique(np.geomspace(1, longest, 20_000).round().astype(np.int64))
    counts = 1 + lengths % 7
    tracemalloc.start()
    found = best_boundaries(lengths, counts, 8)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 40e6  # with every length as a candidate 3e9, and minutes
    assert found[-1] == longest
    assert len(found) == 8
    assert set(found) <= set(lengths.tolist())
    assert padding(lengths, counts, found) < padding(lengths, counts, [math.ceil(longest ** (step / 7)) for step in range(8)]) < 30


def test_merged_neighbours_cost_little():
    lengths = np.arange(1, 1500)  # too many for an exact search
    counts = np.where(lengths % 2, 1, 1 + 100 * (lengths > 1000))  # most requests are not the first of their bin
    found = best_boundaries(lengths, counts, 8)
    moved = (sorted({*found[:at], to, *found[at + 1 :]}) for at in range(7) for to in range(max(found[at] - 40, 1), found[at] + 40))
    assert padding(lengths, counts, found) < 1.002 * min(padding(lengths, counts, boundaries) for boundaries in moved)


def test_padding_counts_by_hand():
    assert padding([1, 4, 5], [2, 1, 1], (4, 8)) == (4 + 4 + 4 + 8) / (1 + 1 + 4 + 5)
    assert padding([1, 4, 99], [2, 1, 0], (4, 8)) == 2.0
    with pytest.raises(ValueError, match="above the last"):
        padding([9], [1], (4, 8))
    with pytest.raises(ValueError, match="no tokens"):
        padding([], [], (4, 8))
