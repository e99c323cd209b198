"""The table at the end: every way to have the same texts embedded, measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .fleet import Result
from .show import say, table
from .usage import Memory, cores

HEADER = ("way", "texts", "requests/s", "p50 ms", "p99 ms", "mean batch", "CPU ms each", "models", "memory MB", "others' CPU")


@dataclass(frozen=True)
class Row:
    label: str
    texts: int
    per_s: float
    p50_ms: float
    p99_ms: float
    batch: float
    cpu_ms: float  # of the whole service, per text
    memory: Memory
    foreign: float  # share of the machine that other processes had meanwhile

    @classmethod
    def of(cls, label: str, result: Result, batch: float) -> Row:
        p50_ms, p99_ms = np.percentile(result.latency_ms, (50, 99))
        texts = len(result.latency_ms)
        cpu_ms, foreign = result.cpu_s / texts * 1e3, result.foreign / cores()
        return cls(label, texts, texts / result.seconds, float(p50_ms), float(p99_ms), batch, cpu_ms, result.memory, foreign)

    @property
    def cells(self) -> tuple[str, ...]:
        numbers = (f"{self.per_s:.0f}", f"{self.p50_ms:.1f}", f"{self.p99_ms:.1f}", f"{self.batch:.1f}", f"{self.cpu_ms:.1f}")
        return (self.label, str(self.texts), *numbers, str(self.memory.models), f"{self.memory.pss_bytes / 1e6:.0f}", f"{self.foreign:.0%}")


def report(rows: list[Row], forked: Row, own: Row) -> None:
    """Prints the table, and how one owner compares with a model in each process: the same number of processes, one text at a time each."""
    table(HEADER, [row.cells for row in rows])
    say("CPU and memory (PSS) are those of all processes of the service, HTTP clients left out; models: processes that have torch loaded.")
    if any(row.foreign > 0.1 for row in rows):
        say("Other processes took much of this machine meanwhile: the CPU time per text compares the ways better than their speed does.")
    say(f"One owner against a model in each process: {compare(forked, own)}.")


def compare(forked: Row, own: Row) -> str:
    """Says who is ahead, whoever it is."""
    figures = (
        ("requests/s", forked.per_s / own.per_s, "more", "fewer"),
        ("p50", forked.p50_ms / own.p50_ms, "longer", "shorter"),
        ("p99", forked.p99_ms / own.p99_ms, "longer", "shorter"),
        ("CPU time", forked.cpu_ms / own.cpu_ms, "more", "less"),
        ("memory", forked.memory.pss_bytes / own.memory.pss_bytes, "more", "less"),
    )
    return ", ".join(f"{name} {ratio:.2f}x ({above if ratio > 1 else below})" for name, ratio, above, below in figures)
