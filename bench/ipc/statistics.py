"""The arithmetic of the report: percentiles, fairness, medians over rounds, ratios within rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from ipc.cells import Cell

QUIET_CORES = 0.3  # a cell during which others used more than this is left out where a quieter round exists


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the ascending `ordered` do not exceed (nearest rank). Raises ValueError when empty."""
    if not len(ordered):
        raise ValueError("no values")
    rank = -(-len(ordered) * percent // 100)
    return float(ordered[max(0, int(rank) - 1)])


def fairness(calls: Sequence[int]) -> float:
    """The slowest client's calls over the mean of the others; 1 for a lone client."""
    if len(calls) < 2:
        return 1.0
    slowest = min(calls)
    others = sum(calls) - slowest
    return slowest * (len(calls) - 1) / others if others else 1.0


class Results:
    """Records of all rounds: dicts with round, contestant, cell, and either metrics or "error"."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self.records = list(records)
        self._by_key: dict[tuple[str, Cell], list[dict[str, Any]]] = {}
        for record in self.records:
            self._by_key.setdefault((record["contestant"], record["cell"]), []).append(record)

    def error(self, contestant: str, cell: Cell) -> str:
        """Why there is no figure, or ""."""
        return next((record["error"] for record in self._by_key.get((contestant, cell), []) if "error" in record), "")

    def measured(self, contestant: str, cell: Cell) -> dict[int, dict[str, Any]]:
        """Round -> metrics; only the quiet rounds where there are any."""
        rounds = {record["round"]: record for record in self._by_key.get((contestant, cell), []) if "error" not in record}
        quiet = {number: record for number, record in rounds.items() if record["foreign_cores"] <= QUIET_CORES}
        return quiet or rounds

    def values(self, contestant: str, cell: Cell, metric: str) -> list[float]:
        """One value per round that counts."""
        return [record[metric] for record in self.measured(contestant, cell).values()]

    def median(self, contestant: str, cell: Cell, metric: str) -> float | None:
        """The median over rounds, or None where nothing was measured."""
        values = self.values(contestant, cell, metric)
        return median(values) if values else None

    def ratio(self, contestant: str, other: str, cell: Cell, metric: str) -> float | None:
        """contestant / other: the median of the ratios within a round; of the medians where no round has both."""
        ours, theirs = self.measured(contestant, cell), self.measured(other, cell)
        within = [ours[number][metric] / theirs[number][metric] for number in ours.keys() & theirs.keys() if theirs[number][metric]]
        if within:
            return median(within)
        numerator, denominator = self.median(contestant, cell, metric), self.median(other, cell, metric)
        return numerator / denominator if numerator is not None and denominator else None
