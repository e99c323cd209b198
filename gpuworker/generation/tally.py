"""What a generating owner counts, and puts into the segment for everybody to see."""

from __future__ import annotations

from typing import Any, Protocol

from gpuworker.generation.engine import Engine
from gpuworker.segment.board import Board
from gpuworker.segment.generation import COUNTERS, FIRST_WORD


class Graphs(Protocol):
    """CUDA graphs of decode steps: see graphs.py."""

    @property
    def hits(self) -> int:
        """Decode steps that were replays."""
        ...

    @property
    def misses(self) -> int:
        """Decode steps that could have been, and were not."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def size_bytes(self) -> int:
        """What they take."""
        ...

    def capture_next(self) -> bool:
        """While there is nothing else to do. -> whether there is more."""
        ...


class Tally:
    """See Generation, of segment/generation.py."""

    def __init__(self, port: Any, block_tokens: int, graphs: Graphs | None = None) -> None:
        """graphs: None where there are none."""
        self._board, self._block_tokens, self._graphs = Board(port, FIRST_WORD, COUNTERS), block_tokens, graphs
        self.tokens = 0

    def publish_when_due(self, engine: Engine) -> None:
        """After each step."""
        if self._board.is_due:
            self.publish(engine)

    def publish(self, engine: Engine) -> None:
        """Puts everything into the segment, if it has changed."""
        found, graphs = engine.scheduler.stats(), self._graphs
        self._board.show(
            {
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
                "graph_hits": graphs.hits if graphs else 0,
                "graph_misses": graphs.misses if graphs else 0,
                "graphs": graphs.count if graphs else 0,
                "graph_bytes": graphs.size_bytes if graphs else 0,
            }
        )
