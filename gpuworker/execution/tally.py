"""What the runner of a TensorHandler counts, and where it puts that for everybody to see: in the segment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gpuworker.execution.executor import Usage
from gpuworker.execution.grid import Shape
from gpuworker.segment.board import Board
from gpuworker.segment.execution import COUNTERS


class Tally:
    """Counters of this owner, from its start on. Published every 50 ms."""

    def __init__(self, port: Any) -> None:
        self._board = Board(port, 0, COUNTERS)
        self.batches = self.rows = self.padded_rows = self.cells = self.padded_cells = 0
        self.gather_ns = self.gathered_bytes = self.scatter_ns = self.scattered_bytes = self.wall_ns = 0
        self.odd_requests = self.out_of_memory = 0

    def gathered(self, n: int, shape: Shape, size_bytes: int, took_ns: int) -> None:
        """A batch of n requests was gathered."""
        self.batches += 1
        self.rows += n
        self.padded_rows += shape.rows
        self.padded_cells += shape.cells
        self.gathered_bytes += size_bytes
        self.gather_ns += took_ns

    def scattered(self, size_bytes: int, took_ns: int, wall_ns: int) -> None:
        """Its answers were written; wall_ns: from its beginning until its outputs were there."""
        self.scattered_bytes += size_bytes
        self.scatter_ns += took_ns
        self.wall_ns += wall_ns

    def publish_when_due(self, usage: Callable[[], Usage]) -> None:
        """After each batch, and when the owner wakes up with nothing to do, which it does ten times a second."""
        if self._board.is_due:
            self.publish(usage())

    def publish(self, usage: Usage) -> None:
        """Puts everything into the segment."""
        self._board.show(vars(self) | vars(usage))


assert {field.name for field in dataclasses.fields(Usage)} <= set(COUNTERS)
