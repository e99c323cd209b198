"""Requests answered in time, as a share of the most that any schedule could have answered in time: simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipc.report import markdown
from ipc.targets import Target

from serving.workload import Cost, Workload

RIVALS = ("eager", "size-timeout", "clipper", "clockwork", "bentoml", "edf-head")
OURS = {"ours": "auto", "ours, forecasts on": "on"}
TRAP = "edf-head"


def measure(workloads: Sequence[Workload], count: int, seed: int) -> list[dict[str, Any]]:
    """A record for each workload."""
    records = []
    for workload in workloads:
        requests = workload.requests(Cost(), count, seed)
        setting = workload.setting(Cost())
        best = setting.optimum(requests) or 0
        ratios = {name: workload.setting(Cost(), admission=admission).simulate("ours", requests).on_time / best for name, admission in OURS.items()}
        ratios |= {name: setting.simulate(name, requests).on_time / best for name in RIVALS}
        records.append(
            {"workload": workload.title, "requests": len(requests), "optimum": best / len(requests), "limit": workload.limit, "ratios": ratios}
        )
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    names = (*OURS, *RIVALS)
    rows = [
        (record["workload"], f"{record['requests']:,}", f"{100 * record['optimum']:.1f} %", *(f"{record['ratios'][name]:.4f}" for name in names))
        for record in records
    ]
    return "### Ratio to the exact optimum (simulated)\n\n" + markdown(("arrivals", "requests", "best possible", *names), rows)


def targets(records: Sequence[dict[str, Any]]) -> list[Target]:
    found = []
    for record in records:
        if record["limit"] is not None:
            found.append(Target(f"{record['workload']}: ratio to the optimum", ">=", record["limit"], record["ratios"]["ours"]))
            found.append(Target(f"{record['workload']}: {TRAP} fails the same", "<", record["limit"], record["ratios"][TRAP]))
    return found
