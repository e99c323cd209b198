"""What an HTTP frontend answers: JSON, and which status stands for which error. Knows nothing of WSGI or ASGI.

    400  the body is no JSON, or the handler raised ValueError or TypeError (or a builtin kind of them) for this request; the message is its own
    413  the body or the request is too large, or longer than the model takes
    500  anything else the handler raised, or an answer that has no JSON form; the message says nothing of its cause
    503  no free slot (Retry-After from how long batches run), no answer possible within the latency budget ("estimated_ms", "budget_ms", "queue_depth"),
         or no owner that takes requests
    504  no answer in time; "stage" says how far the request came

The body of an error is {"error": {"type": ..., "message": ...}}. Arrays become (nested) lists, numpy scalars numbers, bytes base64 text, and nan and
infinities null.
"""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gpuworker.errors import (
    BudgetExceeded,
    DeadlineExceeded,
    GpuWorkerError,
    InvalidRequest,
    PayloadTooLarge,
    QueueFull,
    RemoteError,
    RequestTooLong,
    UnsupportedPayload,
    WorkerDied,
    WorkerDraining,
    WorkerNotFound,
)

RETRY_AFTER_S = 1  # while there is no owner: nobody knows how long its handler takes to load


class Reply(NamedTuple):
    """A whole response."""

    status: HTTPStatus
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str = "application/json"


class HttpError(Exception):
    """A request that does not reach the worker."""

    def __init__(self, status: HTTPStatus, kind: str, message: str, *headers: tuple[str, str]) -> None:
        super().__init__(message)
        self.status, self.kind, self.headers = status, kind, headers


def parse(body: bytes) -> Any:
    """The JSON value in a request's body. Raises HttpError."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, "BadRequest", f"the body is not JSON: {error}") from None


def success(answer: Any, status: HTTPStatus = HTTPStatus.OK) -> Reply:
    """Raises UnsupportedPayload for an answer that has no JSON form."""
    try:
        return Reply(status, encode(answer))
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedPayload(f"the handler's answer has no JSON form: {error}") from error


class Problem(NamedTuple):
    """What is said of an error; `more` is for programs."""

    status: HTTPStatus
    kind: str
    message: str
    headers: tuple[tuple[str, str], ...] = ()
    more: dict[str, Any] = {}  # noqa: RUF012 (nobody changes it)


def failure(error: Exception, was_sent: bool) -> Reply:
    """`was_sent`: the worker had the request, so what cannot cross is the answer, and no fault of the client's."""
    problem = problem_of(error, was_sent)
    return Reply(problem.status, encode({"error": {"type": problem.kind, "message": problem.message, **problem.more}}), problem.headers)


def problem_of(error: Exception, was_sent: bool) -> Problem:
    """See `failure`."""
    if isinstance(error, HttpError):
        return Problem(error.status, error.kind, str(error), error.headers)
    kind = type(error).__name__
    if isinstance(error, QueueFull):
        after_ms = max(error.retry_after_ms, 1.0)
        message, more = "all places are taken", {"retry_after_ms": round(after_ms, 3)}
        if isinstance(error, BudgetExceeded):
            message = "the answer would come too late"
            more |= {"estimated_ms": round(error.estimated_ms, 3), "budget_ms": error.budget_ms, "queue_depth": error.queue_depth}
        return _unavailable(kind, message, math.ceil(after_ms / 1000), more)
    if isinstance(error, (WorkerNotFound, WorkerDied, WorkerDraining)):
        return _unavailable(kind, "the model is not available at the moment", RETRY_AFTER_S, {})
    if isinstance(error, DeadlineExceeded):
        return Problem(HTTPStatus.GATEWAY_TIMEOUT, kind, "no answer within the time limit", more={"stage": error.stage})
    if isinstance(error, PayloadTooLarge) and error.what == "request" and not was_sent:
        return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, kind, "the request is too large")
    if isinstance(error, RequestTooLong):
        more = {"length": error.length, "limit": error.limit}
        return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, kind, "the request is too long", more=more)
    if isinstance(error, InvalidRequest) or (isinstance(error, (ValueError, TypeError)) and not (was_sent and isinstance(error, GpuWorkerError))):
        return Problem(HTTPStatus.BAD_REQUEST, kind, sayable(error))
    if isinstance(error, RemoteError):
        kind = error.type.rpartition(".")[2]
    return Problem(HTTPStatus.INTERNAL_SERVER_ERROR, kind, "the request failed; the server's log says why")


def _unavailable(kind: str, message: str, after_s: int, more: dict[str, Any]) -> Problem:
    return Problem(HTTPStatus.SERVICE_UNAVAILABLE, kind, message, (("Retry-After", str(after_s)),), more)


def sayable(error: Exception) -> str:
    """An error's message; what of it is no character (half of a surrogate pair, from a handler) as a question mark."""
    return str(error).encode("utf-8", "replace").decode()


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value")


encode = msgspec.json.Encoder(enc_hook=_plain).encode
"""A value as JSON."""
