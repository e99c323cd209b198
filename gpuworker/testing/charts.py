"""Comparisons as a picture. Needs matplotlib, which is imported only here, and only when asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gpuworker.testing.comparison import Comparison


def chart(comparisons: Sequence[Comparison], budget_ns: int, path: str | Path) -> None:
    """Writes a PNG: goodput against load, and how many requests were answered within which time under the highest load.

    Raises ImportError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: nothing global, no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    against_load, within = figure.subplots(1, 2)
    comparisons = sorted(comparisons, key=lambda comparison: comparison.load)
    loads = [comparison.load for comparison in comparisons]
    if all(comparison.best is not None for comparison in comparisons):
        requests = [len(next(iter(comparison.simulations.values())).requests) for comparison in comparisons]
        best = [100 * (comparison.best or 0) / count for comparison, count in zip(comparisons, requests, strict=True)]
        against_load.plot(loads, best, color="black", linestyle=":", marker="_", label="optimum")
    highest = comparisons[-1]
    for name, simulation in highest.simulations.items():
        line = {"label": name, "linewidth": 2.4 if name == "ours" else 1.2, "zorder": 3 if name == "ours" else 2}
        goodput = [100 * comparison.simulations[name].goodput for comparison in comparisons]
        against_load.plot(loads, goodput, marker="o", markersize=4, **line)
        latency_ms = np.sort(simulation.latency_ns) / 1e6
        share = 100 * np.arange(1, len(latency_ms) + 1) / len(simulation.requests)
        within.plot(latency_ms, share, **line)
    budget_ms = budget_ns / 1e6
    against_load.set(xlabel="load (1: full batches, all the time)", ylabel="answered in time, % of all requests", ylim=(0, 102), title="Goodput")
    within.axvline(budget_ms, color="black", linestyle=":", label="latency budget")
    within.set(
        xlabel="latency, ms",
        ylabel="answered, % of all requests",
        xlim=(0, 3 * budget_ms),
        ylim=(0, 102),
        title=f"Latency at load {highest.load:.2f}",
    )
    for axes in (against_load, within):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=110)
