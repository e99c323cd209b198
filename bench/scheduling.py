"""Scheduling: how near to the exact optimum, how near the real worker is to the simulator, and what a decision costs.

Three parts: (1) simulated, the share of the requests that any schedule could have answered in time which each policy does answer in time; (2) a real worker,
whose handler sleeps as long as a GPU would run, under the same arrivals as the simulator; (3) the CPU time of one decision. Prints markdown tables, the
targets last, and writes them with a JSON file and a PNG to bench/results/.

    python bench/scheduling.py [--quick] [--trace FILE ...] [--scale X] [--part ratios,live,decisions] [--seed N] [--output DIR]

--trace takes recorded arrivals in the formats of `gpuworker simulate`, e.g. the Azure LLM inference traces of code and of conversations.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: the frontends are forked

import argparse
from pathlib import Path
from typing import Any

from ipc import machine, output, report
from serving import decisions, live, plot, ratios, workload

PARTS = ("ratios", "live", "decisions")


def main() -> None:
    options = _options()
    machine.adopt_orphans()
    records: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    if "ratios" in options.part:
        output.progress("ratios to the optimum, simulated")
        records["ratios"] = ratios.measure(workload.to_compare(options.trace), 4_000 if options.quick else 20_000, options.seed)
    if "decisions" in options.part:
        output.progress("decisions")
        machine.wait_for_quiet(5)
        records["decisions"] = decisions.measure(500 if options.quick else 2_000, options.seed)
    if "live" in options.part:
        records["live"] = _drive(options)
    output.progress("")
    about = machine.description()
    parts = {"ratios": ratios, "live": live, "decisions": decisions}
    targets = [target for part, module in parts.items() for target in module.targets(records[part])]
    title = f"## Scheduling: {about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python {about['python']}"
    tables = [module.table(records[part]) for part, module in parts.items() if records[part]]
    text = "\n\n".join([title, *tables, report.targets_table(targets)])
    print(text)
    figures = {"machine": about, "seed": options.seed, "scale": options.scale, **records}
    output.write(options.output, "scheduling", text, figures, lambda path: plot.draw(records["ratios"], records["live"], about, path))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests (half a minute)")
    parser.add_argument("--trace", type=Path, nargs="+", default=[], metavar="FILE", help="recorded arrivals")
    parser.add_argument(
        "--scale", type=float, default=4.0, help="the real worker's times are so many times longer than T(b) = 5 + 0.25 b ms (default: 4)"
    )
    parser.add_argument("--part", type=lambda text: text.split(","), default=list(PARTS), metavar="P,...", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--seed", type=int, default=1, help="of the synthetic arrivals (default: 1)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON, the tables and the PNG")
    options = parser.parse_args()
    if unknown := set(options.part) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if not options.scale > 0:
        parser.error("--scale: give a number above 0")
    return options


def _drive(options: argparse.Namespace) -> list[dict[str, Any]]:
    count = 1_200 if options.quick else 4_000
    found = []
    for one, policy in workload.to_drive(options.trace):
        output.progress(f"real worker: {one.title}, {policy}")
        machine.wait_for_quiet(3)
        found.append(live.drive(one, policy, options.scale, count, options.seed))
    return found


if __name__ == "__main__":
    main()
