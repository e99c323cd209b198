"""Execution of tensors on the CPU: what the owner spends outside `forward`, and what padding, lengths and pipelining cost or bring.

Four parts: (1) rows: batches of 64 rows of 4 KiB and of 256 KiB, gathered and scattered natively, beside a handler of lists and beside bare memcpys; (2) shapes:
requests of different lengths, and batches between two allowed sizes; (3) pipeline: two batches on their way against one; (4) encoder: a Hugging Face encoder,
served, against the same model called directly. In each all contestants take turns, round by round; figures are medians. Prints markdown tables, the targets last,
and writes them with a JSON file to bench/results/.

    python bench/execution.py [--quick] [--part rows,shapes,pipeline,encoder] [--output DIR]

Parts 1 and 2 count the CPU time of the owner's thread, which never waits there, so that what else the machine does disturbs little. torch has one thread, except
in the encoder.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: the encoder's clients are forked
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch, see encoder.py

import argparse
import time
from pathlib import Path
from typing import Any

import execution_pipeline
import execution_rows
import execution_shapes
import torch
from ipc import machine, output, report
from ipc.targets import Target

PARTS = ("rows", "shapes", "pipeline", "encoder")
LONGEST_WAIT_S = 5.0


def main() -> None:
    options = _options()
    machine.adopt_orphans()
    records: dict[str, Any] = {}
    foreign: dict[str, float] = {}
    if "encoder" in options.part:  # first: it forks
        records["encoder"], foreign["encoder"] = _watched("encoder", _encoder, options.quick)
    torch.set_num_threads(1)
    for module in (execution_rows, execution_shapes, execution_pipeline):
        part = module.__name__.removeprefix("execution_")
        if part in options.part:
            records[part], foreign[part] = _watched(part, module.measure, options.quick)
    output.progress("")
    about = {**machine.description(), "torch": torch.__version__}
    title = f"## Execution: {about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python {about['python']}, torch {about['torch']}"
    busy = ", ".join(f"{part} {cores:.2f}" for part, cores in foreign.items())
    tables = [f"Cores that others used meanwhile: {busy}.", *_tables(records)]
    targets = _targets(records, foreign)
    text = "\n\n".join([title, *tables, report.targets_table(targets)])
    print(text)
    verdicts = {target.title: {"limit": target.limit, "measured": target.measured, "verdict": target.verdict} for target in targets}
    output.write(
        options.output, "execution", text, {"machine": about, "foreign_cores": foreign, "quick": options.quick, "targets": verdicts, **records}
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds (half a minute, and what the encoder takes)")
    parser.add_argument("--part", type=lambda text: text.split(","), default=list(PARTS), metavar="P,...", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON and the tables")
    options = parser.parse_args()
    if unknown := set(options.part) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return options


def _watched(part: str, measure: Any, quick: bool) -> tuple[Any, float]:
    """-> what was measured, and the cores that others used meanwhile."""
    output.progress(part)
    machine.wait_for_quiet(LONGEST_WAIT_S)
    began_s, idle_s, own_s = time.monotonic(), machine.idle_s(), _own_s()
    found = measure(quick)
    wall_s = time.monotonic() - began_s
    busy = (os.cpu_count() or 1) - (machine.idle_s() - idle_s) / wall_s
    return found, max(0.0, busy - (_own_s() - own_s) / wall_s)


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _encoder(quick: bool) -> list[dict[str, Any]]:
    import encoder

    return [row._asdict() for row in encoder.measure(quick)]


def _tables(records: dict[str, Any]) -> list[str]:
    modules = (execution_rows, execution_shapes, execution_pipeline)
    tables = [module.table(found) for module in modules if (found := records.get(module.__name__.removeprefix("execution_")))]
    if rows := records.get("encoder"):
        lines = [(row["name"], report.number(row["value"]), row["unit"]) for row in rows]
        tables.append("### A Hugging Face encoder, served and called directly\n\n" + report.markdown(("", "", "unit"), lines))
    return tables


def _targets(records: dict[str, Any], foreign: dict[str, float]) -> list[Target]:
    found = []
    if rows := records.get("rows"):
        found += [Target(t.title, t.comparison, t.limit, t.measured, foreign["rows"]) for t in execution_rows.targets(rows)]
    for row in records.get("encoder", ()):
        if row["target"] is not None:
            found.append(Target(row["name"], ">=", row["target"], row["value"], foreign["encoder"]))
    return found


if __name__ == "__main__":
    main()
