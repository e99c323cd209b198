"""Running one batch: exactly one outcome per request, whatever the handler does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from gpuworker.errors import BatchSizeMismatch

RunBatch = Callable[[list[Any]], Any]


def run(run_batch: RunBatch, requests: list[Any], isolate_errors: bool, log: Callable[[BaseException, int], None]) -> list[Any]:
    """One outcome per request, in order: a result, or the exception instance for that request.

    When `run_batch` raises and `isolate_errors` is set, the batch is halved, and halves that fail are halved again, until the requests at fault stand
    alone: one bad request of n costs at most 2 * log2(n) extra runs. 4 * log2(n) extra runs are the most ever spent; past that, what still fails fails
    together, so that a broken model does not run n times for nothing. `log(error, count)` is told of the first failure.
    """
    try:
        returned = run_batch(requests[:])  # a list of its own: it may consume it
        return returned if type(returned) is list and len(returned) == len(requests) else outcomes_of(returned, len(requests))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # also GeneratorExit, CancelledError and the like: they are about the batch, not about the owner
        log(error, len(requests))
        if not isolate_errors or isinstance(error, BatchSizeMismatch):
            return [error] * len(requests)
        return isolate(run_batch, requests, error)


def isolate(run_batch: RunBatch, requests: list[Any], error: BaseException) -> list[Any]:
    """Outcomes of a batch that has failed with `error`, see `run`."""
    outcomes: list[Any] = [error] * len(requests)
    if len(requests) == 1:
        return outcomes
    runs_left = 4 * math.ceil(math.log2(len(requests)))
    failing = [(0, len(requests))]
    while failing:
        start, end = failing.pop()
        if end - start == 1:
            continue
        middle = (start + end) // 2
        for half in ((start, middle), (middle, end)):
            if not runs_left:
                return outcomes
            runs_left -= 1
            part = slice(*half)
            try:
                outcomes[part] = outcomes_of(run_batch(requests[part]), half[1] - half[0])
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as narrower:
                outcomes[part] = [narrower] * (half[1] - half[0])
                failing.insert(0, half)
    return outcomes


def outcomes_of(returned: Any, expected: int) -> list[Any]:
    """What `run_batch` returned as a list of `expected` items. Lists, tuples, arrays and tensors (by row) and iterators are taken.

    Raises BatchSizeMismatch for anything else and for another number of items.
    """
    if isinstance(returned, (list, tuple)):
        outcomes: Sequence[Any] = returned
    elif returned is None or isinstance(returned, (dict, str, bytes, bytearray, set, frozenset)) or not hasattr(returned, "__iter__"):
        article = "None" if returned is None else f"a {type(returned).__name__}"
        raise BatchSizeMismatch(expected, None, article)
    elif getattr(returned, "ndim", 1) == 0:
        raise BatchSizeMismatch(expected, None, "a 0-dimensional array")
    else:
        outcomes = list(returned)
    if len(outcomes) != expected:
        raise BatchSizeMismatch(expected, len(outcomes))
    return list(outcomes)
