"""What batches of a handler take, measured before anybody waits for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuworker.scheduling.sizes import at_least, doubling
from gpuworker.scheduling.token_bucket import coarse

log = logging.getLogger("gpuworker")

REPETITIONS = 5


def profile(
    run_batch: Callable[[list[Any]], Any],
    examples_by_length: Mapping[int, Sequence[Any]],
    sizes: Sequence[int],
    limit_s: float,
    clock_ns: Callable[[], int],
    max_tokens: int | None = None,
) -> dict[tuple[int, int], list[int]]:
    """Run times in ns, by (size, length), of batches made of examples: up to REPETITIONS each, in rounds over all shapes, while time is left.

    Largest shapes first, so that memory is claimed once; the first run of a shape is not counted, it may compile or allocate. No run starts after limit_s,
    nor one of a known shape that would not end by then. Shapes of more than max_tokens (size * length) are left out, but not the smallest size.
    If run_batch raises, that is logged, and what was measured so far is returned.
    """
    end_ns = clock_ns() + round(limit_s * 1e9)
    shapes = [(size, length) for length, examples in examples_by_length.items() if examples for size in sizes]
    shapes = [(size, length) for size, length in shapes if size == min(sizes) or max_tokens is None or size * length <= max_tokens]
    shapes.sort(key=lambda shape: (shape[0] * max(shape[1], 1), shape), reverse=True)
    measured: dict[tuple[int, int], list[int]] = {}
    for repetition in range(REPETITIONS):
        for size, length in shapes:
            examples = examples_by_length[length]
            batch = [examples[i % len(examples)] for i in range(size)]
            runs = measured.get((size, length), [])
            for is_counted in (False, True) if repetition == 0 else (True,):
                started_ns = clock_ns()
                if started_ns + min(runs, default=0) >= end_ns:
                    break
                try:
                    run_batch(list(batch))
                except Exception:
                    log.warning("profiling stops: run_batch failed with %d examples of length %d", size, length, exc_info=True)
                    return measured
                if is_counted:
                    measured.setdefault((size, length), []).append(clock_ns() - started_ns)
    return measured


def sizes_to_profile(max_batch_size: int, allowed_batch_sizes: Sequence[int] = ()) -> list[int]:
    """The allowed sizes up to max_batch_size, or 1, 2, 4, ...; and max_batch_size."""
    return sorted({*(size for size in allowed_batch_sizes or doubling(max_batch_size) if size < max_batch_size), max_batch_size})


def by_length(examples: Sequence[Any], length: Callable[[Any], int] | None, boundaries: Sequence[int], longest: int = 0) -> dict[int, list[Any]]:
    """Examples by what they would be padded to, the longest first, as those show best what a padded batch takes: a boundary, or without boundaries the next
    power of two. All under 0 without `length`. Those longer than the last boundary, or `longest` (0: any), are left out. Raises what `length` raises."""
    if length is None:
        return {0: list(examples)} if examples else {}
    most = min((limit for limit in (longest, *boundaries[-1:]) if limit), default=None)
    groups: dict[int, list[tuple[int, Any]]] = {}
    for example in examples:
        units = max(int(length(example)), 1)
        if most is None or units <= most:
            padded = at_least(units, boundaries) if boundaries else coarse(units)
            groups.setdefault(padded, []).append((units, example))
    return {padded: [example for _, example in sorted(group, key=lambda one: -one[0])] for padded, group in groups.items()}
