"""Is the worker fit to be sent requests? Asked of the segment, so the answer comes also when the owner hangs or is dead."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpuworker.errors import GpuWorkerError
from gpuworker.segment.stats import Stats


class Limits(NamedTuple):
    """From when on an owner passes for stuck: seconds without a heartbeat (it beats every 0.1 s), and seconds in one batch."""

    heartbeat_s: float = 5.0
    batch_s: float = 30.0


def check(name: str, limits: Limits) -> dict[str, Any]:
    """The worker's health as plain data. Its "status" is "ok", or else "absent", "starting", "draining", "stopped", "dead" or "stuck"."""
    try:
        stats = Stats.of(name)
    except GpuWorkerError:
        return {"status": "absent", "worker": name}
    return {
        "status": judge(stats, limits),
        "worker": name,
        "owner_pid": stats.owner_pid,
        "heartbeat_age_s": stats.heartbeat_age_s,
        "batch_running_s": stats.batch_running_s,
        "slots_in_use": stats.slots_in_use,
        "capacity": stats.capacity,
    }


def judge(stats: Stats, limits: Limits) -> str:
    """One word."""
    if not stats.owner_alive:
        return "dead"
    if stats.heartbeat_age_s > limits.heartbeat_s or stats.batch_running_s > limits.batch_s:
        return "stuck"
    return "ok" if stats.state == "serving" else stats.state
