"""The cost of calling another process: gpuworker beside a C floor and the usual ways, interleaved in one run.

Prints markdown tables, writes them with a JSON file of every cell and a PNG to bench/results/, and ends with one line of JSON.

    python bench/ipc_overhead.py [--quick] [--rounds N] [--only pipe,pyzmq,...] [--patience SECONDS] [--output DIR]

What else runs on the machine outweighs most differences here, so each cell says what it saw, and waits a moment for the others to finish.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: the harness forks, and must have one thread

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ipc import machine, output, plot, report
from ipc.cells import Cell, Timing, plan
from ipc.contestant import Contestant
from ipc.contestants import ALL
from ipc.harness import run_cell
from ipc.statistics import Results
from ipc.targets import evaluate, measure_import_ms

_LONGEST_WAIT_S = 3.0
_QUICK = Timing(warm_up_s=0.15, measured_s=0.3, idle_s=1.5, limit_s=15)


def main() -> None:
    options = _options()
    contestants = [kind for kind in ALL if not options.only or kind.name in options.only]
    machine.adopt_orphans()
    began = time.monotonic()
    results, cells = _measure(contestants, options)
    import_ms = measure_import_ms() if any(kind.ours for kind in contestants) else None
    targets = evaluate(results, import_ms)
    tables = report.Report(results, contestants, cells)
    about = machine.description()
    title = f"## IPC overhead: {about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python {about['python']}, {options.rounds} round(s)"
    text = "\n\n".join([title, tables.sections(), tables.notes(), report.targets_table(targets)])
    print(text)
    headline = {"machine": about, "rounds": options.rounds, "wall_s": round(time.monotonic() - began), **report.headline(results, targets)}
    figures = {**headline, "records": [{**record, "cell": asdict(record["cell"])} for record in results.records]}
    output.write(options.output, "ipc", text, figures, lambda path: plot.draw(results, contestants, headline["machine"], path))
    print("\n" + json.dumps(headline))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of the cells that the targets need, shorter (about a minute)")
    parser.add_argument("--rounds", type=int, help="how often every cell is measured (3; 1 with --quick)")
    parser.add_argument("--only", type=lambda text: set(text.split(",")), default=set(), help="names: " + ",".join(kind.name for kind in ALL))
    parser.add_argument("--patience", type=float, help="seconds of a run to spend waiting for a quiet machine (90; 15 with --quick)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON, the tables and the PNG")
    options = parser.parse_args()
    if unknown := options.only - {kind.name for kind in ALL}:
        parser.error(f"no such contestant: {', '.join(sorted(unknown))}")
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.patience = (15.0 if options.quick else 90.0) if options.patience is None else options.patience
    return options


def _measure(contestants: list[type[Contestant]], options: argparse.Namespace) -> tuple[Results, list[Cell]]:
    """Round by round, cell by cell, one contestant after the other: what changes on the machine meanwhile meets all of them."""
    timing = _QUICK if options.quick else Timing()
    unavailable = {kind.name: reason for kind in contestants if (reason := _unavailable(kind))}
    cells = plan(options.quick, every_placement=True)
    of_everybody = set(plan(options.quick, every_placement=False))
    records: list[dict[str, Any]] = []
    patience_s = options.patience
    for number in range(options.rounds):
        for position, cell in enumerate(cells):
            if cell.idle and number:
                continue  # nothing random about an idle process
            for kind in contestants:
                if cell not in of_everybody and not (kind.ours or kind.is_floor):
                    continue
                output.progress(f"round {number + 1}/{options.rounds}, cell {position + 1}/{len(cells)}: {cell.title}: {kind.title}")
                patience_s -= machine.wait_for_quiet(min(patience_s, _LONGEST_WAIT_S))
                reason = unavailable.get(kind.name)
                measured = {"error": reason} if reason else run_cell(kind, cell, timing)
                records.append({"round": number, "contestant": kind.name, "cell": cell, **measured})
    output.progress("")
    return Results(records), cells


def _unavailable(kind: type[Contestant]) -> str:
    try:
        kind.prepare()
    except Exception as error:  # whatever a contestant lacks, the others run
        return str(error) or type(error).__name__
    return ""


if __name__ == "__main__":
    main()
