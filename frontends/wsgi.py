"""A worker as a web service: JSON in, JSON out, for any WSGI server. In the module that gunicorn is given:

    from gpuworker.frontends.wsgi import make_app

    app = make_app("embed")

    POST / or /submit     the body, any JSON value, is the request; the response's body is its answer
                          `X-Timeout-Ms: 250`, or `?timeout_ms=250`: after so long 504, and the request does not run if it has not started
    GET /healthz          200 while the worker can be sent requests, else 503; JSON either way (frontends/health.py)
    GET /metrics          the worker's statistics for Prometheus (frontends/metrics.py)

Statuses and error bodies: frontends/replies.py. No framework, no state but the client: the application may be imported before or after a fork.
"""

from __future__ import annotations

import math
import traceback
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import gpuworker
from gpuworker import Client

from . import health, metrics, replies
from .replies import HttpError, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

CONNECT_TIMEOUT_S = 1.0  # a web worker should not be held for long by an owner that is not there


def make_app(
    worker: str | Client,
    *,
    timeout: float = 20.0,
    max_body_bytes: int = 8 << 20,
    stale_heartbeat_s: float = 5.0,
    long_batch_s: float = 30.0,
) -> WSGIApplication:
    """A WSGI application that calls one worker.

    worker: its name, or a client with options of its own, e.g. gpuworker.connect("embed", on_full="block").
    timeout: seconds after which any request is answered with 504; keep it below the server's own (gunicorn kills a sync worker after 30 s).
    max_body_bytes: a longer body is answered with 413.
    stale_heartbeat_s, long_batch_s: /healthz is red although the owner lives when it gave no sign, or was in one batch, for longer than this.
    """
    client = gpuworker.connect(worker, connect_timeout_s=CONNECT_TIMEOUT_S) if isinstance(worker, str) else worker

    def submit(environ: WSGIEnvironment) -> Reply:
        was_sent = False
        try:
            seconds = min(_asked_timeout(environ), timeout)
            request = replies.parse(_read_body(environ, max_body_bytes))
            pending = client.enqueue(request, seconds)
            was_sent = True
            return replies.success(pending.result())
        except Exception as error:
            reply = replies.failure(error, was_sent)
            if reply.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                environ["wsgi.errors"].write(traceback.format_exc())
            return reply

    def healthz(environ: WSGIEnvironment) -> Reply:
        state = health.check(client.name, stale_heartbeat_s, long_batch_s, client.group)
        return replies.success(state, HTTPStatus.OK if state["status"] == "ok" else HTTPStatus.SERVICE_UNAVAILABLE)

    def scrape(environ: WSGIEnvironment) -> Reply:
        return Reply(HTTPStatus.OK, metrics.render([client.name], client.group), content_type=metrics.CONTENT_TYPE)

    routes: dict[str, tuple[tuple[str, ...], Callable[[WSGIEnvironment], Reply]]] = {
        "": (("POST",), submit),
        "/submit": (("POST",), submit),
        "/healthz": (("GET", "HEAD"), healthz),
        "/metrics": (("GET", "HEAD"), scrape),
    }

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        methods, answer = routes.get(environ.get("PATH_INFO", "").rstrip("/"), ((), None))
        if answer is None:
            reply = replies.failure(HttpError(HTTPStatus.NOT_FOUND, "NotFound", "there is nothing at this path"), False)
        elif method not in methods:
            allow = ", ".join(methods)
            reply = replies.failure(HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "MethodNotAllowed", f"this path takes {allow}", ("Allow", allow)), False)
        else:
            reply = answer(environ)
        headers = [("Content-Type", reply.content_type), ("Content-Length", str(len(reply.body))), *reply.headers]
        start_response(f"{reply.status.value} {reply.status.phrase}", headers)
        return [b"" if method == "HEAD" else reply.body]

    return app


def _asked_timeout(environ: WSGIEnvironment) -> float:
    """Seconds that this request gives; infinite when it says nothing. Raises HttpError."""
    asked = environ.get("HTTP_X_TIMEOUT_MS") or next(iter(parse_qs(environ.get("QUERY_STRING", "")).get("timeout_ms", ())), None)
    if asked is None:
        return math.inf
    try:
        milliseconds = float(asked)
    except ValueError:
        milliseconds = math.nan
    if not 0 <= milliseconds < math.inf:
        raise HttpError(HTTPStatus.BAD_REQUEST, "BadRequest", "the timeout must be a number of milliseconds >= 0")
    return milliseconds / 1000


def _read_body(environ: WSGIEnvironment, max_body_bytes: int) -> bytes:
    """Raises HttpError. A body without a Content-Length (chunked) is read where the server marks its end."""
    declared = environ.get("CONTENT_LENGTH")
    size = int(declared) if declared else max_body_bytes + 1 if environ.get("wsgi.input_terminated") else 0
    body: bytes = environ["wsgi.input"].read(min(max(size, 0), max_body_bytes + 1))
    if len(body) > max_body_bytes:
        raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "PayloadTooLarge", f"the body is longer than {max_body_bytes:,} bytes")
    return body
