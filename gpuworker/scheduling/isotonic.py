"""Regression that outliers do not move: non-decreasing fits, and a straight line through medians."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

Shape = tuple[int, int]
"""(batch size, padded length)."""


def pava(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in weighted squares; values in order are returned as they are.

    Pool adjacent violators: Ayer, Brunk, Ewing, Reid and Silverman, Annals of Mathematical Statistics 1955.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while blocks and blocks[-1][0] > value:
            before, before_weight, before_count = blocks.pop()
            value = (before * before_weight + value * weight) / (before_weight + weight)
            weight, count = before_weight + weight, before_count + count
        blocks.append((value, weight, count))
    return [mean for mean, _, count in blocks for _ in range(count)]


def isotonic(values: Mapping[Shape, float], weights: Mapping[Shape, float], rounds: int = 2) -> dict[Shape, float]:
    """`values` made non-decreasing along both coordinates: exactly along one, and along two as nearly as so many rounds reach.

    Dykstra and Robertson, "An algorithm for isotonic regression for two or more independent variables", Annals of Statistics 1982: each direction in turn
    is fitted to the values plus what the other direction's last fit changed.
    """
    rows, columns = _lines(values, 1), _lines(values, 0)
    by_column = dict.fromkeys(values, 0.0)
    fitted = dict(values)
    for _ in range(rounds):
        by_row, _ = _fit(rows, values, by_column, weights)
        by_column, fitted = _fit(columns, values, by_row, weights)
        if not any(by_column.values()):
            break
    return fitted


def _lines(shapes: Mapping[Shape, float], axis: int) -> list[list[Shape]]:
    lines: dict[int, list[Shape]] = defaultdict(list)
    for shape in sorted(shapes):
        lines[shape[axis]].append(shape)
    return list(lines.values())


def _fit(
    lines: list[list[Shape]], values: Mapping[Shape, float], shifts: Mapping[Shape, float], weights: Mapping[Shape, float]
) -> tuple[dict[Shape, float], dict[Shape, float]]:
    """How a fit along `lines` changes values + shifts, and that fit."""
    changes: dict[Shape, float] = {}
    fitted: dict[Shape, float] = {}
    for line in lines:
        given = [values[shape] + shifts[shape] for shape in line]
        fit = pava(given, [weights[shape] for shape in line])
        fitted.update(zip(line, fit, strict=True))
        changes.update((shape, after - before) for shape, after, before in zip(line, fit, given, strict=True))
    return changes, fitted


def theil_sen(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float] | None:
    """(alpha, beta) of y = alpha + beta * x, neither below 0; None where no two x differ.

    beta is the median slope over all pairs: Theil 1950; Sen, Journal of the American Statistical Association 1968.
    """
    x, y = np.array(xs, dtype=np.float64), np.array(ys, dtype=np.float64)
    first, second = np.triu_indices(len(x), 1)
    runs, rises = x[second] - x[first], y[second] - y[first]
    differ = runs != 0
    if not differ.any():
        return None
    beta = max(0.0, float(np.median(rises[differ] / runs[differ])))
    return max(0.0, float(np.median(y - beta * x))), beta
