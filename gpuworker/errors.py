"""Everything gpuworker raises.

GpuWorkerError
 ├─ WorkerNotFound          no worker of this name came up within connect_timeout_s
 ├─ WorkerAlreadyRunning    another live process owns this name
 ├─ WorkerDied              the owner is gone, or this request ended its owner too often
 ├─ WorkerDraining          the owner is stopping and takes nothing new
 ├─ WorkerStartupError      the handler could not be loaded; carries the owner's own traceback
 ├─ QueueFull               no free slot (or this process's quota is used up), and the overflow policy is to reject
 │   └─ BudgetExceeded      it could not be answered within its latency budget, so it was not run
 ├─ DeadlineExceeded        the caller's timeout passed (also a TimeoutError)
 ├─ RequestCancelled        cancel() was called on this request
 ├─ RequestTooLong          longer than the longest length bucket (also a ValueError)
 ├─ InvalidRequest          not the arrays that the worker has declared (also a ValueError)
 ├─ PayloadTooLarge         request or response above max_payload_bytes
 ├─ UnsupportedPayload      a value that cannot cross without pickle (also a TypeError)
 ├─ BatchSizeMismatch       run_batch did not return one result per request
 ├─ RemoteError             run_batch raised an exception that is not a builtin one
 ├─ ConfigError             a configuration file, GPUWORKER_ variable or setting that is wrong (also a ValueError)
 └─ SegmentError            the shared memory cannot be created, is not ours, or holds nonsense

A builtin exception raised by run_batch comes back as that builtin, with a RemoteError that holds the owner's traceback as its cause.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BatchSizeMismatch",
    "BudgetExceeded",
    "ConfigError",
    "DeadlineExceeded",
    "GpuWorkerError",
    "InvalidRequest",
    "PayloadTooLarge",
    "QueueFull",
    "RemoteError",
    "RequestCancelled",
    "RequestTooLong",
    "SegmentError",
    "UnsupportedPayload",
    "WorkerAlreadyRunning",
    "WorkerDied",
    "WorkerDraining",
    "WorkerNotFound",
    "WorkerStartupError",
]


class GpuWorkerError(Exception):
    """Base of all errors of this library."""


class WorkerNotFound(GpuWorkerError):
    """No worker of this name is running, and none came up within `connect_timeout_s`."""


class WorkerAlreadyRunning(GpuWorkerError):
    """A live process owns this name. `pid` is 0 where it lives in another pid namespace."""

    def __init__(self, name: str, pid: int) -> None:
        where = f"process {pid}" if pid else "a process of another pid namespace"
        super().__init__(f"worker {name!r} is already running in {where}; stop it (`gpuworker stop {name}`) or choose another name")
        self.name, self.pid = name, pid

    def __reduce__(self) -> tuple[type[WorkerAlreadyRunning], tuple[str, int]]:
        return type(self), (self.name, self.pid)


class WorkerDied(GpuWorkerError):
    """The owner process is gone (the kernel says so). The request may or may not have run."""


class WorkerDraining(GpuWorkerError):
    """The owner is shutting down: it finishes what it has and takes nothing new."""


class WorkerStartupError(GpuWorkerError):
    """The owner could not get ready. The message ends with the owner's own traceback."""


class QueueFull(GpuWorkerError):
    """No slot for this request. `retry_after_ms`: when one should be free, from how long batches, or answers of a generating worker, have taken lately."""

    def __init__(self, message: str, retry_after_ms: float) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms

    def __reduce__(self) -> tuple[type[QueueFull], tuple[Any, ...]]:
        return type(self), (str(self), self.retry_after_ms)


class BudgetExceeded(QueueFull):
    """The request would not have been answered within its latency budget, so it was not run.

    `estimated_ms`: from its sending to its answer, had it run; `budget_ms`; `queue_depth`: requests queued then; `stage`: "enqueue" (the frontend's forecast:
    the ring was not touched) or "queued" (the owner's decision).
    """

    def __init__(self, estimated_ms: float, budget_ms: float, queue_depth: int, stage: str) -> None:
        when = "would be" if stage == "enqueue" else "would have been"
        super().__init__(
            f"the answer {when} there after {estimated_ms:.1f} ms, and the latency budget is {budget_ms:g} ms ({queue_depth} requests are queued); it did not "
            "run. Try again later, or elsewhere, or with a larger latency_budget_ms",
            max(estimated_ms - budget_ms, 1.0),
        )
        self.estimated_ms, self.budget_ms, self.queue_depth, self.stage = estimated_ms, budget_ms, queue_depth, stage

    def __reduce__(self) -> tuple[type[QueueFull], tuple[Any, ...]]:
        return type(self), (self.estimated_ms, self.budget_ms, self.queue_depth, self.stage)


class DeadlineExceeded(GpuWorkerError, TimeoutError):
    """The caller's timeout passed. `stage`: "connecting", "claiming" (waiting for a slot), "queued" (it never ran) or "running"."""

    def __init__(self, message: str, stage: str) -> None:
        super().__init__(message)
        self.stage = stage

    def __reduce__(self) -> tuple[type[DeadlineExceeded], tuple[str, str]]:
        return type(self), (str(self), self.stage)


class RequestCancelled(GpuWorkerError):
    """The request was cancelled before its answer was read."""


class RequestTooLong(GpuWorkerError, ValueError):
    """A request of `length` (in the handler's own unit, e.g. tokens) does not fit the longest batch row, `limit`. Nothing was run."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(
            f"a request of length {length:,} is longer than the worker takes, {limit:,}; shorten it, or start the worker with a larger max_length, "
            "length_buckets or max_batch_tokens"
        )
        self.length, self.limit = length, limit

    def __reduce__(self) -> tuple[type[RequestTooLong], tuple[int, int]]:
        return type(self), (self.length, self.limit)


class InvalidRequest(GpuWorkerError, ValueError):
    """The request does not fit what the worker has declared: its arrays' names, dtypes or shapes. Nothing was run; the message says what to send instead."""


class PayloadTooLarge(GpuWorkerError):
    """`size` bytes exceed `limit`. Of a request (`what`): nothing was enqueued. Of a response: it ran, and its result was dropped."""

    def __init__(self, size: int, limit: int, what: str = "request") -> None:
        super().__init__(
            f"{what} of {size:,} bytes exceeds max_payload_bytes={limit:,}; send less, or start the worker with a larger max_payload_bytes"
        )
        self.size, self.limit, self.what = size, limit, what

    def __reduce__(self) -> tuple[type[PayloadTooLarge], tuple[int, int, str]]:
        return type(self), (self.size, self.limit, self.what)


class UnsupportedPayload(GpuWorkerError, TypeError):
    """A value of a type that does not cross processes as it is; the message says what to convert it to."""


class BatchSizeMismatch(GpuWorkerError):
    """`run_batch` must return one result per request. `got` is the number returned, or None when it returned no sequence at all."""

    def __init__(self, expected: int, got: int | None, what: str = "") -> None:
        returned = what or f"{got} results"
        super().__init__(f"run_batch was given {expected} requests and returned {returned}; it must return a list with one result per request")
        self.expected, self.got, self.what = expected, got, what

    def __reduce__(self) -> tuple[type[BatchSizeMismatch], tuple[int, int | None, str]]:
        return type(self), (self.expected, self.got, self.what)


class RemoteError(GpuWorkerError):
    """An exception raised by `run_batch`. `type`: its qualified name; `message`; `traceback`: as formatted in the owner."""

    def __init__(self, type: str, message: str, traceback: str = "") -> None:  # noqa: A002 (the field's name in the public interface)
        super().__init__(f"{type}: {message}" if message else type)
        self.type, self.message, self.traceback = type, message, traceback

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return RemoteError, (self.type, self.message, self.traceback)

    def __str__(self) -> str:
        return f"{super().__str__()}\n\nIn the owner:\n{self.traceback}" if self.traceback else super().__str__()


class SegmentError(GpuWorkerError):
    """The shared-memory segment cannot be created or attached; the message says why and what to change."""


class ConfigError(GpuWorkerError, ValueError):
    """A worker's configuration is wrong. `problems`: a line for each mistake, with file and line number or the name of the variable where they are known."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)
