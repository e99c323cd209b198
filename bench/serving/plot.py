"""The picture: ratios to the optimum, and the worker beside the simulator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_OURS, _REAL, _OTHERS = "#d1495b", "#3d3d3d", ("#8fa8bf", "#5f86a6", "#b9c9d6", "#456a86", "#a3b18a", "#d9b382")


def draw(ratios: Sequence[dict[str, Any]], live: Sequence[dict[str, Any]], machine: dict[str, Any], path: Path) -> None:
    """Writes the PNG. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    if ratios:
        names = list(ratios[0]["ratios"])
        colours = [_OURS, "#e58a97", *_OTHERS]
        _groups(left, [record["workload"] for record in ratios], {name: [record["ratios"][name] for record in ratios] for name in names}, colours)
        left.set_title("in time, as a share of the optimum (simulated; bar in black: target)", loc="left", fontsize=11)
        for place, record in enumerate(ratios):
            if record["limit"]:
                left.hlines(record["limit"], place - 0.45, place + 0.45, color="black", linewidth=1)
    if live:
        sides = {side: [record[side]["goodput"] for record in live] for side in ("worker", "simulator")}
        _groups(right, [record["workload"] for record in live], sides, [_OURS, _REAL])
        right.set_title("answered in time, % of all requests: real worker and simulator, same arrivals", loc="left", fontsize=11)
    figure.suptitle(f"Scheduling. {machine['cpu']}, {machine['cores']} cores, Python {machine['python']}", fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=120)


def _groups(axis: Any, labels: Sequence[str], series: dict[str, list[float]], colours: Sequence[str]) -> None:
    width = 0.85 / len(series)
    for i, (name, values) in enumerate(series.items()):
        axis.bar([place + (i - len(series) / 2 + 0.5) * width for place in range(len(labels))], values, width, label=name, color=colours[i])
    axis.set_xticks(range(len(labels)), [re.sub(r", |_|(?<=[a-z])(?=[A-Z])", "\n", label) for label in labels], fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, ncol=4, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)
