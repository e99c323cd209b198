"""Prometheus' text format 0.0.4: families of samples to lines. https://prometheus.io/docs/instrumenting/exposition_formats/

Of our own, as it is these few lines: a client library keeps the numbers itself, and ours are in the segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpuworker.segment.stats import Stats

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KEPT_TEMPLATES = 64


class Row(NamedTuple):
    """One sample of a family, but for its value: what follows the family's name, and the labels behind `worker`, each after a comma. A %s in them is to be
    filled in, too."""

    suffix: str = ""
    labels: str = ""


class Family(NamedTuple):
    """One metric. `values`: of one worker, what `rows` leave open, in their order; None: it has no such thing."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    rows: tuple[Row, ...]
    values: Callable[[Stats], Sequence[float | str] | None]


def escaped(label: str) -> str:
    """The value of a label as it is written between quotes; what does not print becomes a space."""
    return "".join(c if c.isprintable() else " " for c in label).replace("\\", "\\\\").replace('"', '\\"')


def heading(family: Family) -> str:
    """The lines before a family's samples."""
    return f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n"


class Writer:
    """Writes families, in their order. Keeps the text around the numbers, which is the same from one time to the next."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families
        self._templates: dict[tuple[tuple[str, ...], tuple[bool, ...]], str] = {}

    def write(self, workers: Sequence[Stats]) -> str:
        """The text. A family of which no worker has samples is left out."""
        flat: list[float | str] = []
        present: list[bool] = []
        for family in self._families:
            for stats in workers:
                values = family.values(stats)
                present.append(values is not None)
                flat += values or ()
        key = tuple(stats.name for stats in workers), tuple(present)
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= KEPT_TEMPLATES:
                self._templates.clear()
            template = self._templates[key] = self._template(*key)
        return template % tuple(flat)

    def _template(self, workers: Sequence[str], present: Sequence[bool]) -> str:
        parts: list[str] = []
        has_samples = iter(present)
        for family in self._families:
            rows = [
                f'{family.name}{row.suffix}{{worker="{worker}"{row.labels}}} %s\n' for worker in workers if next(has_samples) for row in family.rows
            ]
            if rows:
                parts += [heading(family).replace("%", "%%"), *rows]
        return "".join(parts)
