"""A recommendation as a picture. Needs matplotlib, which is imported only here, and only when asked."""

from __future__ import annotations

from pathlib import Path

from gpuworker.tuning.recommendation import Recommendation


def chart(found: Recommendation, budget_ms: float, target: float, path: str | Path) -> None:
    """Writes a PNG: goodput and latency against the rate. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: nothing global, no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    goodput, latency = figure.subplots(1, 2)
    rates = [load * found.rate_per_s for load, _ in found.curve]
    simulations = [simulation for _, simulation in found.curve]
    goodput.plot(rates, [100 * simulation.goodput for simulation in simulations], marker="o", linewidth=2, label="in time")
    goodput.axhline(100 * target, color="black", linestyle=":", linewidth=1, label=f"target, {100 * target:g} %")
    for name, percent in (("p50", 50), ("p99", 99)):
        latency.plot(rates, [simulation.latency_percentile_ns(percent) / 1e6 for simulation in simulations], marker="o", label=name)
    latency.plot(rates, [simulation.mean_latency_ns / 1e6 for simulation in simulations], marker="o", linestyle="--", label="mean")
    latency.axhline(budget_ms, color="black", linestyle=":", linewidth=1, label="latency budget")
    for axes in (goodput, latency):
        axes.axvline(found.rate_per_s, color="gray", linewidth=1, label="asked")
        if found.capacity_per_s is not None and found.capacity_per_s <= rates[-1]:
            axes.axvline(found.capacity_per_s, color="tab:red", linewidth=1, linestyle="--", label="capacity")
        axes.set_xlabel("requests a second")
        axes.grid(alpha=0.3)
    goodput.set(ylabel="answered in time, % of all requests", ylim=(0, 102), title="Goodput")
    latency.set(ylabel="ms, of those that were answered", ylim=(0, None), title="Latency")
    for axes in (goodput, latency):
        axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=110)
