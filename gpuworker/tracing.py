"""OpenTelemetry, where somebody wants it: which requests are part of which trace. Clients put W3C trace context into their requests' slots; owners make spans.

Only OpenTelemetry's API is used. Who wants spans exported sets up its SDK, in each process (docs/operations.md). Without `tracing=True` nothing here is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from gpuworker._native import lib

VARIABLE = "GPUWORKER_TRACING"
_OFF = ("", "0", "false", "no", "off")
_LOW = (1 << 64) - 1


def is_wanted(tracing: bool | None) -> bool:
    """What somebody has said, or else what GPUWORKER_TRACING says. Raises ValueError for what is neither yes nor no."""
    if tracing is None:
        return os.environ.get(VARIABLE, "").lower() not in _OFF
    if not isinstance(tracing, bool):
        raise ValueError(f"tracing={tracing!r}: give True or False, or None for what {VARIABLE} says")
    return tracing


def api() -> Any:
    """OpenTelemetry's `trace` module. Raises ModuleNotFoundError with what to do."""
    try:
        from opentelemetry import trace
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("tracing needs opentelemetry: pip install 'gpuworker[otel]'", name=error.name) from None
    return trace


def stamper() -> Callable[[Any, int], None]:
    """A function of (port, ticket) that puts the calling thread's current span, if there is one, into a slot that is claimed and not published."""
    current = api().get_current_span

    def stamp(port: Any, ticket: int) -> None:
        context = current().get_span_context()
        if context.is_valid:
            lib.gw_trace(port, ticket, context.trace_id >> 64, context.trace_id & _LOW, context.span_id, context.trace_flags)

    return stamp
