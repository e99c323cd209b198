"""Generation: continuous batching of a language model by one owner, against what others make of the same requests.

Seven parts: (1) exact: in float32, together and alone; (2) compare: 64 requests with prompts and answers of 8 to 128 tokens, all sent at once by 16 forked
frontends, 16 slots, against transformers' static batches and its continuous batching, and vllm and llama.cpp where they are installed; (3) slots: the same for
1 to 64 slots, with what the owner spends beside the model, and what its cache wastes; (4) waste: the latter for short and for long requests, without a model;
(5) variance: the gain over static batches by how much the answers' lengths differ; (6) prefill: the time between tokens while a prompt of 4,000 tokens is computed,
and without; (7) trace: recorded requests at several loads, where there is a --trace.
Prints markdown tables, the targets last, and writes them with a JSON file and a PNG to bench/results/.

    python bench/generation.py [--quick] [--part exact,compare,...] [--trace FILE] [--shrink N] [--rounds N] [--against static,continuous,others] [--output DIR]

One thread of torch each, greedy, every answer of just as many tokens as are asked for. Where others use the machine tokens per CPU second are to be trusted more
than tokens per second. --quick has a tiny model with random weights, and few requests: it shows that all works, and its figures mean nothing.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the owner and of all others
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import generation_report
import generation_runs as runs
import generation_work as work
from generation_plot import chart
from generation_stall import beside_a_long_prompt
from generation_waste import waste_of
from ipc import machine, output, report

PARTS = ("exact", "compare", "slots", "waste", "variance", "prefill", "trace")
TINY = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                     max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.15)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """-> the records."""
    options = _options(arguments)
    machine.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="gpuworker-bench-") as folder:
        subject = tiny(folder) if options.quick else work.smollm2()
        records = {part: measure() for part, measure in _measures(subject, options).items() if part in options.part and _said(part)}
    output.progress("")
    about = {**machine.description(), "model": subject.name, "dtype": subject.dtype, **_versions()}
    title = (
        f"## Generation: {subject.name}, {subject.dtype}; {about['cpu']}, {about['cores']} cores, Python {about['python']}, torch {about['torch']}"
    )
    targets = generation_report.targets(records)
    text = "\n\n".join([f"{title}, transformers {about['transformers']}", *generation_report.tables(records), report.targets_table(targets)])
    print(text)
    verdicts = {target.title: {"limit": target.limit, "measured": target.measured, "verdict": target.verdict} for target in targets}
    figures = {"machine": about, "quick": options.quick, "targets": verdicts, **records}
    output.write(options.output, "generation", text, figures, lambda path: chart(figures, path))
    return records


def tiny(folder: str) -> work.Subject:
    """A model that is made here. In a process of its own: this one forks, and must not have torch's threads."""
    subprocess.run([sys.executable, "-c", TINY, folder], check=True, stderr=subprocess.DEVNULL)
    return work.Subject("a tiny random Llama", folder, "float32", [3 + i * 7 % 250 for i in range(400)])


def _measures(subject: work.Subject, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    quick = options.quick
    mix = work.mix(subject.ids, 12, most=24) if quick else work.mix(subject.ids)
    slots = (4, 64) if quick else runs.SLOTS
    few = [type(request)(request.prompt, min(request.max_tokens, 48)) for request in mix[: 6 if quick else 12]]
    measures: dict[str, Callable[[], Any]] = {
        "exact": lambda: runs.exact(subject, few, 4),
        "compare": lambda: runs.compare(subject, mix, 4 if quick else runs.COMPARED, 1 if quick else options.rounds, options.against),
        "slots": lambda: runs.by_slots(subject, mix, slots),
        "variance": lambda: runs.by_variance(
            subject, work.spreads(8 if quick else 32, 8 if quick else 64)[:: 4 if quick else 1], 24, 4 if quick else 16
        ),
        "waste": lambda: [waste_of(8, most, work.mix(subject.ids, most=most), runs.COMPARED) for most in (128, 1000)],
        "prefill": lambda: beside_a_long_prompt(subject, *((4, 300, 150, 0.05, 1) if quick else (runs.COMPARED, 4000, 400, 4.0, options.rounds))),
    }
    if options.trace is not None:
        replay = work.replay(
            options.trace, subject.ids, 6 if quick else options.requests, options.shrink, 256 if quick else work.LONGEST_MODEL_TOKENS
        )
        measures["trace"] = lambda: runs.at_loads(subject, replay, 4 if quick else runs.COMPARED, (0.8,) if quick else (0.4, 0.7, 0.9))
    return measures


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests (a minute or two)")
    parser.add_argument("--part", type=lambda text: text.split(","), default=list(PARTS), metavar="P,...", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=2, help="of the comparison (default: %(default)s)")
    everybody = [*runs.WAYS, runs.OTHERS]
    parser.add_argument(
        "--against", type=lambda text: text.split(","), default=everybody, metavar="A,...", help=f"in the comparison, some of {','.join(everybody)}"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="recorded requests, e.g. the Azure LLM inference trace of conversations")
    parser.add_argument("--requests", type=int, default=48, help="of the trace, its first (default: %(default)s)")
    parser.add_argument("--shrink", type=int, default=4, help="prompts and answers of the trace are so many times shorter (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON, the tables and the PNG")
    options = parser.parse_args(arguments)
    if unknown := set(options.part) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if unknown := set(options.against) - set(everybody):
        parser.error(f"nobody to compare with: {', '.join(sorted(unknown))}")
    if not options.quick and not work.has_smollm2():
        parser.error(f"the model is in the package {work.PACKAGE}, which is not installed: make bench-generation does it; or --quick")
    return options


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {package: version(package) for package in ("torch", "transformers")}


def _said(part: str) -> bool:
    output.progress(part)
    return True


if __name__ == "__main__":
    main()
