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


def terms_of(
    name: str, scheduling: Scheduling, request: Any, latency_budget_ms: float | None, priority: int, length: Callable[[Any], int] | None
) -> int:
    """For worker `name`. Raises ValueError for what this worker does not do, RequestTooLong, and whatever `length` raises."""
    budget_us = size = 0
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
    if length is not None:
        found = length(request)
        try:
            size = operator.index(found)
        except TypeError:
            raise TypeError(f"length(request) returned {found!r}: it must be an integer") from None
        if not 0 <= size <= lib.GW_MAX_LENGTH:
            raise ValueError(f"length(request) returned {size}: it must be from 0 to {lib.GW_MAX_LENGTH:,}")
        size = size or 1  # 0 says that none is given
        if scheduling.max_length and size > scheduling.max_length:
            raise RequestTooLong(size, scheduling.max_length)
    return budget_us << 32 | size << 8 | priority
