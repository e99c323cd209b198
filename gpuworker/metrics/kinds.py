"""How a family's samples come from statistics: one number, one for each value of a label, a histogram."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import itemgetter

from gpuworker.metrics.text import Family, Row
from gpuworker.segment.stats import Histogram, Stats

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"


def _one(name: str, kind: str, help_: str, value: Callable[[Stats], float | None]) -> Family:
    def values(stats: Stats) -> Sequence[float] | None:
        number = value(stats)
        return None if number is None else (number,)

    return Family(name, kind, help_, (), (Row(),), values)


def gauge(name: str, help_: str, value: Callable[[Stats], float | None]) -> Family:
    """A number that goes up and down; None: this worker has none."""
    return _one(name, GAUGE, help_, value)


def counter(name: str, help_: str, value: Callable[[Stats], float | None]) -> Family:
    """A number that grows, and starts at 0 again with the segment or with its owner."""
    return _one(name, COUNTER, help_, value)


def each(name: str, kind: str, help_: str, by: str, keys: Iterable[str], values: Callable[[Stats], Sequence[float]]) -> Family:
    """A number for each value of the label `by`."""
    return Family(name, kind, help_, (by,), tuple(Row("", f',{by}="{key}"') for key in keys), values)


def names_of(kinds: type[enum.IntEnum]) -> list[str]:
    """What statistics call them."""
    return [kind.name.lower() for kind in kinds]


def histogram(name: str, help_: str, bounds: Iterable[str], values: Callable[[Stats], Sequence[float]]) -> Family:
    """`values`: counts up to each bound (the bound itself included), the count of all, the sum, and the count of all again."""
    rows = [Row("_bucket", f',le="{bound}"') for bound in (*bounds, "+Inf")]
    return Family(name, HISTOGRAM, help_, ("le",), (*rows, Row("_sum"), Row("_count")), values)


def times(name: str, help_: str, exponents: Sequence[int], found: Callable[[Stats], Histogram]) -> Family:
    """A histogram of lengths of time, with bounds of 256 ns * 2**exponent.

    They are bounds of the segment's own buckets, four an octave (native/stats.c), so nothing is guessed. A time just on a bound counts above it.
    """
    below = itemgetter(*(4 * exponent for exponent in exponents))
    return histogram(name, help_, (repr(256 * 2**exponent / 1e9) for exponent in exponents), lambda stats: spread(found(stats), below))


def spread(found: Histogram, below: Callable[[Sequence[int]], tuple[int, ...]]) -> Sequence[float]:
    """A histogram's values. They agree with each other, whatever was counted while it was read."""
    counts = list(accumulate(found.buckets, initial=0))
    return *below(counts), counts[-1], found.sum_ns / 1e9, counts[-1]
