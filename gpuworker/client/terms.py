"""What a request asks for beside being run: its own latency budget, its length, its priority. In one integer, as gw_terms packs it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from gpuworker._native import lib
from gpuworker.client.link import Scheduling
from gpuworker.errors import RequestTooLong

MAX_BUDGET_MS = (2**32 - 1) / 1e3
MAX_PRIORITY = 255
_LENGTH_BITS: int = lib.GW_MAX_LENGTH << 8


def terms_of(name: str, scheduling: Scheduling, latency_budget_ms: float | None, priority: int, length: int) -> int:
    """For worker `name`; a length of 0 says that none is given. Raises ValueError for what this worker does not do, RequestTooLong."""
    budget_us = 0
    if latency_budget_ms is not None:
        if not scheduling.budget_ns:
            raise ValueError(f"latency_budget_ms: worker {name!r} has no latency budget; start it with the option latency_budget_ms")
        if isinstance(latency_budget_ms, (bool, str)) or not 0.001 <= float(latency_budget_ms) <= MAX_BUDGET_MS:
            raise ValueError(f"latency_budget_ms={latency_budget_ms!r}: give milliseconds from 0.001 to {MAX_BUDGET_MS:.0f}")
        budget_us = round(float(latency_budget_ms) * 1e3)
    if type(priority) is not int or priority:
        if not scheduling.has_priorities:
            raise ValueError(f"priority: worker {name!r} knows none; start it with the option priorities")
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= MAX_PRIORITY:
            raise ValueError(f"priority={priority!r}: give an integer from 0 (the default) to {MAX_PRIORITY}; higher goes first")
    limit = scheduling.max_length or lib.GW_MAX_LENGTH
    if length > limit:
        raise RequestTooLong(length, limit)
    return budget_us << 32 | length << 8 | priority


def with_length(terms: int, length: int) -> int:
    """The same terms, for a request of another length, or of one that the owner has to find out (0, or more than there is room for)."""
    return terms & ~_LENGTH_BITS | (length if length <= lib.GW_MAX_LENGTH else 0) << 8


def length_of(request: Any, length: Callable[[Any], int]) -> int:
    """What the user's `length` says, at least 1. Raises what that raises, TypeError or ValueError."""
    found = length(request)
    try:
        size = operator.index(found)
    except TypeError:
        raise TypeError(f"length(request) returned {found!r}: it must be an integer") from None
    if not 0 <= size <= lib.GW_MAX_LENGTH:
        raise ValueError(f"length(request) returned {size}: it must be from 0 to {lib.GW_MAX_LENGTH:,}")
    return size or 1
