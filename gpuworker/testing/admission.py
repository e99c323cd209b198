"""What frontends do before they send: forecast whether the request will be in time, from what the owner publishes."""

from __future__ import annotations

from gpuworker.scheduling import JointBudget, Queued
from gpuworker.scheduling.forecast import forecast
from gpuworker.scheduling.outlook import lane_views


class ForecastAdmission:
    """An `admit` for `simulate`: False for requests that would be late. admission: "on", or "auto", see forecast."""

    def __init__(self, scheduler: JointBudget, admission: str = "auto") -> None:
        self._scheduler, self._always = scheduler, admission == "on"

    def __call__(self, request: Queued, now_ns: int, busy_until_ns: int) -> bool:
        """See simulate."""
        budget_ns = request.budget_ns or self._scheduler.budget_ns
        lanes = lane_views(self._scheduler.buckets, now_ns)
        return not budget_ns or bool(request.priority) or not forecast(lanes, request.length, budget_ns, now_ns, busy_until_ns, self._always).is_late
