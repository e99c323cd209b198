"""The owner process: poll loop, batch forming, completion, control."""

from gpuworker.worker.options import WorkerOptions
from gpuworker.worker.process import Worker
from gpuworker.worker.session import serve

__all__ = ["Worker", "WorkerOptions", "serve"]
