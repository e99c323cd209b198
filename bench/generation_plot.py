"""The run as a picture: contestants, slots, variance."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from generation_report import gain, per_cpu_s


def chart(records: dict[str, Any], path: Path) -> None:
    """Writes a PNG. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: nothing global, no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    contestants, slots, variance = figure.subplots(1, 3)
    compared = [record for record in records.get("compare") or [] if "error" not in record]
    names = list(dict.fromkeys(record["contestant"] for record in compared))
    values = [median(per_cpu_s(record) for record in compared if record["contestant"] == name) for name in names]
    bars = contestants.barh(names, values, color=["C0"] + ["C7"] * (len(names) - 1))
    contestants.bar_label(bars, fmt="%.0f", padding=3)
    contestants.invert_yaxis()
    contestants.set(title="The same requests, 16 slots", xlabel="useful tokens per CPU second")
    if by_slots := records.get("slots"):
        slots.plot([record["slots"] for record in by_slots], [per_cpu_s(record) for record in by_slots], marker="o")
        slots.set_xscale("log", base=2)
    slots.set(title="By slots", xlabel="slots", ylabel="tokens per CPU second", ylim=(0, None))
    if by_variance := sorted(records.get("variance") or [], key=lambda record: record["variation"]):
        variance.plot([record["variation"] for record in by_variance], [gain(record)[1] for record in by_variance], marker="o")
    variance.axhline(1, color="black", linestyle=":")
    variance.set(title="Gain over static batches", xlabel="answers' lengths: deviation / mean", ylabel="tokens per CPU second, ratio", ylim=(0, None))
    for axes in (slots, variance):
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=110)
