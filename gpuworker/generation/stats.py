"""What a generation scheduler is doing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerStats:
    """Now: sequences, blocks, waste. Since its start: the rest."""

    running: int
    waiting: int
    blocks_used: int
    blocks_free: int
    """Can be taken; blocks_cached of them still hold a prefix that somebody may ask for."""
    blocks_cached: int
    waste: float
    """Of the places for a token in used blocks, the share that no known token is meant for (the rest of each sequence's last block). 0 when none is used."""
    steps: int
    batch_tokens: int
    """Tokens computed, those computed again after a preemption included."""
    preemptions: int
    prefix_hit_tokens: int
    """Tokens that were not computed because a cached block held them."""
