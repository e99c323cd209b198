"""Which shapes have a CUDA graph: what is captured next, and what has to go when they take too much memory. Only decides; knows nothing of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from gpuworker.execution.grid import Shape

G = TypeVar("G")

RUNS_PER_CAPTURE = 4
"""What a capture costs, in eager runs, until one has been measured: two to warm up, one captured, one to compare with."""


class GraphCache(Generic[G]):
    """The captured graphs, the least recently used first.

    There are two reasons to capture a shape. In the background, while nothing is to be done, the shapes of the grid are captured one after the other, the
    largest first: graphs share their memory, so that what the largest needs is there for all others. And under a load that never ends, a shape that is
    run eagerly is captured as soon as the time that a graph would have saved so far equals what capturing costs. That is the rule for renting or buying
    skis: whatever comes, it costs at most twice what the best choice in hindsight would have.
    """

    def __init__(self, shapes: Sequence[Shape], limit_bytes: int, release: Callable[[G], int]) -> None:
        """shapes: the grid, any order. release: gives a dropped graph's memory back. -> bytes that are free again."""
        self._waiting = sorted(set(shapes), key=lambda shape: (shape.cells, shape))
        self._limit_bytes, self._release = limit_bytes, release
        self._kept: dict[Shape, tuple[G, int]] = {}
        self._too_large: set[Shape] = set()
        self._eager: dict[Shape, tuple[float, int]] = {}  # ns that a graph would have saved so far, and of the last launch
        self._capture_ns = self._captures = 0
        self._replay_ns = 0.0
        self.failed: dict[Shape, str] = {}
        """Shapes that are never tried again, and why."""
        self.reason: str | None = None
        """Why there are no graphs at all any more."""
        self.hits = self.misses = self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, shape: Shape) -> G | None:
        """The shape's graph, if there is one; counted as a hit, and as its use. What was run eagerly instead is told to `ran`."""
        kept = self._kept.pop(shape, None)
        if kept is None:
            return None
        self._kept[shape] = kept  # now the last to be dropped
        self.hits += 1
        return kept[0]

    def replayed(self, launch_ns: int) -> None:
        """A replay took the host that long to launch."""
        self._replay_ns += (launch_ns - self._replay_ns) / 16 if self._replay_ns else launch_ns

    def ran(self, shape: Shape, launch_ns: int) -> None:
        """The shape was run eagerly, which took the host that long to launch. Where the device is slower than that, a graph would have saved less: it is
        then captured a little early.
        """
        self.misses += 1
        if self._may_capture(shape):
            saved_ns = self._eager.get(shape, (0.0, 0))[0] + max(launch_ns - self._replay_ns, 0)
            self._eager[shape] = (saved_ns, launch_ns)

    def is_due(self, shape: Shape) -> bool:
        """Whether not having captured this shape has cost as much as capturing it would."""
        saved_ns, launch_ns = self._eager.get(shape, (0.0, 0))
        cost_ns = self._capture_ns / self._captures if self._captures else RUNS_PER_CAPTURE * launch_ns
        return 0 < cost_ns <= saved_ns and self._may_capture(shape)

    def next(self) -> Shape | None:
        """What to capture now that there is time; None: nothing."""
        while self._waiting and self.reason is None:
            shape = self._waiting[-1]
            if self.bytes < self._limit_bytes and self._may_capture(shape) and shape not in self._too_large:
                return shape
            self._waiting.pop()
        return None

    def add(self, shape: Shape, graph: G, size_bytes: int, capture_ns: int, *, may_drop: bool) -> bool:
        """Keeps what was captured. -> whether it is kept: graphs above the limit make room, the least recently used first, if they may be dropped;
        else, and if that does not help, the new one goes itself.
        """
        self._eager.pop(shape, None)
        self._capture_ns += capture_ns
        self._captures += 1
        self._kept[shape] = (graph, size_bytes)
        self.bytes += size_bytes
        while self.bytes > self._limit_bytes and may_drop and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))
        if self.bytes <= self._limit_bytes:
            return True
        if may_drop:
            self.failed[shape] = f"its graph of {size_bytes} bytes is above the limit of {self._limit_bytes} bytes"
        self._too_large.add(shape)
        self._drop(shape)
        return False

    def leave_out(self, shape: Shape) -> None:
        """Not captured in the background; runs of it may still ask for that."""
        self._too_large.add(shape)
        self._eager.pop(shape, None)

    def fail(self, shape: Shape, reason: str) -> None:
        """Dropped if it is there, and never tried again."""
        if shape in self._kept:
            self._drop(shape)
        self.failed[shape] = reason
        self._eager.pop(shape, None)

    def give_up(self, reason: str) -> None:
        """Drops all graphs, and captures none any more."""
        self.reason = self.reason or reason
        self.clear()

    def clear(self) -> None:
        """Drops all graphs."""
        for shape in list(self._kept):
            self._drop(shape)
        self.bytes = 0

    def _may_capture(self, shape: Shape) -> bool:
        return self.reason is None and shape not in self._kept and shape not in self.failed

    def _drop(self, shape: Shape) -> None:
        graph, _ = self._kept.pop(shape)
        self.bytes = max(self.bytes - self._release(graph), 0)
