"""Metrics of workers that serve a TensorHandler. They count from the present owner's start."""

from __future__ import annotations

from collections.abc import Callable

from gpuworker.metrics.kinds import counter, gauge
from gpuworker.segment.execution import Execution
from gpuworker.segment.stats import Stats


def _of(value: Callable[[Execution], float]) -> Callable[[Stats], float | None]:
    return lambda stats: None if stats.execution is None else value(stats.execution)


DEVICE = (
    counter("gpuworker_device_batches_total", "Batches of tensors.", _of(lambda e: e.batches)),
    counter("gpuworker_device_rows_total", "Requests in them.", _of(lambda e: e.rows)),
    counter("gpuworker_device_padded_rows_total", "Rows that ran for these requests, padding included.", _of(lambda e: e.padded_rows)),
    counter("gpuworker_device_cells_total", "Size of these requests along the named dimensions.", _of(lambda e: e.cells)),
    counter("gpuworker_device_padded_cells_total", "The same, padding included.", _of(lambda e: e.padded_cells)),
    counter("gpuworker_device_seconds_total", "Time of the program on the device.", _of(lambda e: e.device_ns / 1e9)),
    counter(
        "gpuworker_device_wall_seconds_total", "From batches' beginnings until their outputs were in host memory.", _of(lambda e: e.wall_ns / 1e9)
    ),
    counter("gpuworker_gather_seconds_total", "Copying slots into batches.", _of(lambda e: e.gather_ns / 1e9)),
    counter("gpuworker_gather_bytes_total", "Bytes copied from slots into batches.", _of(lambda e: e.gathered_bytes)),
    counter("gpuworker_scatter_seconds_total", "Copying batches' outputs into slots.", _of(lambda e: e.scatter_ns / 1e9)),
    counter("gpuworker_scatter_bytes_total", "Bytes copied from batches into slots.", _of(lambda e: e.scattered_bytes)),
    counter("gpuworker_to_device_seconds_total", "Copying to the device.", _of(lambda e: e.to_device_ns / 1e9)),
    counter("gpuworker_to_device_bytes_total", "Bytes copied to the device.", _of(lambda e: e.to_device_bytes)),
    counter("gpuworker_from_device_seconds_total", "Copying from the device.", _of(lambda e: e.from_device_ns / 1e9)),
    counter("gpuworker_from_device_bytes_total", "Bytes copied from the device.", _of(lambda e: e.from_device_bytes)),
    counter("gpuworker_graph_hits_total", "Batches that replayed a CUDA graph.", _of(lambda e: e.graph_hits)),
    counter("gpuworker_graph_misses_total", "Batches that did not, although graphs are on.", _of(lambda e: e.graph_misses)),
    gauge("gpuworker_graphs", "CUDA graphs that are kept.", _of(lambda e: e.graphs)),
    gauge("gpuworker_graph_bytes", "Device memory that they hold.", _of(lambda e: e.graph_bytes)),
    gauge("gpuworker_device_memory_bytes", "Device memory in use by the owner's tensors.", _of(lambda e: e.memory_bytes)),
    gauge("gpuworker_device_memory_reserved_bytes", "Device memory that the owner's allocator holds.", _of(lambda e: e.memory_reserved_bytes)),
    gauge("gpuworker_device_memory_total_bytes", "Memory of the device.", _of(lambda e: e.memory_total_bytes)),
    counter("gpuworker_odd_requests_total", "Requests in a form that takes the slow path.", _of(lambda e: e.odd_requests)),
    counter("gpuworker_out_of_memory_total", "Batches that were halved because the device's memory was full.", _of(lambda e: e.out_of_memory)),
)
