"""How much of the used blocks of a KV cache holds nothing, by how long requests are: a matter of the scheduler alone, so there is no model."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

from examples.llm_chat.work import Request
from gpuworker.generation.blocks import BlockPool
from gpuworker.generation.scheduler import Scheduler
from gpuworker.generation.sequence import Sequence

CACHE_BLOCKS = 4096
STEP_TOKENS = 512


def waste_of(least: int, most: int, requests: Rows[Request], slots: int) -> dict[str, Any]:
    """All requests at once; their prompts and answers have from `least` to `most` tokens. -> waste: of the places in used blocks,
    over all steps, the share that no token is meant for; tokens: of a request, in the mean."""
    longest = max(len(request.prompt) + request.max_tokens for request in requests)
    scheduler = Scheduler(
        BlockPool(CACHE_BLOCKS), max_batch_tokens=max(STEP_TOKENS, slots), max_running=slots, max_model_tokens=longest, prefix_caching=False
    )
    for number, request in enumerate(requests):
        scheduler.add(Sequence(number, request.prompt, max_tokens=request.max_tokens, arrival_ns=number))
    used = empty = 0.0
    while scheduler.running or scheduler.waiting:
        chunks = scheduler.plan()
        scheduler.done(chunks, {chunk.sequence: 0 for chunk in chunks if chunk.is_last})
        found = scheduler.stats()
        used, empty = used + found.blocks_used, empty + found.waste * found.blocks_used
    return {
        "least": least,
        "most": most,
        "requests": len(requests),
        "tokens": sum(len(request.prompt) + request.max_tokens for request in requests) / len(requests),
        "waste": empty / used,
    }
