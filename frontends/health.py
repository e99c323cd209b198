"""Is the worker fit to be sent requests? Asked of the segment, so the answer comes also when the owner is stuck or dead."""

from __future__ import annotations

from typing import Any

from gpuworker import Stats
from gpuworker.errors import GpuWorkerError


def check(name: str, stale_heartbeat_s: float, long_batch_s: float, group: str | None = None) -> dict[str, Any]:
    """The worker's health as plain data. Its "status" is "ok", or else "absent", "starting", "restarting", "paused", "draining", "stopped",
    "dead", "failed" or "stuck"."""
    try:
        stats = Stats.of(name, group)
    except GpuWorkerError:
        return {"status": "absent", "worker": name}
    return {
        "status": judge(stats, stale_heartbeat_s, long_batch_s),
        "worker": name,
        "owner_pid": stats.owner_pid,
        "heartbeat_age_s": stats.heartbeat_age_s,
        "batch_running_s": stats.batch_running_s,
        "slots_in_use": stats.slots_in_use,
        "capacity": stats.capacity,
    }


def judge(stats: Stats, stale_heartbeat_s: float, long_batch_s: float) -> str:
    """One word. An owner is stuck when its last heartbeat (it beats ten times a second) or the start of its batch is longer ago than that."""
    found = stats.condition(stale_heartbeat_s)
    if found == "silent" or (found in ("serving", "paused", "draining") and stats.batch_running_s > long_batch_s):
        return "stuck"
    return "ok" if found == "serving" else found
