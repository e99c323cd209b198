"""docs/operations.md lists the metrics that there are."""

import pathlib

from gpuworker.metrics.families import FAMILIES, UP

DOC = pathlib.Path(__file__).parent.parent / "docs" / "operations.md"


def unit_of(family):
    words = family.name.removesuffix("_total").split("_")
    return next((unit for unit in ("seconds", "bytes", "tokens", "ratio") if unit in words[-2:]), "")


def row_of(family):
    labels = ", ".join(label for label in family.labels if label != "le")
    return f"| `{family.name}` | {family.kind} | {unit_of(family)} | {labels} | {family.help} |"


def test_the_table_is_that_of_the_metrics():
    rows = [row_of(family) for family in (UP, *FAMILIES)]
    written = [line for line in DOC.read_text().splitlines() if line.startswith("| `gpuworker_")]
    assert written == rows, "the table in docs/operations.md should be:\n" + "\n".join(rows)
