"""What `gpuworker stats` shows of a worker that generates."""

import dataclasses

from gpuworker.cli import screen
from gpuworker.cli.generation import generation
from gpuworker.cli.interval import Interval
from gpuworker.segment.generation import COUNTERS, RUNNING_TOTALS, Generation
from tests.test_cli_text import stats

WORDS = {
    "steps": 1000, "tokens": 8000, "prompt_tokens": 3000, "prefix_hit_tokens": 1000, "preemptions": 2, "running": 8, "waiting": 3, "blocks_used": 40,
    "blocks_cached": 5, "blocks_free": 60, "block_tokens": 16, "waste_ppm": 62_500, "graph_hits": 900, "graph_misses": 100, "graphs": 6, "graph_bytes": 3 << 20,
    "answer_ns": 1_500_000_000,
}  # fmt: skip


def found(**changes):
    words = WORDS | changes
    return Generation.of([words[name] for name in COUNTERS])


def test_nothing_where_nothing_generates():
    assert generation(found(block_tokens=0)) == []
    assert not any("generation" in line for line in screen.lines(stats()))


def test_once():
    shown = screen.lines(stats(generation=found()))
    at = shown.index("generation, since the owner's start")
    assert shown[at + 1 : at + 8] == [
        "  tokens     8,000 generated in 1,000 steps",
        "  prompts    3,000 tokens computed, 1,000 found in the cache (25%)",
        "  sequences  8 running, 3 waiting; 2 preemptions",
        "  blocks     40 of 100 used, 5 cached; 6.2% of the used is waste",
        "  answers    lately 1.5 s from request to last token",
        "  graphs     90.0% of decode steps were replays; 6 graphs of 3 MiB",
        "",
    ]


def test_what_there_is_not_is_left_out():
    shown = "\n".join(generation(found(prefix_hit_tokens=0, graph_hits=0, graph_misses=0, graphs=0, answer_ns=0)))
    assert "cache (" not in shown
    assert "graphs" not in shown
    assert "answers" not in shown
    captured = "\n".join(generation(found(graph_hits=0, graph_misses=0)))
    assert "graphs     6 graphs of 3 MiB" in captured  # all of them while nothing was to be done


def test_two_looks_give_rates():
    before, now = stats(generation=found()), stats(generation=found(steps=1100, tokens=8800, prompt_tokens=3000, running=5))
    recent = Interval.between(before, now, 2.0)
    shown = screen.lines(now, recent)
    at = shown.index("generation, in the last 2 s")
    assert shown[at + 1] == "  tokens     800 (400/s) generated in 100 steps (50/s)"
    assert shown[at + 2] == "  prompts    0 tokens computed (0/s)"
    assert shown[at + 3].startswith("  sequences  5 running, 3 waiting; 0 preemptions")
    first = Interval.between(stats(), now, 2.0)
    assert first.stats.generation == now.generation  # it has begun to generate meanwhile


def test_totals_and_states_are_told_apart():
    names = {field.name for field in dataclasses.fields(Generation)}
    assert set(RUNNING_TOTALS) < names
    grown = found(**{name: WORDS[name] + 1 for name in COUNTERS})
    assert {name for name in names if getattr(grown.since(found()), name) == 1} == set(RUNNING_TOTALS)
