"""One GPU owner process, called from many Python processes as if the model were a local function.

    client = gpuworker.connect("embed")      # any process: lazy, fork-safe, thread-safe, imports no torch
    vector = client.submit("some text")      # blocks until the batch that held this request has run

The owner is started with `gpuworker.Worker`, `gpuworker.serve` or `gpuworker serve module:attr --name embed`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if not sys.platform.startswith("linux"):
    raise ImportError(f"gpuworker needs Linux (futexes, POSIX shared memory, pidfds); this is {sys.platform}")

from gpuworker.client import Client, Pending, connect
from gpuworker.errors import (
    BatchSizeMismatch,
    BudgetExceeded,
    ConfigError,
    DeadlineExceeded,
    GpuWorkerError,
    InvalidRequest,
    PayloadTooLarge,
    QueueFull,
    RemoteError,
    RequestCancelled,
    RequestTooLong,
    SegmentError,
    UnsupportedPayload,
    WorkerAlreadyRunning,
    WorkerDied,
    WorkerDraining,
    WorkerNotFound,
    WorkerStartupError,
)
from gpuworker.tensors import TensorSpec

if TYPE_CHECKING:
    from gpuworker.client.async_client import AsyncClient, connect_async
    from gpuworker.client.async_stream import AsyncStream
    from gpuworker.client.declaration import Declaration, Declared
    from gpuworker.client.stream import Delta, Generation, Stream, TokenLogprob, Usage
    from gpuworker.config import WorkerConfig, load_config
    from gpuworker.execution.handler import TensorHandler
    from gpuworker.metrics import METRICS_CONTENT_TYPE, render_metrics
    from gpuworker.segment.stats import Stats
    from gpuworker.worker import Worker, WorkerOptions, serve

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BatchSizeMismatch",
    "BudgetExceeded",
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "Declaration",
    "Declared",
    "Delta",
    "Generation",
    "GpuWorkerError",
    "InvalidRequest",
    "METRICS_CONTENT_TYPE",
    "PayloadTooLarge",
    "Pending",
    "QueueFull",
    "RemoteError",
    "RequestCancelled",
    "RequestTooLong",
    "SegmentError",
    "Stats",
    "Stream",
    "TensorHandler",
    "TensorSpec",
    "TokenLogprob",
    "UnsupportedPayload",
    "Usage",
    "Worker",
    "WorkerAlreadyRunning",
    "WorkerConfig",
    "WorkerDied",
    "WorkerDraining",
    "WorkerNotFound",
    "WorkerOptions",
    "WorkerStartupError",
    "connect",
    "connect_async",
    "load_config",
    "render_metrics",
    "serve",
]


def __getattr__(name: str) -> Any:
    """These are loaded when first used: a frontend never pays for them."""
    if name in ("Delta", "Generation", "Stream", "TokenLogprob", "Usage"):
        import gpuworker.client.stream

        return getattr(gpuworker.client.stream, name)
    if name in ("AsyncClient", "connect_async"):
        import gpuworker.client.async_client

        return getattr(gpuworker.client.async_client, name)
    if name == "AsyncStream":
        from gpuworker.client.async_stream import AsyncStream

        return AsyncStream
    if name in ("METRICS_CONTENT_TYPE", "render_metrics"):
        import gpuworker.metrics

        return getattr(gpuworker.metrics, name)
    if name in ("Declaration", "Declared"):
        import gpuworker.client.declaration

        return getattr(gpuworker.client.declaration, name)
    if name == "Stats":
        from gpuworker.segment.stats import Stats

        return Stats
    if name in ("Worker", "WorkerOptions", "serve"):
        import gpuworker.worker

        return getattr(gpuworker.worker, name)
    if name in ("WorkerConfig", "load_config"):
        import gpuworker.config

        return getattr(gpuworker.config, name)
    if name == "TensorHandler":
        from gpuworker.execution.handler import TensorHandler

        return TensorHandler
    raise AttributeError(f"module 'gpuworker' has no attribute {name!r}")
