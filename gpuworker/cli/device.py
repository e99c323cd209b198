"""The part of the statistics' screen that is about tensors and their device."""

from __future__ import annotations

from gpuworker.cli.text import count, size, span, table
from gpuworker.segment.execution import Execution


def execution(found: Execution | None) -> list[str]:
    """What batches take where, since the owner's start; nothing for a worker that runs none of tensors."""
    if found is None:
        return []
    gather, device, scatter, wall = (span(value / 1e3) for value in (found.gather_ms, found.device_ms, found.scatter_ms, found.wall_ms))
    rows = [("a batch", f"gather {gather}, device {device} of {wall}, scatter {scatter}")]
    if found.rows:
        rows.append(("padding", f"{found.padded_rows / found.rows:.3g} rows and {found.padding:.3g} elements for each real one"))
    for way, total, gbps in (("to device", found.to_device_bytes, found.to_device_gbps), ("back", found.from_device_bytes, found.from_device_gbps)):
        if total:
            rows.append((way, f"{size(total)} at {gbps:.3g} GB/s"))
    runs = found.graph_hits + found.graph_misses
    if runs:
        rows.append(("graphs", f"{found.graph_hits / runs:.1%} of batches were replays; {count(found.graphs, 'graph')} of {size(found.graph_bytes)}"))
    if found.memory_total_bytes:
        rows.append(
            ("memory", f"{size(found.memory_bytes)} of {size(found.memory_total_bytes)} in use, {size(found.memory_reserved_bytes)} reserved")
        )
    if found.odd_requests:
        rows.append(("slow path", f"{count(found.odd_requests, 'request')} larger than a slot, or not in C order"))
    if found.out_of_memory:
        rows.append(("too little", f"memory, so that {count(found.out_of_memory, 'batch', 'batches')} ran in halves"))
    return [f"tensors, since the owner's start: {count(found.batches, 'batch', 'batches')}", *table(rows, "<<", "  "), ""]
