"""What a request asks for beside being run: its own latency budget, its length, its priority. In one integer, as gw_terms packs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuworker._native import lib
from gpuworker.client.link import Link
from gpuworker.errors import RequestTooLong

MAX_BUDGET_MS = (2**32 - 1) / 1e3
MAX_PRIORITY = 255


def terms_of(link: Link, request: Any, latency_budget_ms: float | None, priority: int, length: Callable[[Any], int] | None) -> int:
    """Raises ValueError for what this worker does not do, RequestTooLong, and whatever `length` raises."""
    budget_us = size = 0
    if latency_budget_ms is not None:
        if not link.has_budget:
            raise ValueError(f"latency_budget_ms: worker {link.segment.name!r} has no latency budget; start it with the option latency_budget_ms")
        if isinstance(latency_budget_ms, bool) or not 0.001 <= latency_budget_ms <= MAX_BUDGET_MS:
            raise ValueError(f"latency_budget_ms={latency_budget_ms!r}: give milliseconds from 0.001 to {MAX_BUDGET_MS:.0f}")
        budget_us = round(latency_budget_ms * 1e3)
    if priority:
        if not link.has_priorities:
            raise ValueError(f"priority: worker {link.segment.name!r} knows none; start it with the option priorities")
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= MAX_PRIORITY:
            raise ValueError(f"priority={priority!r}: give an integer from 0 (the default) to {MAX_PRIORITY}; higher goes first")
    if length is not None:
        size = int(length(request))
        if not 0 <= size <= lib.GW_MAX_LENGTH:
            raise ValueError(f"length(request) returned {size}: it must be from 0 to {lib.GW_MAX_LENGTH:,}")
        size = size or 1  # 0 says that none is given
        if link.max_length and size > link.max_length:
            raise RequestTooLong(size, link.max_length)
    return budget_us << 32 | size << 8 | priority
