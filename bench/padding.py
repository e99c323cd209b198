"""Padded tokens for each real one with learned length boundaries, beside the usual ones: learned on the first half of a trace, tested on the second.

A trace is a file that gpuworker.testing.traces reads (the Azure LLM inference and Mooncake traces, for example). Prints a markdown table for each. With
--goodput also a simulation of the second half with Poisson arrivals, in which splitting the traffic costs fill: the share of requests on time with
boundaries chosen by padding alone, and with their batches reckoned in.

    python bench/padding.py TRACE... [--max-length N] [--goodput] [--histograms FILE]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np

from gpuworker.scheduling import Queued
from gpuworker.scheduling.boundaries import BatchCost, best_boundaries, padding
from gpuworker.scheduling.joint_budget import JointBudget
from gpuworker.scheduling.learning import BoundaryLearner
from gpuworker.scheduling.run_times import KnownRunTimes
from gpuworker.testing import simulate
from gpuworker.testing.traces import read_trace

_K = (4, 8, 16)
_RELEARN_EVERY = 500  # requests
_GOODPUT_K = (2, 3, 4, 6, 8)
_BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--max-length", type=int, help="the last boundary (the longest length of the trace)")
    parser.add_argument("--goodput", action="store_true", help="also simulate (some 5 s for each trace)")
    parser.add_argument("--histograms", type=Path, metavar="FILE", help="also write histograms of both halves as JSON; the tests have such a file")
    options = parser.parse_args()
    histograms = {}
    for path in options.traces:
        lengths = read_lengths(path)
        top = options.max_length or int(lengths.max())
        print(table(path.stem, lengths, top), end="\n\n", flush=True)
        if options.goodput:
            print(goodput_table(lengths, top), end="\n\n", flush=True)
        histograms[path.stem] = [histogram(half) for half in halves(lengths)]
    if options.histograms:
        options.histograms.write_text(_compact(histograms))


def read_lengths(path: Path) -> np.ndarray:
    lengths = read_trace(path).lengths
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


def geometric(max_length: int, ratio: float, multiple: int = 16) -> tuple[int, ...]:
    """Boundaries that know nothing of the traffic: each `ratio` times the one before, rounded up to a `multiple`; the last is `max_length`."""
    boundaries, at = [], multiple
    while at < max_length:
        boundaries.append(at)
        at = math.ceil(at // multiple * ratio) * multiple
    return (*boundaries, max_length)


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


def goodput_table(lengths: np.ndarray, top: int) -> str:
    """On time of 4000 requests, by what a batch costs (in mean requests), the budget (in full batches T, and the longest request) and the load."""
    first, second = halves(lengths)
    lines = [
        "| a batch costs | budget | load | " + " | ".join(f"K={k}" for k in _GOODPUT_K) + " | batches reckoned in |",
        "|---" * (4 + len(_GOODPUT_K)) + "|",
    ]
    lost = []
    for batch_requests, full_batches, load in product((20, 5, 1), (2, 4), (0.3, 0.5, 0.8)):
        token_ns = 0.25e6 / lengths.mean()
        batch_ns, full_ns = 0.25e6 * batch_requests, 0.25e6 * (batch_requests + _BATCH)
        budget_ns, per_ns = round(full_batches * full_ns + token_ns * top), load * _BATCH / full_ns
        gaps_ns = np.random.default_rng(1).exponential(1 / per_ns, min(len(second), 4000))
        requests = [
            Queued(i, at, length=length) for i, (at, length) in enumerate(zip(gaps_ns.cumsum().astype(int).tolist(), second.tolist(), strict=False))
        ]
        cost_ns = _affine(batch_ns, token_ns)
        ends, weights = learner_of(first, 1, top).histogram()
        batch_cost = BatchCost(batch_ns / token_ns, per_ns * budget_ns, _BATCH)
        chosen = [*(best_boundaries(ends, weights, k, top) for k in _GOODPUT_K), best_boundaries(ends, weights, max(_GOODPUT_K), top, batch_cost)]
        shares = []
        for boundaries in chosen:
            scheduler = JointBudget(KnownRunTimes(cost_ns, _BATCH), max_batch_size=_BATCH, budget_ns=budget_ns, length_buckets=boundaries)
            shares.append(simulate(scheduler, requests, cost_ns, budget_ns=budget_ns).goodput)
        lost.append(max(shares) - np.array(shares))
        cells = " | ".join(f"{share:.3f}" for share in shares)
        lines.append(f"| {batch_requests} requests | {full_batches}T | {load} | {cells} (K={len(chosen[-1])}) |")
    for label, points in (("mean", 100 * np.mean(lost, axis=0)), ("most", 100 * np.max(lost, axis=0))):
        lines.append(f"| points lost to the best of the row | {label} | | " + " | ".join(f"{value:.1f}" for value in points) + " |")
    return "\n".join(lines)


def _affine(batch_ns: float, token_ns: float) -> Callable[[int, int], int]:
    return lambda size, length: round(batch_ns + size * length * token_ns)


def histogram(lengths: np.ndarray) -> dict[str, object]:
    """Bins as the learner has them, and the exact sum, so that nothing is gained by rounding the real tokens up."""
    ends, counts = learner_of(lengths, 1).histogram()
    return {"tokens": int(lengths.sum()), "lengths": ends.tolist(), "counts": counts.astype(int).tolist()}


def _compact(histograms: dict[str, list[dict[str, object]]]) -> str:
    return json.dumps(histograms, separators=(",", ":")).replace('"tokens"', '\n"tokens"') + "\n"


if __name__ == "__main__":
    main()
