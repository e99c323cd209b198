"""Learned run times: exact where they are constant, monotone whatever is observed, moved by changes and not by outliers."""

import itertools
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuworker.scheduling import cost_model
from gpuworker.scheduling.cost_model import DOUBTED_AFTER, MOST_SHAPES, WINDOW, CostModel
from gpuworker.scheduling.isotonic import isotonic, pava, theil_sen
from gpuworker.scheduling.margin import HIGHEST, Margin

MS = 1_000_000
SIZES = range(1, 33)


def affine(size, length=0):
    return 5 * MS + size * (250_000 + 1_000 * length)


def learned(shapes, cost=affine, times=3, **options):
    model = CostModel(32, **options)
    for size, length in shapes:
        model.seed(size, length, [cost(size, length)] * times)
    return model


def table_of(cost, length=0, most=32):
    return [0, *(cost(size, length) for size in range(1, most + 1))]


# ---- what is known, and what follows from it


def test_nothing_known_looks_feasible_and_the_second_batch_teaches():
    model = CostModel(4)
    assert model.table(0) == [0] * 5
    assert model.predicted(3, 0) == 0
    model.observe(4, 0, 900 * MS)  # the first batch of a process may have compiled something
    assert model.table(0) == [0] * 5
    model.observe(2, 0, 6 * MS)
    assert model.table(0) == [0, 3 * MS, 6 * MS, 6 * MS, 6 * MS]  # no more than is known: proportional downwards, constant upwards


def test_constant_run_times_are_predicted_to_the_nanosecond_without_a_margin():
    chance = random.Random(1)
    model = CostModel(32)
    for _ in range(500):
        size = chance.choice(SIZES)
        model.observe(size, 0, affine(size))
    assert model.margin == 1
    assert model.table(0) == table_of(affine)


def test_run_times_that_are_no_line_are_exact_where_seen():
    def curved(size, length):
        return 3 * MS + size**3 * 7 + length * size * length + (9 * MS if size > 16 else 0)

    chance = random.Random(2)
    model = CostModel(32)
    for _ in range(3000):
        size, length = chance.choice(SIZES), chance.choice([64, 128, 512])
        model.observe(size, length, curved(size, length))
    assert model.margin == 1
    for length in (64, 128, 512):
        assert model.table(length) == table_of(curved, length)


def test_two_sizes_make_the_line_for_all():
    assert learned([(3, 0), (20, 0)]).table(0) == table_of(affine)


def test_between_two_sizes_it_is_linear_even_where_the_line_is_elsewhere():
    model = CostModel(32)
    for size, run_ns in ((1, 10), (2, 11), (4, 13), (8, 1000), (16, 2000), (32, 2016)):
        model.seed(size, 0, [run_ns] * 3)
    assert model.table(0)[8:17] == list(range(1000, 2001, 125))


def test_lengths_not_seen_lie_between_their_neighbours_or_on_the_line():
    def by_tokens(size, length):
        return 5 * MS + 1000 * size * length

    model = learned([(size, length) for size in (1, 8, 32) for length in (64, 128)], by_tokens)
    for length in (16, 64, 100, 128, 300):
        assert model.table(length) == table_of(by_tokens, length)


def test_a_length_seen_at_one_size_takes_its_other_sizes_from_what_surrounds_it():
    model = learned([(size, 128) for size in SIZES])
    model.seed(8, 256, [affine(8, 256)] * 3)
    table = model.table(256)
    assert table[8] == affine(8, 256)
    assert all(longer >= shorter for longer, shorter in zip(table, model.table(128), strict=True))


def test_a_shorter_length_is_monotone_where_its_neighbour_is_flatter_than_the_line():
    model = CostModel(32)
    for size, length, run_ns in ((1, 64, 10), (32, 64, 10), (1, 128, 10), (32, 128, 400)):
        model.seed(size, length, [run_ns * MS])
    table = model.table(8)
    assert list(table) == sorted(table)
    assert 0 < table[1] < 10 * MS


def test_run_times_of_unknown_lengths_say_nothing_of_how_they_grow_with_length():
    model = learned([(size, 0) for size in (1, 8, 32)])
    for length in (1, 16, 512, 100_000):
        assert model.table(length) == table_of(affine)


def test_once_lengths_are_known_run_times_of_unknown_ones_do_not_count_for_them():
    unknown = [(size, 0) for size in (1, 8, 32)]
    model = learned([(size, length) for size in (1, 8, 32) for length in (64, 128)])
    tables = {length: list(model.table(length)) for length in (1, 16, 64, 100, 128, 300)}
    for cost in (lambda size, length: 900 * MS * size, lambda size, length: 1):  # however long or short those took
        both = learned(unknown, cost)
        for size, length in itertools.product((1, 8, 32), (64, 128)):
            both.seed(size, length, [affine(size, length)] * 3)
        assert {length: list(both.table(length)) for length in tables} == tables
        assert both.table(0) == pytest.approx(table_of(cost), abs=1), "they do for batches of unknown lengths"


def test_a_batch_of_unknown_lengths_may_hold_the_longest_request():
    model = learned([(size, length) for size in (1, 8, 32) for length in (16, 64, 512)])
    assert model.table(0) == table_of(affine, 512)
    for _ in range(3):
        model.observe(1, 0, affine(1, 512) // 2)
    assert model.table(0)[1] == affine(1, 512) // 2
    assert model.table(0)[32] == pytest.approx(affine(32, 512) / 2, rel=0.1), "other sizes cost as much more as with the longest"


def test_a_clock_that_stands_still_or_goes_back_is_no_error():
    model = CostModel(4)
    for run_ns in (0, 0, 0, -7, 0, 10**30):
        model.observe(2, 0, run_ns)
    assert model.table(0) == [0, 0, 1, 1, 1]


def test_padded_sizes_make_a_step_function():
    model = CostModel(24, allowed_batch_sizes=[4, 16, 32])
    for size in (3, 4, 16, 32):
        model.observe(size, 0, affine(size if size > 4 else 4))
    model.observe(32, 0, affine(32))
    assert model.table(0) == [0] + [affine(4)] * 4 + [affine(16)] * 12 + [affine(32)] * 8


def test_a_most_that_is_not_an_allowed_size_is_a_size_of_its_own():
    model = CostModel(6, allowed_batch_sizes=[2, 4])
    for size in (2, 4, 6):
        model.seed(size, 0, [affine(size)])
    assert model.table(0) == [0, *(affine(size) for size in (2, 2, 4, 4, 6, 6))]


@pytest.mark.parametrize("size", [-1, 0, 9, 16, 10**9])
def test_a_size_that_no_batch_can_have_teaches_nothing(size):
    model = CostModel(6, allowed_batch_sizes=[8, 16])
    for _ in range(3):
        model.seed(size, 0, [MS])
        model.observe(size, 0, MS)
    assert model.is_empty
    model.observe(8, 0, affine(8))
    model.seed(5, 0, [affine(8)])
    assert model.table(0) == [0] + [affine(8)] * 6
    assert model.to_dict()["shapes"] == [[8, 0, affine(8)]]


def test_more_shapes_than_it_keeps_are_forgotten_from_the_longest_unseen_on():
    model = CostModel(32)
    for length in range(1, 41):
        for size in SIZES:
            model.observe(size, length, affine(size, length))
    assert len(model.to_dict()["shapes"]) <= 2 * MOST_SHAPES
    assert model.table(40) == pytest.approx(table_of(affine, 40), rel=0.05)


# ---- monotone, and consistent

observation = st.tuples(st.integers(1, 12), st.sampled_from([0, 1, 16, 17, 64, 1000]), st.one_of(st.integers(0, 40), st.integers(-5, 2**60)))


@given(st.lists(observation, max_size=80), st.sampled_from([(), (1, 4, 12), (3, 5), (16,)]), st.booleans())
def test_tables_are_monotone_in_both_whatever_is_observed(observations, allowed, are_seeds):
    model = CostModel(12, allowed_batch_sizes=allowed)
    for size, length, run_ns in observations:
        if are_seeds:
            model.seed(size, length, [run_ns])
        else:
            model.observe(size, length, run_ns)
    tables = [model.table(length) for length in (0, 1, 5, 16, 17, 20, 64, 999, 1000, 1001, 4000)]
    for table in tables:
        assert len(table) == 13
        assert table[0] == 0
        assert all(type(run_ns) is int for run_ns in table)
        assert list(table) == sorted(table)
    for shorter, longer in itertools.pairwise(tables[1:]):  # 0 is no length
        assert all(a <= b for a, b in zip(shorter, longer, strict=True))


@given(st.lists(observation, max_size=80))
def test_no_table_changes_without_a_new_version(observations):
    model = CostModel(12)
    before, version = [list(model.table(length)) for length in (0, 16, 50)], model.version
    for size, length, run_ns in observations:
        model.observe(size, length, run_ns)
        after = [list(model.table(length)) for length in (0, 16, 50)]
        assert model.version != version or after == before
        before, version = after, model.version


def test_a_fit_is_renewed_when_something_changed_and_seldom_otherwise(monkeypatch):
    fits = []
    surface = cost_model.Surface
    monkeypatch.setattr(cost_model, "Surface", lambda *args: fits.append(1) or surface(*args))
    model = CostModel(32)
    for _ in range(50):
        for size in SIZES:
            model.observe(size, 0, affine(size))
    assert len(fits) < 30
    fits.clear()
    chance = random.Random(3)
    for _ in range(6400):
        size = chance.choice(SIZES)
        model.observe(size, 0, round(affine(size) * chance.lognormvariate(0, 0.1)))
    assert 50 <= len(fits) < 640


# ---- outliers and changes


def test_an_outlier_moves_nothing():
    chance = random.Random(4)
    model = CostModel(32)
    for number in range(400):
        size = chance.choice((1, 4, 8, 32))
        before = list(model.table(0))
        is_outlier = number > 50 and number % 10 == 0
        model.observe(size, 0, affine(size) * (100 if is_outlier else 1))
        if is_outlier:
            assert model.table(0) == before
    assert model.margin == 1
    assert model.table(0) == table_of(affine)


def test_a_cold_first_run_of_a_shape_is_not_believed():
    model = learned([(1, 0), (8, 0)])
    model.observe(32, 0, 100 * affine(32))
    assert model.table(0) == table_of(affine)
    model.observe(32, 0, affine(32) + 4 * MS)
    assert model.table(0)[32] == affine(32) + 4 * MS


@pytest.mark.parametrize("factor", [2, 0.5, 10])
def test_a_lasting_change_is_followed_also_by_shapes_that_were_not_seen_since(factor):
    model = learned([(size, 0) for size in SIZES], times=WINDOW)
    for number in range(32):
        size = (8, 12)[number % 2]
        model.observe(size, 0, round(affine(size) * factor))
    assert model.margin == 1
    table = model.table(0)
    assert table[8] == affine(8) * factor
    assert table[12] == affine(12) * factor
    unseen = [size for size in SIZES if size not in (8, 12)]
    if factor < 1:
        assert [table[size] for size in unseen] == [affine(size) * factor for size in unseen]
    else:  # those that are slower than the ones seen are moved by the time that those took more, which is less
        assert all(affine(size) < table[size] <= affine(size) * factor for size in unseen)
        assert table[1] == affine(1) * factor


@pytest.mark.parametrize(("seeds", "added_ns"), [(5, 0), (WINDOW, MS // 10)])
def test_a_fixed_cost_more_does_not_multiply_the_longer_ones(seeds, added_ns):
    model = CostModel(32)
    for size in (1, 32):
        model.seed(size, 0, [MS * size // 10] * seeds)  # as profiled, without what publishing the answers takes
    for _ in range(16):
        model.observe(1, 0, MS // 5)
    assert model.table(0)[1] == MS // 5
    assert model.table(0)[32] == 3_200_000 + added_ns


def test_one_shape_that_changes_among_others_is_followed_within_a_window_of_its_batches():
    model = learned([(size, 0) for size in SIZES], times=WINDOW)
    for _ in range(WINDOW):
        model.observe(32, 0, 2 * affine(32))
        model.observe(4, 0, affine(4))
    assert model.margin == 1
    assert model.predicted(32, 0) == 2 * affine(32)
    assert [model.predicted(size, 0) for size in range(1, 32)] == table_of(affine)[1:32]


def test_an_unlikely_shape_that_is_never_run_again_is_forgotten():
    model = learned([(size, 0) for size in (1, 2, 4, 8)])
    model.observe(16, 0, 100 * affine(16))
    model.observe(16, 0, 100 * affine(16))  # twice cold: believed, and so never chosen by a scheduler again
    assert model.table(0)[32] >= model.table(0)[16] == 100 * affine(16)
    for _ in range(DOUBTED_AFTER + 200):
        model.observe(4, 0, affine(4))
    assert model.table(0) == table_of(affine)


# ---- the margin


def misses(model, sigma, batches, seed=5, scale=1):
    chance = random.Random(seed)
    late = 0
    for _ in range(batches):
        size = chance.choice((1, 2, 4, 8, 16, 32))
        run_ns = round(affine(size) * chance.lognormvariate(0, sigma)) * scale
        late += run_ns > model.table(0)[size]
        model.observe(size, 0, run_ns)
    return late / batches


@pytest.mark.parametrize("sigma", [0.001, 0.03, 0.1, 0.2])
@pytest.mark.parametrize("miss_rate", [0.05, 0.2])
def test_no_more_batches_than_asked_for_take_longer_than_predicted(sigma, miss_rate):
    model = CostModel(32, miss_rate=miss_rate)
    misses(model, sigma, 300)
    assert misses(model, sigma, 4000) == pytest.approx(miss_rate, rel=0.3)


def test_the_margin_fits_the_noise_and_is_gone_when_that_is():
    model = CostModel(32)
    misses(model, 0.1, 1000)
    assert 1.07 < model.margin < 1.22  # the 90th percentile of the noise is 1.137
    misses(model, 0.01, 1000)
    assert 1.005 < model.margin < 1.03
    misses(model, 0, 1000)
    assert model.margin == 1
    assert model.table(0) == table_of(affine)


def test_the_margin_is_put_in_before_the_next_fit_if_it_moves_much():
    model = CostModel(32)
    misses(model, 0, 300)
    for _ in range(16):  # no more than half of what is kept of the shape: its median stays
        model.observe(32, 0, affine(32) * 6 // 5)
    assert model.predicted(32, 0) == affine(32)
    assert model.table(0)[32] == affine(32) * 6 // 5


def test_the_rate_of_misses_holds_while_the_noise_comes_and_goes():
    chance = random.Random(7)
    margin, level, late = Margin(0.1, 0.005), 0.0, 0
    for _ in range(20_000):  # a slow wave: a fixed quantile of the last 128 would be missed by 13 %
        level = 0.99 * level + 0.021 * chance.gauss(0, 1)
        ratio = math.exp(level)
        late += ratio > margin.value
        margin.observe(ratio, margin.value)
    assert late / 20_000 == pytest.approx(0.1, abs=0.01)


def test_the_scale_of_run_times_does_not_matter():
    short, long = CostModel(32), CostModel(32)
    misses(short, 0.1, 700)
    misses(long, 0.1, 700, scale=1000)
    assert long.margin == pytest.approx(short.margin, rel=1e-5)
    assert long.table(0) == pytest.approx([1000 * run_ns for run_ns in short.table(0)], rel=1e-5)


def test_the_margin_is_bounded():
    model = learned([(4, 0)])
    chance = random.Random(6)
    for _ in range(2000):
        model.observe(4, 0, MS * chance.choice((1, 1, 1, 2, 3)))
        assert 1 <= model.margin <= HIGHEST


# ---- kept for the next start


def test_what_was_saved_is_restored_and_two_observations_outvote_it():
    old = CostModel(32)
    misses(old, 0.1, 500)
    saved = json.loads(json.dumps(old.to_dict()))
    model = CostModel(32)
    model.restore(saved)
    assert model.margin == old.margin
    assert model.predicted(8, 0) == pytest.approx(old.predicted(8, 0), rel=0.05)
    assert model.predicted(32, 0) == pytest.approx(affine(32), rel=0.1)
    for run_ns in (4 * affine(32), 4 * affine(32)):
        model.observe(32, 0, run_ns)
    assert model.predicted(32, 0) == 4 * affine(32)


def test_sizes_that_do_not_exist_any_more_are_left_out():
    model = CostModel(8, allowed_batch_sizes=[4, 8])
    model.restore(learned([(size, 0) for size in SIZES]).to_dict())
    assert model.table(0) == [0] + [affine(4)] * 4 + [affine(8)] * 4


GOOD = {"format": 1, "margin": 1.5, "shapes": [[4, 0, 7 * MS]]}


@pytest.mark.parametrize(
    "saved",
    [
        {},
        [],
        {**GOOD, "format": 2},
        {**GOOD, "shapes": None},
        {**GOOD, "shapes": [[4, 0]]},
        {**GOOD, "shapes": [[4, 0, "fast"]]},
        {**GOOD, "shapes": [[4, 0, float("inf")]]},
        {**GOOD, "margin": "high"},
        {"format": 1, "shapes": []},
    ],
)
def test_what_is_no_saved_model_is_refused_and_changes_nothing(saved):
    model = CostModel(8)
    with pytest.raises(ValueError, match=r".+"):
        model.restore(saved)
    assert model.table(0) == [0] * 9
    assert model.margin == 1


@pytest.mark.parametrize("shape", [[4, 0, -1], [4, 0, 0], [4, 0, 10**300], [4, -3, MS], [99, 0, MS], [4, 10**300, MS]])
@pytest.mark.parametrize("margin", [float("nan"), 0.1, 1e9])
def test_senseless_numbers_in_a_saved_model_are_left_out(shape, margin):
    model = CostModel(8)
    model.restore({"format": 1, "margin": margin, "shapes": [shape]})
    assert model.table(0) == [0] * 9
    assert model.margin == 1


# ---- the regressions


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), min_size=1, max_size=7))
def test_pava_is_the_nearest_non_decreasing_sequence(points):
    values, weights = [value for value, _ in points], [weight for _, weight in points]
    n = len(points)

    def mean(first, last):
        return sum(values[i] * weights[i] for i in range(first, last + 1)) / sum(weights[first : last + 1])

    expected = [max(min(mean(first, last) for last in range(i, n)) for first in range(i + 1)) for i in range(n)]  # the max-min formula
    assert pava(values, weights) == pytest.approx(expected)


def test_isotonic_along_two_directions():
    ordered = {(size, length): float(size * length) for size in (1, 2, 4) for length in (1, 3)}
    assert isotonic(ordered, dict.fromkeys(ordered, 1)) == ordered
    crossed = {(1, 1): 4.0, (2, 1): 6.0, (1, 2): 2.0, (2, 2): 8.0}
    assert isotonic(crossed, dict.fromkeys(crossed, 1)) == {(1, 1): 3, (1, 2): 3, (2, 1): 6, (2, 2): 8}
    assert isotonic(crossed, {**dict.fromkeys(crossed, 1), (1, 1): 3})[1, 2] == 3.5


def test_a_line_through_medians_is_not_moved_by_a_quarter_of_outliers():
    xs = list(range(1, 33))
    ys = [5000 + 250 * x for x in xs]
    for at in range(0, 32, 4):
        ys[at] *= 100
    alpha, beta = theil_sen(xs, ys)
    assert beta == pytest.approx(250, rel=0.05)
    assert alpha == pytest.approx(5000, rel=0.05)


def test_a_line_is_never_negative_and_needs_two_different_places():
    assert theil_sen([1, 2, 3], [30, 20, 10]) == (20, 0)
    assert theil_sen([1, 2, 3], [0, 10, 20]) == (0, 10)
    assert theil_sen([4, 4], [1, 2]) is None
    assert theil_sen([], []) is None


@pytest.mark.parametrize("factor", [0.02, 0.3, 4])
def test_a_file_of_a_slower_or_faster_model_is_found_out_by_the_first_shape_that_runs(factor):
    old = CostModel(32)
    for size in (1, 2, 4, 8, 16, 32):
        old.seed(size, 0, [affine(size)] * 5)
    model = CostModel(32)
    model.restore(old.to_dict())
    for _ in range(2):
        model.observe(1, 0, round(affine(1) * factor))
    for size in (4, 32):
        assert model.predicted(size, 0) == pytest.approx(affine(size) * factor, rel=0.01)


def test_a_file_that_is_right_is_not_touched():
    old = CostModel(32)
    for size in (1, 8, 32):
        old.seed(size, 0, [affine(size)] * 5)
    model = CostModel(32)
    model.restore(old.to_dict())
    for _ in range(5):
        model.observe(1, 0, round(affine(1) * 1.1))
    assert model.predicted(32, 0) == affine(32)
