"""The table at the end: every way to have the same texts embedded, measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .fleet import Result
from .show import say, table
from .usage import cores

HEADER = ("way", "texts", "requests/s", "p50 ms", "p99 ms", "mean batch", "CPU ms", "models", "MB", "others")
BUSY = 0.1  # share of the machine taken by others from which on the speeds are not to be trusted


@dataclass(frozen=True)
class Row:
    label: str
    texts: int
    per_s: float
    p50_ms: float
    p99_ms: float
    batch: float
    cpu_ms: float  # of the whole service, per text
    models: int
    pss_bytes: int
    foreign: float  # share of the machine that other processes had meanwhile

    @classmethod
    def of(cls, label: str, result: Result, batch: float) -> Row:
        texts = len(result.latency_ms)
        p50_ms, p99_ms = (float(quantile) for quantile in np.percentile(result.latency_ms, (50, 99)))
        cpu_ms, foreign = result.cpu_s / texts * 1e3, result.foreign / cores()
        return cls(label, texts, texts / result.seconds, p50_ms, p99_ms, batch, cpu_ms, result.memory.models, result.memory.pss_bytes, foreign)

    @property
    def cells(self) -> tuple[str, ...]:
        measured = (f"{self.per_s:.0f}", f"{self.p50_ms:.1f}", f"{self.p99_ms:.1f}", f"{self.batch:.1f}", f"{self.cpu_ms:.1f}")
        return (self.label, str(self.texts), *measured, str(self.models), f"{self.pss_bytes / 1e6:.0f}", f"{self.foreign:.0%}")


def report(at_once: Row, rows: list[Row], own: Row) -> None:
    """Prints the table, and how each of `rows` compares with `own`, a model in each process; whoever is ahead."""
    table(HEADER, [row.cells for row in (at_once, *rows, own)])
    say("CPU ms per text and MB (proportional set size) are those of all processes of the service, HTTP clients left out.")
    say("Models: processes with torch loaded. Others: share of the machine that other programs had meanwhile.")
    say("client.map has many requests under way at a time: larger batches, and a longer wait for each.")
    if any(row.foreign > BUSY for row in (*rows, own)):
        say("Other programs kept this machine busy: the CPU time per text compares the ways better than their speed does.")
    say(f"\nAgainst {own.label}:")
    for row in rows:
        figures = (
            (row.per_s / own.per_s, "the requests/s"),
            (row.p50_ms / own.p50_ms, "the p50"),
            (row.p99_ms / own.p99_ms, "the p99"),
            (row.cpu_ms / own.cpu_ms, "the CPU time"),
            (row.pss_bytes / own.pss_bytes, "the memory"),
        )
        say(f"  {row.label}: " + ", ".join(f"{ratio:.2f}x {what}" for ratio, what in figures))
