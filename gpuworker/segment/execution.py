"""Statistics of a worker whose batches are tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

COUNTERS = (
    "batches", "rows", "padded_rows", "cells", "padded_cells", "gather_ns", "gathered_bytes", "scatter_ns", "scattered_bytes", "wall_ns",
    "odd_requests", "out_of_memory", "device_ns", "to_device_ns", "to_device_bytes", "from_device_ns", "from_device_bytes", "graph_hits", "graph_misses",
    "graphs", "graph_bytes", "memory_bytes", "memory_reserved_bytes", "memory_total_bytes",
)  # fmt: skip
"""In the order of gw_header.execution; what writes them is execution/tally.py."""
HELD = ("graphs", "graph_bytes", "memory_bytes", "memory_reserved_bytes", "memory_total_bytes")
"""Those that say what there is now; the others only grow."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """What a TensorHandler's owner has done since its start. Up to 0.2 s old. 0 where the device has no such thing.

    `rows` of requests were run as `padded_rows`; `padding`: padded_cells / cells, both by the named dimensions. Means are over batches: `device_ms` the program
    on the device, `wall_ms` from a batch's beginning until its outputs are in host memory, `gather_ms` and `scatter_ms` the copies between slots and batch.
    `to_device_gbps`, `from_device_gbps`: GB/s of the copies while they went. `graph_hits` batches were replays of a CUDA graph, `graph_misses` were not although
    graphs are on. `odd_requests` came in a form that takes the slow path: too large for a slot, or in Fortran order. `out_of_memory`: batches that were halved.
    `cells` and the sums in ns are what the ratios and means are made of.
    """

    batches: int
    rows: int
    padded_rows: int
    padding: float
    device_ms: float
    wall_ms: float
    gather_ms: float
    scatter_ms: float
    gathered_bytes: int
    scattered_bytes: int
    to_device_bytes: int
    to_device_gbps: float
    from_device_bytes: int
    from_device_gbps: float
    graph_hits: int
    graph_misses: int
    graphs: int
    graph_bytes: int
    memory_bytes: int
    memory_reserved_bytes: int
    memory_total_bytes: int
    odd_requests: int
    out_of_memory: int
    cells: int
    padded_cells: int
    device_ns: int
    wall_ns: int
    gather_ns: int
    scatter_ns: int
    to_device_ns: int
    from_device_ns: int

    @classmethod
    def of(cls, words: Sequence[int]) -> Execution | None:
        """From gw_header.execution; None while no batch has run."""
        counts = dict(zip(COUNTERS, words, strict=False))
        return cls._made_of(counts) if counts["batches"] else None

    def since(self, before: Execution | None) -> Execution:
        """The same, with what was counted after `before` only."""
        if before is None:
            return self
        held = {name: getattr(self, name) for name in HELD}
        return self._made_of({name: max(getattr(self, name) - getattr(before, name), 0) for name in COUNTERS} | held)

    @classmethod
    def _made_of(cls, counts: Mapping[str, int]) -> Execution:
        means = {f"{part}_ms": _ratio(counts[f"{part}_ns"], counts["batches"] * 1e6, 6) for part in ("device", "wall", "gather", "scatter")}
        rates = {f"{way}_gbps": _ratio(counts[f"{way}_bytes"], counts[f"{way}_ns"], 3) for way in ("to_device", "from_device")}
        made: dict[str, Any] = {**counts, **means, **rates}
        return cls(**made, padding=_ratio(counts["padded_cells"], counts["cells"], 4))


def _ratio(part: float, whole: float, digits: int) -> float:
    return round(part / whole, digits) if whole else 0.0
