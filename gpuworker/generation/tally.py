"""What a generating owner counts, and puts into the segment for everybody to see."""

from __future__ import annotations

import time
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


class AnswerTimes:
    """For how long requests hold their slots: what frontends tell by when one should be free (client/remedies.py)."""

    def __init__(self) -> None:
        self._mean_ns: float | None = None

    def ended(self, took_ns: int) -> None:
        """A request's place is free, however it has ended. The last ones count most: the latest for an eighth."""
        self._mean_ns = took_ns if self._mean_ns is None else self._mean_ns + (took_ns - self._mean_ns) / 8

    def mean_ns(self, now_ns: int, oldest_ns: int | None) -> int:
        """As lately; before any has ended, the age of the oldest, which is what is known: it takes longer than that."""
        if self._mean_ns is not None:
            return round(self._mean_ns)
        return 0 if oldest_ns is None else max(now_ns - oldest_ns, 0)


class Tally:
    """See Generation, of segment/generation.py."""

    def __init__(self, port: Any, block_tokens: int, graphs: Graphs | None = None) -> None:
        """graphs: None where there are none."""
        self._board, self._block_tokens, self._graphs = Board(port, FIRST_WORD, COUNTERS), block_tokens, graphs
        self.tokens = 0
        self.answers = AnswerTimes()

    def publish_when_due(self, engine: Engine, oldest_ns: int | None) -> None:
        """After each step."""
        if self._board.is_due:
            self.publish(engine, oldest_ns)

    def publish(self, engine: Engine, oldest_ns: int | None = None) -> None:
        """Puts everything into the segment, if it has changed. oldest_ns: when the request that has been here for longest came."""
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
                "answer_ns": self.answers.mean_ns(time.monotonic_ns(), oldest_ns),
            }
        )
