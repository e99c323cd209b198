"""The status page: one self-contained HTML file, and the figures that it asks for once a second. Knows nothing of WSGI or ASGI.

    GET /             page(), with PAGE_HEADERS
    GET /status.json  snapshot(names) as JSON, with DATA_HEADERS

Figures are cumulative: the browser takes differences and remembers five minutes. They come from the segments, so also from a worker that hangs or has died.
Neither payloads nor the last words of an owner's log are among them.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

from gpuworker import Stats
from gpuworker.errors import GpuWorkerError, WorkerNotFound

from . import health

STAGES = {"claim": "claim_wait", "queue": "queue_wait", "batch": "batch_wait", "run": "run", "wake": "wake"}
COUNTERS = (
    "submitted", "completed", "failed", "rejected", "expired", "cancelled", "fallbacks", "abandoned", "requeued", "batches",
    "on_time", "late", "rejected_late", "rejected_forecast", "tokens", "padded_tokens",
)  # fmt: skip
OPTIONS = ("max_batch_size", "max_wait_ms", "latency_budget_ms")
STALE_HEARTBEAT_S, LONG_BATCH_S = 5.0, 30.0
MOST_NOTE = 300

_html = resources.files(__package__).joinpath("page.html").read_bytes()


def page() -> bytes:
    """The page, UTF-8. It asks for `status.json` beside it, and for nothing else."""
    return _html


def _hashes(tag: str) -> str:
    """What a content security policy calls the page's inline <style> or <script>."""
    inside = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), _html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in inside)


_SHARED = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
PAGE_HEADERS: tuple[tuple[str, str], ...] = (
    ("Content-Type", "text/html; charset=utf-8"),
    (
        "Content-Security-Policy",
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
    ),
    *_SHARED,
)
"""To be sent with `page()`."""
DATA_HEADERS: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"), *_SHARED)
"""To be sent with `snapshot()`."""


def snapshot(names: Sequence[str], group: str | None = None) -> dict[str, Any]:
    """The workers of these names as plain data for JSON; one that is not there is "absent", one that cannot be read "unusable". Never raises.
    group: as for gpuworker.connect, for workers of other users."""
    return {"time_ms": round(time.monotonic() * 1e3, 1), "workers": [_worker(name, group) for name in names]}


def _worker(name: str, group: str | None) -> dict[str, Any]:
    try:
        stats = Stats.of(name, group)
    except WorkerNotFound:
        return {"name": name, "state": "absent"}
    except (GpuWorkerError, OSError, ValueError):
        return {"name": name, "state": "unusable"}
    state = health.judge(stats, STALE_HEARTBEAT_S, LONG_BATCH_S)
    return {
        "name": name,
        "state": "serving" if state == "ok" else state,
        "note": stats.cause().partition("\n")[0][:MOST_NOTE],
        "handler": stats.handler,
        **{key: getattr(stats, key) for key in ("owner_pid", "uptime_s", "heartbeat_age_s", "batch_running_s", "restarts", "reloads", "slots_in_use", "capacity")},
        "clients": [{"pid": pid, "slots": slots} for pid, slots in stats.slots_by_pid().items()],
        "counters": {key: getattr(stats, key) for key in COUNTERS},
        "waits": {stage: _histogram(getattr(stats, field)) for stage, field in STAGES.items()},
        "batch_sizes": stats.batch_sizes,
        "reasons": stats.dispatch_reasons,
        "options": {key: stats.number(key) for key in OPTIONS},
        "execution": None if stats.execution is None else dataclasses.asdict(stats.execution),
        "generation": None if stats.generation is None else dataclasses.asdict(stats.generation),
    }  # fmt: skip


def _histogram(h: Any) -> dict[str, Any]:
    """Four buckets an octave from 256 ns on; those behind the last one that holds something are left out."""
    end = next((i for i in range(len(h.buckets), 0, -1) if h.buckets[i - 1]), 0)
    return {"count": h.count, "sum_us": round(h.sum_ns / 1e3, 1), "buckets": h.buckets[:end]}
