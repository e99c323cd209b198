"""Statistics of a worker that generates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from gpuworker.segment.board import shown

FIRST_WORD = 32
"""Of gw_header.execution, from which on a generating owner counts: those of tensors (segment/execution.py) come before."""
COUNTERS = (
    "steps", "tokens", "prompt_tokens", "prefix_hit_tokens", "preemptions", "running", "waiting", "blocks_used", "blocks_cached", "blocks_free", "block_tokens",
    "waste_ppm", "graph_hits", "graph_misses", "graphs", "graph_bytes", "answer_ns",
)  # fmt: skip
"""In the order of gw_header.execution, from FIRST_WORD on; what writes them is generation/tally.py."""
RUNNING_TOTALS = ("steps", "tokens", "prompt_tokens", "prefix_hit_tokens", "preemptions", "graph_hits", "graph_misses")
"""Those that only grow; the others say what there is now."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a GenerationHandler's owner has done since its start, and holds now. Up to 0.2 s old.

    tokens: generated and sent; prompt_tokens: computed for prompts, and again after preemptions; prefix_hit_tokens: found in the cache instead. running,
    waiting: sequences. blocks of `block_tokens` tokens each; blocks_cached are free, and hold prefixes that may be asked for again. waste: share of used
    blocks' room that holds nothing. Of steps that only decode, graph_hits were replays of a CUDA graph, and graph_misses were not although graphs are on (a
    step with a piece of a prompt is neither); `graphs` of them there are now. answer_ms: for how long a request has held its slot lately, from
    when the owner has seen it to its last token; before any has ended, for how long the oldest has by now.
    """

    steps: int
    tokens: int
    prompt_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    block_tokens: int
    waste: float
    graph_hits: int
    graph_misses: int
    graphs: int
    graph_bytes: int
    answer_ms: float

    @classmethod
    def of(cls, words: Sequence[int]) -> Generation | None:
        """From the words; None where nothing generates."""
        counts = dict(zip(COUNTERS, words, strict=False))
        if not counts["block_tokens"]:
            return None
        waste = counts.pop("waste_ppm") / 1e6
        answer_ms = counts.pop("answer_ns") / 1e6
        return cls(**counts, waste=waste, answer_ms=answer_ms)

    def since(self, before: Generation | None) -> Generation:
        """The same, with what was counted after `before` only."""
        if before is None:
            return self
        return dataclasses.replace(self, **{name: max(getattr(self, name) - getattr(before, name), 0) for name in RUNNING_TOTALS})


def read_generation(port: Any) -> Generation | None:
    """What an attached segment's owner shows."""
    return Generation.of(shown(port, FIRST_WORD))
