"""What batches of a handler take, from requests to answers that are ready to be sent; and a cost function from that."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpuworker.payload import encode
from gpuworker.scheduling.cost_model import CostModel
from gpuworker.scheduling.sizes import MAX_LENGTH, doubling
from gpuworker.worker.batch import outcomes_of
from gpuworker.worker.profile import profile

MOST_LENGTHS = 6
"""Lengths that are profiled."""
OUTLIER = 1.5
"""A run that took more than so many times its shape's median says nothing of how much run times usually vary."""


class RunBatchFailed(Exception):
    """The handler raised, or returned what cannot be sent."""


class NoLength(ValueError):
    """The handler's length(request) returned something else."""


class Profile(NamedTuple):
    """Measured run times in ns, by (size, length); length is 0 where lengths do not matter."""

    runs_ns: Mapping[tuple[int, int], Sequence[int]]

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that were run."""
        return sorted({size for size, _ in self.runs_ns})

    @property
    def lengths(self) -> list[int]:
        """Lengths that were run."""
        return sorted({length for _, length in self.runs_ns})

    def median_ms(self, size: int, length: int) -> float | None:
        """None for a shape that there was no time for."""
        runs = self.runs_ns.get((size, length))
        return statistics.median(runs) / 1e6 if runs else None

    def medians_ms(self) -> dict[str, float]:
        """{"8x128": 6.5, ...}, as `gpuworker simulate --profile` reads it."""
        return {f"{size}x{length}": statistics.median(runs) / 1e6 for (size, length), runs in sorted(self.runs_ns.items())}

    @property
    def noise(self) -> float:
        """How much a run time varies: standard deviation of its logarithm."""
        logs = []
        for runs in self.runs_ns.values():
            median = statistics.median(runs)
            logs += [math.log(run_ns / median) for run_ns in runs if run_ns < OUTLIER * median]
        return math.sqrt(sum(value * value for value in logs) / len(logs)) if logs else 0.0

    def cost(self, max_batch_size: int) -> Callable[[int, int], int]:
        """cost_ns(size, length): as measured, monotone, and between and beyond the measured shapes as the worker would guess."""
        model = CostModel(max(max_batch_size, *self.sizes))
        only = self.lengths[0] if len(self.lengths) == 1 else None
        shapes = [[size, length, round(statistics.median(runs))] for (size, length), runs in self.runs_ns.items()]
        model.restore({**model.to_dict(), "shapes": shapes})
        if only is not None:  # nothing is known of what other lengths cost
            return lambda size, length: max(1, model.predicted(size, only))
        return lambda size, length: max(1, model.predicted(size, length))


def measure(
    run_batch: Callable[[list[Any]], Any],
    examples_by_length: Mapping[int, Sequence[Any]],
    max_batch_size: int,
    limit_s: float,
    clock_ns: Callable[[], int],
) -> Profile:
    """Profiles batches of 1 and of max_batch_size first, then doubled sizes, then those between; what the time allows.

    Raises RunBatchFailed, and TimeoutError if there was not even time for single requests and full batches.
    """
    end_ns = clock_ns() + round(limit_s * 1e9)
    failure: list[str] = []

    def timed(requests: list[Any]) -> None:
        size = len(requests)
        try:
            for outcome in outcomes_of(run_batch(requests), size):
                encode(outcome, allow_pickle=True)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit, too
            failure.append(f"run_batch failed with {size} request{'s' * (size > 1)}: {described(error)}")
            raise RunBatchFailed(failure[0]) from error

    runs_ns: dict[tuple[int, int], list[int]] = {}
    for sizes in stages(max_batch_size):
        runs_ns |= profile(timed, examples_by_length, sizes, (end_ns - clock_ns()) / 1e9, clock_ns)
        if failure:
            raise RunBatchFailed(failure[0])
        if not all((size, length) in runs_ns for size in (1, max_batch_size) for length in examples_by_length):
            raise TimeoutError("there was not even time for single requests and full batches")
    return Profile(runs_ns)


def stages(max_batch_size: int) -> list[list[int]]:
    """Sizes to profile, the most telling ones first."""
    doubled = doubling(max_batch_size)
    between = [size + size // 2 for size in doubled[1:] if size + size // 2 < max_batch_size]
    ends = sorted({1, max_batch_size})
    return [sizes for sizes in (ends, doubled[1:-1], between) if sizes]


def spread(lengths: Sequence[int], most: int = MOST_LENGTHS) -> list[int]:
    """Lengths from the shortest to the longest, by about the same factor; those of `lengths` that are nearest to that."""
    known = sorted(set(lengths))
    if len(known) <= most:
        return known
    ratio = max(known[-1] / max(known[0], 1), 1)
    wanted = [max(known[0], 1) * ratio ** (step / (most - 1)) for step in range(most)]
    return sorted({known[-1], *(min(known, key=lambda length: abs(length - want)) for want in wanted)})


def examples_by_length(
    examples: Sequence[Any], length: Callable[[Any], int] | None, make: Callable[[int], Any] | None, lengths: Sequence[int]
) -> dict[int, list[Any]]:
    """What to profile with. lengths: of the traffic, empty where they do not matter: then all examples are alike, and are under 0. make(length) gives a
    request of about that length; else the examples must do. Raises NoLength, and what `length` and `make` raise."""
    if length is None or not lengths:
        return {0: list(examples)} if examples else {}
    if make is not None:
        examples = [make(wanted) for wanted in spread(lengths)]
    groups: dict[int, list[Any]] = {}
    for example in examples:
        groups.setdefault(length_of(example, length), []).append(example)
    return {chosen: groups[chosen] for chosen in spread(list(groups))}


def length_of(request: Any, length: Callable[[Any], int]) -> int:
    """What `length` returns for it. Raises NoLength for what a client would not send, and what `length` raises."""
    returned = length(request)
    try:
        value = int(returned)
        if 0 <= value <= MAX_LENGTH:
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    raise NoLength(f"length(request) returned {repr(returned)[:60]}: it must be an integer from 0 to {MAX_LENGTH:,}")


def described(error: BaseException) -> str:
    """In a line."""
    return f"it called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
