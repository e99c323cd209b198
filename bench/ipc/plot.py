"""The picture: round trip at 64 bytes, throughput and CPU cost with 16 clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ipc.cells import FREE, ONE_CORE, SMALL_BYTES, TWO_CORES, Cell
from ipc.contestant import Contestant
from ipc.report import number
from ipc.statistics import Results
from ipc.targets import LOADED

_OURS, _FLOOR, _OTHERS = "#d1495b", "#3d3d3d", "#8fa8bf"
_MARKS = ((ONE_CORE, "D", "both on one core"), (TWO_CORES, "o", "on two cores"))


def draw(results: Results, contestants: Sequence[type[Contestant]], machine: dict[str, Any], path: Path) -> None:
    """Write the PNG. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(19, 6.2), layout="constrained")
    latencies = _ordered(results, contestants, Cell(SMALL_BYTES, 1, FREE), "p50_us")
    _bars(axes[0], latencies, "round trip of 64 bytes, p50 µs (bar: nothing pinned)", log=True)
    _marks(axes[0], results, [kind for kind, _ in latencies])
    _bars(axes[1], _ordered(results, contestants, LOADED, "requests_per_s", descending=True), "requests/s, 16 clients, 4 KiB")
    _bars(axes[2], _ordered(results, contestants, LOADED, "cpu_s_per_100k"), "CPU-seconds per 100,000 requests, 16 clients, 4 KiB")
    foreign = median(record["foreign_cores"] for record in results.records if "foreign_cores" in record)
    where = f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}"
    figure.suptitle(f"IPC overhead. {where}. Others used {foreign:.2f} cores (median of the cells).", fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _colour(kind: type[Contestant]) -> str:
    return _OURS if kind.ours else _FLOOR if kind.is_floor else _OTHERS


def _ordered(results: Results, contestants: Sequence[type[Contestant]], cell: Cell, metric: str, descending: bool = False) -> list[Any]:
    figures = [(kind, value) for kind in contestants if (value := results.median(kind.name, cell, metric)) is not None]
    return sorted(figures, key=lambda pair: pair[1], reverse=descending)


def _bars(axis: Any, figures: list[Any], title: str, log: bool = False) -> None:
    """Best at the top, the figures in a column at the right edge."""
    axis.barh([kind.title for kind, _ in figures], [value for _, value in figures], color=[_colour(kind) for kind, _ in figures], height=0.72)
    if log:
        axis.set_xscale("log")
    else:
        axis.locator_params(axis="x", nbins=4)
    axis.margins(x=0.22)
    for row, (_, value) in enumerate(figures):
        axis.text(1.0, row, number(value), transform=axis.get_yaxis_transform(), ha="right", va="center", fontsize=9)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=11, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="x", labelsize=8)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.15g}")
    for label, (kind, _) in zip(axis.get_yticklabels(), figures, strict=True):
        label.set_color(_OURS if kind.ours else "black")


def _marks(axis: Any, results: Results, order: list[type[Contestant]]) -> None:
    """The pinned placements over the bars of the first panel."""
    for placement, mark, label in _MARKS:
        cell = Cell(SMALL_BYTES, 1, placement)
        points = [(value, row) for row, kind in enumerate(order) if (value := results.median(kind.name, cell, "p50_us")) is not None]
        if points:
            axis.scatter(*zip(*points, strict=True), marker=mark, s=34, facecolor="white", edgecolor="black", zorder=3, label=label)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="lower left", bbox_to_anchor=(0, -0.14), ncol=2, frameon=False, fontsize=9)
