"""The part of the statistics' screen that is about a worker that generates."""

from __future__ import annotations

from gpuworker.cli.text import count, rate, size, span, table
from gpuworker.segment.generation import Generation


def generation(found: Generation | None, elapsed_s: float | None = None) -> list[str]:
    """Tokens, sequences and blocks; nothing for a worker that does not generate. elapsed_s: of how much time the counts are; None: since the owner's start."""
    if found is None:
        return []

    def per_s(number: int) -> str:
        return f" ({rate(number / elapsed_s)})" if elapsed_s else ""

    in_all = found.blocks_used + found.blocks_free
    rows = [
        ("tokens", f"{found.tokens:,}{per_s(found.tokens)} generated in {count(found.steps, 'step')}{per_s(found.steps)}"),
        ("prompts", prompts(found) + per_s(found.prompt_tokens)),
        ("sequences", f"{found.running:,} running, {found.waiting:,} waiting; {count(found.preemptions, 'preemption')}"),
        ("blocks", f"{found.blocks_used:,} of {in_all:,} used, {found.blocks_cached:,} cached; {found.waste:.1%} of the used is waste"),
    ]  # fmt: skip
    if found.answer_ms:
        rows.append(("answers", f"lately {span(found.answer_ms / 1e3)} from request to last token"))
    replays = found.graph_hits + found.graph_misses
    if found.graphs or replays:
        share = f"{found.graph_hits / replays:.1%} of decode steps were replays; " if replays else ""
        rows.append(("graphs", f"{share}{count(found.graphs, 'graph')} of {size(found.graph_bytes)}"))
    since = f"in the last {span(elapsed_s)}" if elapsed_s else "since the owner's start"
    return [f"generation, {since}", *table(rows, "<<", "  "), ""]


def prompts(found: Generation) -> str:
    """How much of the prompts had to be computed."""
    known = found.prompt_tokens + found.prefix_hit_tokens
    share = f", {found.prefix_hit_tokens:,} found in the cache ({found.prefix_hit_tokens / known:.0%})" if found.prefix_hit_tokens else ""
    return f"{found.prompt_tokens:,} tokens computed{share}"
