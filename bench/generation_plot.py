"""The run as a picture: a panel for each part that was measured, of contestants, slots, variance and a long prompt."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from generation_report import gain, per_cpu_s


def chart(records: dict[str, Any], path: Path) -> None:
    """Writes a PNG. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: nothing global, no display
    from matplotlib.figure import Figure

    panels = [(draw, records[part]) for part, draw in PANELS.items() if records.get(part)]
    figure = Figure(figsize=(5 * max(len(panels), 1), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (draw, found) in zip(figure.subplots(1, max(len(panels), 1), squeeze=False)[0], panels, strict=False):
        draw(axes, found)
    figure.savefig(path, format="png", dpi=110)


def _compared(axes: Any, records: list[dict[str, Any]]) -> None:
    records = [record for record in records if "error" not in record]
    names = list(dict.fromkeys(record["contestant"] for record in records))
    values = [median(per_cpu_s(record) for record in records if record["contestant"] == name) for name in names]
    bars = axes.barh(names, values, color=["C0"] + ["C7"] * (len(names) - 1))
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set(title="The same requests, 16 slots", xlabel="useful tokens per CPU second")


def _slots(axes: Any, records: list[dict[str, Any]]) -> None:
    axes.plot([record["slots"] for record in records], [per_cpu_s(record) for record in records], marker="o")
    axes.set_xscale("log", base=2)
    axes.set(title="By slots", xlabel="slots", ylabel="tokens per CPU second", ylim=(0, None))
    axes.grid(alpha=0.3)


def _variance(axes: Any, records: list[dict[str, Any]]) -> None:
    records = sorted(records, key=lambda record: record["variation"])
    axes.plot([record["variation"] for record in records], [gain(record)[1] for record in records], marker="o")
    axes.axhline(1, color="black", linestyle=":")
    axes.set(title="Gain over static batches", xlabel="answers' lengths: deviation / mean", ylabel="tokens per CPU second, ratio", ylim=(0, None))
    axes.grid(alpha=0.3)


def _prefill(axes: Any, record: dict[str, Any]) -> None:
    for k, found in enumerate((record["outside"], record["inside"])):
        bars = axes.bar([k - 0.2, k + 0.2], [found["p50"], found["p99"]], width=0.36, color=["C0", "C7"], label=["p50", "p99"] if not k else None)
        axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set(title=f"Beside a prompt of {record['long_tokens']:,} tokens", ylabel="between tokens, ms")
    axes.set_xticks([0, 1], ["without", "with it"])
    axes.margins(y=0.12)
    axes.legend()


PANELS = {"compare": _compared, "slots": _slots, "variance": _variance, "prefill": _prefill}
