"""Padding up against batching down."""

from hypothesis import given
from hypothesis import strategies as st

from gpuworker.scheduling.cost_model import CostModel
from gpuworker.scheduling.rounding import size_to_run

SIZES = (1, 2, 4, 8, 16, 32, 64)


def table(fixed, each, sizes=SIZES):
    """Of a device that takes fixed + each * rows, rows being padded."""
    return [0, *(fixed + each * next(size for size in sizes if size >= n) for n in range(1, sizes[-1] + 1))]


def test_33_are_32_and_1_where_rows_are_what_costs():
    assert size_to_run(33, SIZES, table(5, 1)) == 32


def test_33_are_padded_to_64_where_a_run_costs_more_than_its_rows():
    assert size_to_run(33, SIZES, table(100, 1)) == 33


def test_a_size_that_is_allowed_stays():
    assert [size_to_run(size, SIZES, table(0, 1)) for size in SIZES] == list(SIZES)


def test_nothing_is_known_so_all_run():
    assert size_to_run(33, SIZES, [0] * 65) == 33


def test_fewer_than_the_smallest_allowed():
    assert size_to_run(3, (8, 16), table(0, 1, (8, 16))) == 3


@given(st.integers(0, 10_000), st.integers(0, 1000), st.integers(1, 64))
def test_nobody_is_answered_later_than_in_the_padded_batch(fixed, each, size):
    run_ns = table(fixed, each)
    first = size_to_run(size, SIZES, run_ns)
    assert 1 <= first <= size
    if first < size:
        assert first in SIZES
        assert run_ns[first] + run_ns[size - first] <= run_ns[size]


def test_with_a_cost_model_that_has_learned():
    costs = CostModel(64, allowed_batch_sizes=SIZES)
    for size in SIZES:
        costs.seed(size, 0, [1000 + 500 * size] * 5)
    assert size_to_run(33, SIZES, costs.table(0)) == 32
    assert size_to_run(63, SIZES, costs.table(0)) == 63  # 32 + 31, which is 32 rows as well, and two runs
