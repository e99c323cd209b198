"""The shapes that batches are padded to. Few of them, so that a device sees the same ones again and again (CUDA graphs, allocators, autotuning)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from gpuworker.scheduling.sizes import at_least

SMALLEST_EXTENT = 8
MOST_SHAPES = 512
"""Of a grid that is listed, e.g. to be captured as graphs."""


class Shape(NamedTuple):
    """Of a padded batch: its rows, and the extents of its named dimensions in the order of Signature.dims."""

    rows: int
    extents: tuple[int, ...] = ()

    @property
    def cells(self) -> int:
        """By which shapes are told larger from smaller."""
        return self.rows * prod(self.extents)


def steps_up_to(most: int) -> list[int]:
    """8, 12, 16, 24, 32, 48, ... and `most`: two steps an octave, so that from 9 on padding is a third of a batch at worst."""
    steps, step = [], SMALLEST_EXTENT
    while step < most:
        steps += [step, step * 3 // 2] if step * 3 // 2 < most else [step]
        step *= 2
    return [*steps, most]


def step_of(extent: int) -> int:
    """The same without an end: the first step that is no less than `extent`."""
    octave = 1 << max((extent - 1).bit_length() - 1, 0)
    return max(SMALLEST_EXTENT, octave * 3 // 2 if extent <= octave * 3 // 2 else octave * 2)


class Grid:
    """Allowed batch sizes x allowed extents of each named dimension."""

    def __init__(self, sizes: Sequence[int], dims: Sequence[str] = (), steps: Mapping[str, Sequence[int]] | None = None) -> None:
        """sizes: ascending, the last is the largest batch. steps: ascending extents by dimension; a dimension that is missing there has geometric ones."""
        self._sizes = tuple(sizes)
        self._steps = [tuple((steps or {}).get(dim, ())) for dim in dims]

    def shape(self, rows: int, extents: Sequence[int]) -> Shape:
        """The smallest shape that holds `rows` requests of up to these extents."""
        padded = tuple(at_least(extent, steps) if steps else step_of(extent) for extent, steps in zip(extents, self._steps, strict=True))
        return Shape(at_least(rows, self._sizes), padded)

    @property
    def largest(self) -> int:
        """The largest batch size."""
        return self._sizes[-1]

    def examples(self, most: int) -> list[tuple[int, ...]]:
        """Up to `most` different extents of requests, spread over the grid, the largest first."""
        longest = max(map(len, self._steps), default=0)
        found = []
        for at in range(longest - 1, -1, -max(-(-longest // most), 1)):
            found.append(tuple(steps[min(at, len(steps) - 1)] if steps else SMALLEST_EXTENT for steps in self._steps))
        return found or [(SMALLEST_EXTENT,) * len(self._steps)]

    def shapes(self) -> list[Shape]:
        """All of them, the largest first; none where a dimension has no end, or where there are too many."""
        if any(not steps for steps in self._steps) or len(self._sizes) * prod(map(len, self._steps)) > MOST_SHAPES:
            return []
        found = [Shape(rows, tuple(extents)) for rows in self._sizes for extents in product(*self._steps)]
        return sorted(found, key=lambda shape: (shape.cells, shape), reverse=True)
