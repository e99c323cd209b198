"""What a generating owner counts, and where it puts that for everybody to see: in the segment."""

from __future__ import annotations

import time
from typing import Any

from gpuworker._native import ffi, lib
from gpuworker.generation.engine import Engine
from gpuworker.segment.generation import COUNTERS
from gpuworker.segment.stats import GENERATION_WORD

PUBLISH_EVERY_NS = 50_000_000


class Tally:
    """See Generation, of segment/generation.py. Published every 50 ms while there are steps."""

    def __init__(self, port: Any, block_tokens: int) -> None:
        self._port, self._block_tokens = port, block_tokens
        self._words = ffi.new("uint64_t[]", lib.GW_EXECUTION)
        self._published_ns = 0
        self._published: object = None
        self.tokens = 0

    def publish_when_due(self, engine: Engine) -> None:
        """After each step."""
        if time.monotonic_ns() - self._published_ns >= PUBLISH_EVERY_NS:
            self.publish(engine)

    def publish(self, engine: Engine) -> None:
        """Puts everything into the segment, if it has changed."""
        found = engine.scheduler.stats()
        if found == self._published:
            return
        self._published_ns, self._published = time.monotonic_ns(), found
        values = {
            "steps": found.steps,
            "tokens": self.tokens,
            "prompt_tokens": engine.prompt_tokens,
            "prefix_hit_tokens": found.prefix_hit_tokens,
            "preemptions": found.preemptions,
            "running": found.running,
            "waiting": found.waiting,
            "blocks_used": found.blocks_used,
            "blocks_cached": found.blocks_cached,
            "blocks_free": found.blocks_free,
            "block_tokens": self._block_tokens,
            "waste_ppm": round(found.waste * 1e6),
        }
        self._words[GENERATION_WORD : GENERATION_WORD + len(COUNTERS)] = [values[name] for name in COUNTERS]
        lib.gw_publish_execution(self._port, self._words, lib.GW_EXECUTION)
