"""Metrics of workers that generate. They count from the present owner's start."""

from __future__ import annotations

from collections.abc import Callable

from gpuworker.metrics.kinds import counter, gauge
from gpuworker.segment.generation import Generation
from gpuworker.segment.stats import Stats


def _of(value: Callable[[Generation], float]) -> Callable[[Stats], float | None]:
    return lambda stats: None if stats.generation is None else value(stats.generation)


GENERATION = (
    counter("gpuworker_generation_steps_total", "Steps of the model.", _of(lambda g: g.steps)),
    counter("gpuworker_generation_tokens_total", "Tokens generated and sent.", _of(lambda g: g.tokens)),
    counter("gpuworker_generation_prompt_tokens_total", "Tokens computed for prompts, and again after preemptions.", _of(lambda g: g.prompt_tokens)),
    counter("gpuworker_generation_prefix_hit_tokens_total", "Tokens of prompts that were found in the cache.", _of(lambda g: g.prefix_hit_tokens)),
    counter(
        "gpuworker_generation_preemptions_total",
        "Sequences that gave up their blocks for others, to be computed again.",
        _of(lambda g: g.preemptions),
    ),
    gauge("gpuworker_generation_running_sequences", "Sequences that take part in steps.", _of(lambda g: g.running)),
    gauge("gpuworker_generation_waiting_sequences", "Sequences that wait for blocks or for a place in the batch.", _of(lambda g: g.waiting)),
    gauge("gpuworker_generation_used_blocks", "Blocks of the KV cache that sequences hold.", _of(lambda g: g.blocks_used)),
    gauge("gpuworker_generation_cached_blocks", "Free blocks that hold prefixes which may be asked for again.", _of(lambda g: g.blocks_cached)),
    gauge("gpuworker_generation_free_blocks", "Free blocks.", _of(lambda g: g.blocks_free)),
    gauge("gpuworker_generation_block_tokens", "Tokens that a block has room for.", _of(lambda g: g.block_tokens)),
    gauge("gpuworker_generation_waste_ratio", "Share of used blocks' room that holds nothing.", _of(lambda g: g.waste)),
    gauge(
        "gpuworker_generation_answer_seconds",
        "How long a request has held its slot lately, from being seen to its last token.",
        _of(lambda g: g.answer_ms / 1e3),
    ),
    counter("gpuworker_generation_graph_hits_total", "Steps that replayed a CUDA graph.", _of(lambda g: g.graph_hits)),
    counter("gpuworker_generation_graph_misses_total", "Decode steps that did not, although graphs are on.", _of(lambda g: g.graph_misses)),
    gauge("gpuworker_generation_graphs", "CUDA graphs of steps that are kept.", _of(lambda g: g.graphs)),
    gauge("gpuworker_generation_graph_bytes", "Device memory that they hold.", _of(lambda g: g.graph_bytes)),
)
