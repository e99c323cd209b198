"""Padded tokens for each real one with learned length boundaries, beside the usual ones: learned on the first half of a trace, tested on the second.

A trace is a CSV or JSONL file with a column ContextTokens or input_length (the Azure LLM inference and Mooncake traces). Prints a markdown table for each.

    python bench/padding.py TRACE... [--max-length N] [--histograms FILE]
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import numpy as np

from gpuworker.scheduling.boundaries import best_boundaries, geometric, padding
from gpuworker.scheduling.learning import BoundaryLearner

_K = (4, 8, 16)
_COLUMNS = ("ContextTokens", "input_length", "num_prefill_tokens", "length")
_RELEARN_EVERY = 500  # requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--max-length", type=int, help="the last boundary (the longest length of the trace)")
    parser.add_argument("--histograms", type=Path, metavar="FILE", help="also write histograms of both halves as JSON; the tests have such a file")
    options = parser.parse_args()
    histograms = {}
    for path in options.traces:
        lengths = read_lengths(path)
        print(table(path.stem, lengths, options.max_length or int(lengths.max())), end="\n\n", flush=True)
        histograms[path.stem] = [histogram(half) for half in halves(lengths)]
    if options.histograms:
        options.histograms.write_text(_compact(histograms))


def read_lengths(path: Path) -> np.ndarray:
    with path.open() as file:
        rows = list(map(json.loads, file)) if path.suffix == ".jsonl" else list(csv.DictReader(file))
    column = next(name for name in _COLUMNS if name in rows[0])
    lengths = np.array([int(row[column]) for row in rows])
    return lengths[lengths > 0]


def halves(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :]


def table(name: str, lengths: np.ndarray, top: int) -> str:
    first, second = halves(lengths)
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99)).astype(int)
    relearned = [relearn(lengths, k, top) for k in _K]
    rows = {
        "learned (BoundaryLearner)": [padded(second, learn(first, k, top)) for k in _K],
        f"relearned every {_RELEARN_EVERY} requests": [ratio for ratio, _ in relearned],
        "best for the second half": [padded(second, best_boundaries(second, np.ones_like(second), k)) for k in _K],
        "quantiles": [padded(second, (*np.quantile(first, np.arange(1, k) / k).astype(int), top)) for k in _K],
        "uniform": [padded(second, (*np.linspace(top / k, top, k).astype(int)[:-1], top)) for k in _K],
    }
    powers, grown = powers_of_two(top), geometric(top, 1.25)
    lines = [
        f"### {name}: {len(lengths)} requests, lengths p50/p90/p99/max {p50}/{p90}/{p99}/{lengths.max()}, last boundary {top}",
        "",
        f"powers of two (K={len(powers)}): {padded(second, powers):.3f}; geometric 1.25 (K={len(grown)}): {padded(second, grown):.3f}",
        "",
        "| padded/real | " + " | ".join(f"K={k}" for k in _K) + " |",
        "|---" * (1 + len(_K)) + "|",
        *(f"| {label} | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |" for label, ratios in rows.items()),
        "",
        f"learned K=8: {learn(first, 8, top)}; changes while relearning: {', '.join(str(changes) for _, changes in relearned)}",
    ]
    return "\n".join(lines)


def padded(lengths: np.ndarray, boundaries: tuple[int, ...]) -> float:
    return padding(lengths, np.ones_like(lengths), boundaries)


def powers_of_two(top: int) -> tuple[int, ...]:
    return tuple(2**exponent for exponent in range(4, (top - 1).bit_length() + 1))


def learner_of(lengths: np.ndarray, k: int, top: int | None = None) -> BoundaryLearner:
    learner = BoundaryLearner(k, max_length=top)
    for length in lengths.tolist():
        learner.observe(length)
    return learner


def learn(lengths: np.ndarray, k: int, top: int) -> tuple[int, ...]:
    return learner_of(lengths, k, top).propose() or (top,)


def relearn(lengths: np.ndarray, k: int, top: int) -> tuple[float, int]:
    """Padding of the second half with the boundaries that were in force when each request came, and how often they changed."""
    learner, boundaries, changes, tokens = BoundaryLearner(k, max_length=top), (top,), 0, 0
    for at in range(0, len(lengths), _RELEARN_EVERY):
        part = lengths[at : at + _RELEARN_EVERY]
        tested = part[max(len(lengths) // 2 - at, 0) :]
        tokens += padded(tested, boundaries) * tested.sum() if tested.size else 0
        for length in part.tolist():
            learner.observe(length)
        proposed = learner.propose(boundaries)
        boundaries, changes = proposed or boundaries, changes + (proposed is not None)
    return tokens / halves(lengths)[1].sum(), changes


def histogram(lengths: np.ndarray) -> dict[str, object]:
    """Bins as the learner has them, and the exact sum, so that nothing is gained by rounding the real tokens up."""
    ends, counts = learner_of(lengths, 1).histogram()
    return {"tokens": int(lengths.sum()), "lengths": ends.tolist(), "counts": counts.astype(int).tolist()}


def _compact(histograms: dict[str, list[dict[str, object]]]) -> str:
    return json.dumps(histograms, separators=(",", ":")).replace('"tokens"', '\n"tokens"') + "\n"


if __name__ == "__main__":
    main()
