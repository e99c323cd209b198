"""The markdown tables, the comparison in one line, and the words around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipc.cells import FREE, ONE_CORE, TWO_CORES, Cell
from ipc.contestant import Contestant
from ipc.statistics import QUIET_CORES, Results
from ipc.targets import ADAPTIVE, FLOOR, FLOORS, IDLE, LOADED, OURS, Target

_PLACEMENT_WORDS = {
    ONE_CORE: "client and server pinned to the same core",
    TWO_CORES: "client pinned to one core, server to another",
    FREE: "nothing pinned",
}
_NONE = "-"


def number(value: float | None) -> str:
    """Three significant digits as people read them: 0.123, 4.56, 78.9, 1,234, 0.00123."""
    if value is None:
        return _NONE
    if value >= 100:
        return f"{value:,.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3 if value >= 0.01 or not value else 5
    return f"{value:.{digits}f}"


def spread(values: Sequence[float]) -> str:
    """The least and the greatest of several rounds."""
    return f"{number(min(values))}..{number(max(values))}" if len(values) > 1 else _NONE


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, padded so that it also reads well in a terminal; all columns but the first to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [[row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))] for row in (header, *rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (padded[0], rule, *padded[1:]))


class Report:
    """Tables of one run. `contestants`: those that took part, in any order."""

    def __init__(self, results: Results, contestants: Sequence[type[Contestant]], cells: Sequence[Cell]) -> None:
        self.results, self.contestants, self.cells = results, contestants, cells

    def sections(self) -> str:
        """Every table: latency per payload and placement, load per number of clients, idle."""
        parts = []
        for cell in self.cells:
            if cell.idle:
                parts.append(self._idle(cell))
            elif cell.clients == 1:
                parts.append(self._latency(cell))
            if cell.payload_bytes == LOADED.payload_bytes and not cell.idle and cell.placement == FREE:
                parts.append(self._load(cell))
        return "\n\n".join(parts)

    def _latency(self, cell: Cell) -> str:
        header = ("contestant", "p50 µs", "p99 µs", "p50 of rounds", "p50 / C floor", "foreign cores")

        def row(name: str) -> tuple[str, ...]:
            return (
                number(self.results.median(name, cell, "p50_us")),
                number(self.results.median(name, cell, "p99_us")),
                spread(self.results.values(name, cell, "p50_us")),
                number(self.results.ratio(name, FLOOR, cell, "p50_us")),
                self._foreign(name, cell),
            )

        return self._table(f"Round trip: {cell.title}", cell, header, row, "p50_us")

    def _load(self, cell: Cell) -> str:
        header = ("contestant", "requests/s", "of rounds", "p99 µs", "CPU-s/100k", "slowest/mean", "x pyzmq", "foreign cores")

        def row(name: str) -> tuple[str, ...]:
            return (
                number(self.results.median(name, cell, "requests_per_s")),
                spread(self.results.values(name, cell, "requests_per_s")),
                number(self.results.median(name, cell, "p99_us")),
                number(self.results.median(name, cell, "cpu_s_per_100k")),
                number(self.results.median(name, cell, "fairness")),
                number(self.results.ratio(name, "pyzmq", cell, "requests_per_s")),
                self._foreign(name, cell),
            )

        return self._table(f"Throughput: {cell.title}", cell, header, row, "requests_per_s", descending=True)

    def _idle(self, cell: Cell) -> str:
        def row(name: str) -> tuple[str, ...]:
            return (f"{100 * (self.results.median(name, cell, 'server_cores') or 0):.2f} %", self._foreign(name, cell))

        return self._table(f"Idle owner: {cell.title}", cell, ("contestant", "of a core", "foreign cores"), row, "server_cores")

    def _table(self, title: str, cell: Cell, header: Sequence[str], row: Any, metric: str, descending: bool = False) -> str:
        def figure(kind: type[Contestant]) -> float:
            return self.results.median(kind.name, cell, metric) or 0.0

        measured = [kind for kind in self.contestants if self.results.values(kind.name, cell, metric)]
        measured.sort(key=figure, reverse=descending)
        rows = [(f"**{kind.title}**" if kind.ours else kind.title, *row(kind.name)) for kind in measured]
        reasons = [(kind.title, self.results.error(kind.name, cell)) for kind in self.contestants]
        failed = [f"- {title}: n/a, {reason}" for title, reason in reasons if reason]
        lines = [f"### {title}", "", f"Placement: {_PLACEMENT_WORDS[cell.placement]}.", "", markdown(header, rows)]
        return "\n".join([*lines, *(["", *failed] if failed else [])])

    def _foreign(self, name: str, cell: Cell) -> str:
        cores = self.results.values(name, cell, "foreign_cores")
        return f"{max(cores):.2f}" if cores else _NONE

    def notes(self) -> str:
        """How each contestant was run, and how to read the tables."""
        quiet = f"Medians over the rounds in which others used at most {QUIET_CORES} cores; over all rounds where there was none such."
        foreign = "foreign cores: CPU that processes outside the cell used meanwhile, the largest of the rounds that count."
        floor = "p50 / C floor: to the sem_t floor of the same payload and placement, in the same round."
        return "\n".join(["### Notes", "", *(f"- {line}" for line in (quiet, foreign, floor)), *(f"- {k.title}: {k.note}" for k in self.contestants)])


def targets_table(targets: Sequence[Target]) -> str:
    """Each target, what was measured, and the verdict."""
    rows = [(t.title, f"{t.comparison} {number(t.limit)}", number(t.measured), t.verdict, number(t.foreign_cores)) for t in targets]
    return "### Targets\n\n" + markdown(("target", "limit", "measured", "verdict", "foreign cores"), rows)


def headline(results: Results, targets: Sequence[Target]) -> dict[str, Any]:
    """The comparison in a few numbers; every ratio is "how many times better ours is", adaptive unless named."""

    def rounded(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.3g}")

    small = Cell(64)
    peers = sorted({record["contestant"] for record in results.records} - {*FLOORS, *OURS})
    return {
        "p50_us_64B": {name: {p: rounded(results.median(name, Cell(64, 1, p), "p50_us")) for p in _PLACEMENT_WORDS} for name in (*FLOORS, *OURS)},
        "over_floor_64B": {name: {p: rounded(results.ratio(name, FLOOR, Cell(64, 1, p), "p50_us")) for p in _PLACEMENT_WORDS} for name in OURS},
        "faster_than_64B_free": {peer: rounded(results.ratio(peer, ADAPTIVE, small, "p50_us")) for peer in peers},
        "faster_than_1MiB_free": {peer: rounded(results.ratio(peer, ADAPTIVE, Cell(1 << 20), "p50_us")) for peer in peers},
        "requests_per_s_16_clients_over": {peer: rounded(results.ratio(ADAPTIVE, peer, LOADED, "requests_per_s")) for peer in peers},
        "requests_per_s_16_clients": {name: rounded(results.median(name, LOADED, "requests_per_s")) for name in OURS},
        "cpu_s_per_100k_16_clients": {name: rounded(results.median(name, LOADED, "cpu_s_per_100k")) for name in OURS},
        "idle_owner_cores": {name: rounded(results.median(name, IDLE, "server_cores")) for name in OURS},
        "targets": {verdict: sum(t.verdict == verdict for t in targets) for verdict in ("met", "missed", "n/a")},
        "missed": [t.title for t in targets if t.verdict == "missed"],
        "judged_on_a_busy_machine": sum((t.foreign_cores or 0) > QUIET_CORES for t in targets),
    }
