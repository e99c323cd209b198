"""The shapes that batches are padded to."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuworker.execution.grid import MOST_SHAPES, SMALLEST_EXTENT, Grid, Shape, step_of, steps_up_to
from gpuworker.scheduling.sizes import at_least, doubling

EXTENTS = [*range(1, 2050), *(power + off for power in (1 << 12, 1 << 16, 3 << 15, 1 << 20, 3 << 20, 1 << 31) for off in (-1, 0, 1))]
SETTINGS = settings(deadline=None, derandomize=True)


def test_steps_as_they_are():
    assert steps_up_to(100) == [8, 12, 16, 24, 32, 48, 64, 96, 100]
    assert steps_up_to(512) == [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert [steps_up_to(most) for most in (1, 7, 8, 9, 12, 13)] == [[1], [7], [8], [8, 9], [8, 12], [8, 12, 13]]


def test_steps_are_few_and_near():
    for extent in EXTENTS:
        step, steps = step_of(extent), steps_up_to(extent)
        assert step >= max(extent, SMALLEST_EXTENT)
        assert step_of(step) == step, "a step is its own"
        assert extent < SMALLEST_EXTENT or (step - extent) * 3 <= step, "at most a third is padding"
        assert steps == sorted(set(steps)), "ascending, each once"
        assert steps[-1] == extent
        assert len(steps) <= 2 * extent.bit_length()


@SETTINGS
@given(most=st.integers(1, 1 << 32), extent=st.integers(1, 1 << 32) | st.integers(1, 300))
def test_both_are_the_same_up_to_the_end(most, extent):
    steps = steps_up_to(most)
    assert at_least(min(extent, most), steps) == min(step_of(min(extent, most)), most)
    assert [step_of(step) for step in steps[:-1]] == steps[:-1]


def test_every_step_up_to_the_end_is_listed():
    assert steps_up_to(1 << 20) == sorted({step_of(extent) for extent in range(1, (1 << 20) + 1)})


@SETTINGS
@given(
    sizes=st.sampled_from([doubling(most) for most in (1, 2, 3, 8, 48)] + [[3, 5, 64]]),
    most=st.lists(st.none() | st.integers(1, 600), max_size=3),
    data=st.data(),
)
def test_a_shape_is_the_smallest_that_holds_them(sizes, most, data):
    dims = "abc"[: len(most)]
    grid = Grid(sizes, dims, {dim: steps_up_to(end) for dim, end in zip(dims, most, strict=True) if end})
    rows = data.draw(st.integers(1, sizes[-1]))
    extents = [data.draw(st.integers(1, end or 10_000)) for end in most]
    shape = grid.shape(rows, extents)
    assert shape.rows == min(size for size in sizes if size >= rows)
    for padded, extent, end in zip(shape.extents, extents, most, strict=True):
        assert padded == min(step for step in (steps_up_to(end) if end else steps_up_to(1 << 20)) if step >= extent)
    assert grid.shape(*shape) == shape, "it is one of its own"
    listed = grid.shapes()
    assert shape in listed or not listed
    assert grid.largest == sizes[-1]


def test_beyond_its_end_a_grid_pads_nothing():
    """Whoever asks has checked the request; what is too large all the same is not to be cut."""
    grid = Grid([1, 2], ["n", "m"], {"n": [8, 10]})
    assert grid.shape(3, (11, 9)) == Shape(3, (11, 12))


def test_shapes_are_listed_the_largest_first():
    grid = Grid([1, 4, 6], ["n", "m"], {"n": [8, 12, 100], "m": [3, 5]})
    shapes = grid.shapes()
    assert set(shapes) == {Shape(rows, extents) for rows in (1, 4, 6) for extents in itertools.product((8, 12, 100), (3, 5))}
    assert len(shapes) == len(set(shapes)) == 18
    assert shapes[0] == Shape(6, (100, 5))
    assert shapes[-1] == Shape(1, (8, 3))
    cells = [shape.rows * math.prod(shape.extents) for shape in shapes]
    assert cells == [shape.cells for shape in shapes] == sorted(cells, reverse=True)
    assert Grid([1, 2, 3]).shapes() == [Shape(3), Shape(2), Shape(1)]
    assert Shape(5).cells == 5


def test_shapes_without_an_end_or_too_many_are_not_listed():
    assert Grid([1, 2], ["n"]).shapes() == []
    assert Grid([1, 2], ["n", "m"], {"n": [8, 12]}).shapes() == []
    fits = Grid(range(1, 5), ["n"], {"n": range(1, MOST_SHAPES // 4 + 1)})
    assert len(fits.shapes()) == MOST_SHAPES
    assert Grid(range(1, 5), ["n"], {"n": range(1, MOST_SHAPES // 4 + 2)}).shapes() == []


@SETTINGS
@given(ends=st.lists(st.none() | st.integers(1, 1000), min_size=1, max_size=3), most=st.integers(1, 20))
def test_examples_are_spread_over_the_grid(ends, most):
    dims = "abc"[: len(ends)]
    steps = {dim: steps_up_to(end) for dim, end in zip(dims, ends, strict=True) if end}
    examples = Grid([1, 2], dims, steps).examples(most)
    assert 1 <= len(examples) <= most
    assert len(examples) == len(set(examples)), "different ones"
    assert examples == sorted(examples, reverse=True), "the largest first"
    assert examples[0] == tuple(steps[dim][-1] if dim in steps else SMALLEST_EXTENT for dim in dims)
    for example in examples:
        assert all(extent in steps.get(dim, [SMALLEST_EXTENT]) for dim, extent in zip(dims, example, strict=True))
