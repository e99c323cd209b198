"""Run times for every shape, from the few that were measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gpuworker.scheduling.isotonic import Shape, isotonic, theil_sen

FIT_SHAPES = 48
"""The line is fitted to no more than these shapes, those measured most often: all pairs of them are looked at."""

Row = NDArray[np.float64]


class Surface:
    """Run times over (size, length), non-decreasing in both whatever was measured, and as measured where that was non-decreasing.

    Between two sizes and between two lengths it is linear. Outside it goes on in proportion to alpha + beta * size * length, fitted to all shapes. With
    nothing to fit a line to, it is constant upwards and proportional downwards: a guess that is too low is corrected by the next batch, one that is too
    high may keep that batch from ever being run.

    Length 0 means that nothing is known of the requests' lengths, so run times measured under it do not tell how they grow with length. While there are no
    others, they are the answer for every length; as soon as there are, they are the answer for length 0 alone, which counts as the longest length known:
    that is what its sizes are extrapolated by, and its row if none was measured. A batch of unknown lengths may hold the longest request.
    """

    def __init__(self, medians_ns: Mapping[Shape, float], weights: Mapping[Shape, float], sizes: Sequence[int]) -> None:
        """medians_ns: by shape; at least one; their sizes are among `sizes`, which ascend."""
        self._sizes = np.array(sizes, dtype=np.float64)
        known = {shape: run_ns for shape, run_ns in medians_ns.items() if shape[1]}
        unknown = {shape: run_ns for shape, run_ns in medians_ns.items() if not shape[1]}
        self._longest = max([length for _, length in known], default=1)
        heaviest = sorted(known or unknown, key=lambda shape: -weights[shape])[:FIT_SHAPES]
        self._line = theil_sen([size * self._factor(length) for size, length in heaviest], [medians_ns[shape] for shape in heaviest])
        self._lengths, self._rows = self._fitted(known, weights)
        self._unknown = (self._fitted(unknown, weights)[1] or self._rows)[-1]

    def row(self, length: int) -> Row:
        """Run times in ns for `sizes`, all padded to `length`."""
        if not length or not self._lengths:
            return self._unknown
        at = bisect_left(self._lengths, length)
        if at < len(self._lengths) and self._lengths[at] == length:
            return self._rows[at]
        if 0 < at < len(self._lengths):
            shorter, longer = self._lengths[at - 1 : at + 1]
            share = (length - shorter) / (longer - shorter)
            return np.maximum.accumulate(self._rows[at - 1] + (self._rows[at] - self._rows[at - 1]) * share)
        edge = min(at, len(self._lengths) - 1)
        beyond: Row = self._rows[edge] * self._ratio(self._sizes, length, self._sizes, self._lengths[edge])
        return np.maximum.accumulate(beyond)

    def on_line(self, size: int, length: int) -> float:
        """The run time of a shape by alpha + beta * size * length alone; infinite where there is no such line."""
        alpha, beta = self._line or (math.inf, 0.0)
        return alpha + beta * size * self._factor(length)

    def _fitted(self, medians_ns: Mapping[Shape, float], weights: Mapping[Shape, float]) -> tuple[list[int], list[Row]]:
        """The lengths that were measured, and their rows."""
        by_length: dict[int, dict[int, float]] = {}
        for (size, length), run_ns in isotonic(medians_ns, weights).items():
            by_length.setdefault(length, {})[size] = float(round(run_ns))
        lengths = sorted(by_length)
        rows = [self._filled(by_length[length], length) for length in lengths]
        return lengths, self._ordered(rows, [by_length[length] for length in lengths])

    def _filled(self, seen: Mapping[int, float], length: int) -> Row:
        sizes = np.array(sorted(seen), dtype=np.float64)
        row: Row = np.interp(self._sizes, sizes, [seen[int(size)] for size in sizes])
        nearest_seen = np.clip(self._sizes, sizes[0], sizes[-1])
        return row * self._ratio(self._sizes, length, nearest_seen, length)

    def _ratio(self, sizes: Row, length: int, from_sizes: Row, from_length: int) -> Row:
        """How the run times of `sizes` at `length` compare with those of `from_sizes` at `from_length`, as far as one knows."""
        tokens, from_tokens = sizes * self._factor(length), from_sizes * self._factor(from_length)
        alpha, beta = self._line or (0.0, 1.0)
        ratio: Row = (alpha + beta * tokens) / (alpha + beta * from_tokens)
        return ratio if self._line else np.minimum(1.0, ratio)

    def _factor(self, length: int) -> int:
        return length or self._longest

    def _ordered(self, rows: list[Row], seen: Sequence[Mapping[int, float]]) -> list[Row]:
        """The rows, non-decreasing in length without moving what was measured: no guess stays above a measured shape that is at least as large. They
        become whole numbers, lest the last bit of one puts two equal run times in the wrong order."""
        ceiling = np.full(len(self._sizes), np.inf)
        for at in reversed(range(len(rows))):
            measured = np.array([seen[at].get(int(size), np.inf) for size in self._sizes])
            ceiling = np.minimum(ceiling, np.minimum.accumulate(measured[::-1])[::-1])
            rows[at] = np.minimum(np.rint(rows[at]), ceiling)
        for at in range(1, len(rows)):
            rows[at] = np.maximum(rows[at], rows[at - 1])
        return rows
