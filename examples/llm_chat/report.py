"""The table at the end."""

from __future__ import annotations

from typing import NamedTuple

from examples.semantic_search.show import say, table
from examples.semantic_search.usage import cores

from .fleet import Served
from .rivals import Outcome

HEADER = ("way", "useful tokens/s", "tokens per CPU-s", "tokens computed", "of use", "ours is x, wall", "ours is x, CPU")
BUSY = 0.1


class Row(NamedTuple):
    """count: useful tokens; computed: with those that nobody wanted, None if that is not known."""

    label: str
    count: int
    seconds: float
    cpu_s: float
    computed: int | None

    @property
    def per_s(self) -> float:
        return self.count / self.seconds

    @property
    def per_cpu_s(self) -> float:
        return self.count / self.cpu_s


def rows(served: Served, static: Outcome, continuous: Outcome, slots: int, frontends: int) -> list[Row]:
    """Ours first."""
    return [
        Row(f"gpuworker, {frontends} frontends", served.count, served.seconds, served.cpu_s, served.count),
        Row(f"transformers, static batches of {slots}", static.count, static.seconds, static.cpu_s, static.raw_tokens),
        Row("transformers, continuous batching", continuous.count, continuous.seconds, continuous.cpu_s, continuous.raw_tokens),
    ]


def report(found: list[Row], served: Served) -> None:
    """Prints it, whoever is ahead."""
    ours = found[0]
    table(HEADER, [_cells(row, ours) for row in found])
    say("Useful: tokens that were asked for; a static batch computes all of its rows until the longest answer is there.")
    say("One thread of torch each, one after the other.")
    say(
        f"CPU seconds of gpuworker: owner {served.owner_cpu_s:.1f}, frontends {served.cpu_s - served.owner_cpu_s:.1f}. Each of transformers' is one process."
    )
    say(f"First token after {_p50_p99(served.first_ms())}, the wait for a place included; from then on one every {_p50_p99(served.between_ms())}.")
    if served.foreign > BUSY * cores():
        say(f"Other programs kept {served.foreign:.1f} cores busy: tokens per CPU-s compare the ways better than tokens/s do.")


def _cells(row: Row, ours: Row) -> tuple[str, ...]:
    share = f"{row.count / row.computed:.0%}" if row.computed else "-"
    return (
        row.label,
        f"{row.per_s:.0f}",
        f"{row.per_cpu_s:.0f}",
        f"{row.computed:,}" if row.computed else "-",
        share,
        f"{ours.per_s / row.per_s:.2f}",
        f"{ours.per_cpu_s / row.per_cpu_s:.2f}",
    )


def _p50_p99(values_ms: list[float]) -> str:
    ordered = sorted(values_ms)
    p50, p99 = (ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in (0.5, 0.99))
    return f"{p50:.0f} ms (p50), {p99:.0f} ms (p99)"
