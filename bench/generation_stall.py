"""What those who decode notice of a long prompt: the same answers streamed with one beside and without, in turn, and the same tokens of them compared."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from generation_runs import quantiles, worker
from generation_work import Subject, cut

from examples.llm_chat.fleet import Served, serve
from examples.llm_chat.work import Request

FRONTENDS = 4


class Window(NamedTuple):
    """Of one round: ms between tokens, and from when to when in ns of CLOCK_MONOTONIC."""

    gaps_ms: list[float]
    begin_ns: int
    end_ns: int


def beside_a_long_prompt(subject: Subject, slots: int, long_tokens: int, tokens: int, at_s: float, rounds: int) -> dict[str, Any]:
    """slots - 1 answers of `tokens` tokens are streamed; in every second turn a prompt of long_tokens comes at_s seconds later. What counts is the time between
    those tokens that came while it was computed, and between the same tokens of the same answers in the turn before. At the end of a round such a prompt alone.

    -> outside, inside: p50 and p99 in ms, without and with it, of all rounds; stalls: p99 with / without, of each; gaps: of the side that has fewer; prefill_ms: to
    the prompt's first token, in each round; alone_ms: that of one with nobody beside; step_outside, step_inside: CPU ms of the owner's steps meanwhile."""
    choice = random.Random(4)
    rows = [Request(cut(subject.ids, 24, choice), tokens) for _ in range(slots - 1)]
    starts = choice.sample(range(len(subject.ids)), 2 * rounds)  # no two prompts begin alike, or the second would find the first one's blocks
    turns: list[tuple[Window, Window]] = []
    prefill_ms, alone_ms = [], []
    with worker(subject, slots) as running:
        for number in range(rounds):
            long, other = (Request(_from(subject.ids, start, long_tokens), 1) for start in starts[2 * number :][:2])
            without = serve(running.name, rows, frontends=min(FRONTENDS, slots), at_s=[0.0] * len(rows))
            served = serve(running.name, [*rows, long], frontends=min(FRONTENDS, slots), at_s=[0.0] * len(rows) + [at_s])
            prefill_ms.append(served.first_ms()[-1])
            turns.append(_windows(without, served))
            alone_ms += serve(running.name, [other], frontends=1).first_ms()
    inside, outside = ([gap for turn in turns for gap in turn[side].gaps_ms] for side in (1, 0))
    cpu_ms = [
        quantiles([step.total_ns / 1e6 for step in running.steps if any(turn[side].begin_ns < step.end_ns <= turn[side].end_ns for turn in turns)])
        for side in (0, 1)
    ]
    return {
        "long_tokens": long_tokens,
        "rows": len(rows),
        "gaps": min(len(inside), len(outside)),
        "outside": quantiles(outside),
        "inside": quantiles(inside),
        "stalls": [_p99(turn[1].gaps_ms) / _p99(turn[0].gaps_ms) for turn in turns if turn[1].gaps_ms],
        "prefill_ms": prefill_ms,
        "alone_ms": alone_ms,
        "step_outside": cpu_ms[0],
        "step_inside": cpu_ms[1],
    }


def _windows(without: Served, served: Served) -> tuple[Window, Window]:
    sent_ns, (first_ns,) = served.sent_ns[-1], served.times_ns[-1]
    gaps: tuple[list[float], list[float]] = [], []
    begins, ends = [], []
    for before, times in zip(without.times_ns, served.times_ns[:-1], strict=True):
        meanwhile = [k for k, (a, b) in enumerate(pairwise(times)) if a < first_ns and b > sent_ns]
        if not meanwhile:
            continue
        for side, of in enumerate((before, times)):
            gaps[side].extend((of[k + 1] - of[k]) / 1e6 for k in meanwhile)
        begins.append(before[meanwhile[0]])
        ends.append(before[meanwhile[-1] + 1])
    return Window(gaps[0], min(begins, default=0), max(ends, default=0)), Window(gaps[1], sent_ns, first_ns)


def _p99(values: Iterable[float]) -> float:
    found = quantiles(list(values))
    return found["p99"] if found else float("nan")


def _from(ids: list[int], start: int, count: int) -> list[int]:
    return [ids[(start + i) % len(ids)] for i in range(count)]
