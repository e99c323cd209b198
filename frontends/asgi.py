"""Workers as a web service, for any ASGI server: the Open Inference Protocol, and OpenAI's API. In the module that the server is given:

    from gpuworker.frontends.asgi import make_app

    app = make_app({"minilm": "embed", "smollm2": "chat"})  # models, and the workers that they are

or without a module: `gpuworker http minilm=embed smollm2=chat --workers 2`.

    GET  /v2, /v2/health/live, /v2/health/ready, /v2/models/NAME, /v2/models/NAME/ready
    POST /v2/models/NAME/infer                                     frontends/http/v2.py: JSON and binary tensors; what becomes of them: rows.py beside it
    GET  /v1/models, /v1/models/NAME
    POST /v1/embeddings, /v1/completions, /v1/chat/completions     as OpenAI's clients have them
    GET  /healthz                                                  every worker's state as in frontends/health.py; 200 when all are ok, else 503
    GET  /metrics, /, /status.json                                 for Prometheus (frontends/metrics.py); the status page (frontends/page.py) and its figures

A client that leaves withdraws its request: it is not run if it has not started, and a generation ends at the model's next step. `X-Timeout-Ms: 250` gives a request
less time than `timeout`. Statuses: frontends/replies.py; docs/http.md has examples of everything. No framework and no state but the clients: the application may be
imported before or after a fork, and mounted in another one (Starlette, FastAPI).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

from gpuworker import AsyncClient

from .http.embeddings import Embeddings
from .http.exchange import App, ClientLeft, Exchange, Receive, Scope, Send, reply_headers
from .http.generation import TextGeneration
from .http.keys import ApiKeys
from .http.models import Model, Models
from .http.openai import OpenAI
from .http.v2 import Inference
from .http.watching import Watching
from .replies import HttpError, Reply

log = logging.getLogger("gpuworker.http")
Answer = Callable[[Exchange], Awaitable[None]]


class Route(NamedTuple):
    """What answers at a path. failure: what is said of an error there. is_open: without a key."""

    methods: tuple[str, ...]
    answer: Answer
    failure: Callable[[Exception], Reply]
    is_open: bool = False


def make_app(
    models: str | Mapping[str, str | AsyncClient],
    *,
    timeout: float = 20.0,
    generation_timeout: float = 600.0,
    max_body_bytes: int = 8 << 20,
    max_json_bytes: int = 4 << 20,
    api_keys_file: str | None = None,
    title: str = "gpuworker",
    extra_routes: Mapping[str, App] | None = None,
    stale_heartbeat_s: float = 5.0,
    long_batch_s: float = 30.0,
) -> App:
    """An ASGI application that calls workers.

    models: from the names that callers use to those of workers, or clients with options of their own (gpuworker.connect_async("embed", on_full="block")); or one
        worker's name, for a model that is called the same.
    timeout: seconds after which any request is answered with 504. generation_timeout: the same for /v1/completions and /v1/chat/completions.
    max_body_bytes: a longer body is answered with 413. max_json_bytes: so is longer JSON: it is parsed in the event loop, where others wait.
    api_keys_file: a file of keys, one a line, of which callers give one ("Authorization: Bearer KEY"), but for /v2/health/* and /healthz. Read again when changed.
    title: what GET /v2 calls this server.
    extra_routes: other ASGI applications, by the exact path that they answer, in place of what is there; a key is wanted there, too.
    stale_heartbeat_s, long_batch_s: a model is not ready although its owner lives when that gave no sign, or was in one batch, for longer than this.
    """
    served = Models(models)
    judgement = stale_heartbeat_s, long_batch_s
    v2 = Inference(served, title, timeout, max_json_bytes, *judgement)
    openai = OpenAI(served, max_json_bytes)
    watching = Watching(served, *judgement)
    embeddings, text = Embeddings(openai, timeout), TextGeneration(openai, generation_timeout)

    get, post = ("GET", "HEAD"), ("POST",)
    routes = {
        "/v2": Route(get, v2.server, v2.failure),
        "/v2/health/live": Route(get, v2.live, v2.failure, is_open=True),
        "/v2/health/ready": Route(get, v2.ready, v2.failure, is_open=True),
        "/healthz": Route(get, watching.healthz, v2.failure, is_open=True),
        "/metrics": Route(get, watching.metrics, v2.failure),
        "/": Route(get, watching.page, v2.failure),
        "/status.json": Route(get, watching.status, v2.failure),
        "/v1/models": Route(get, openai.list, openai.failure),
        "/v1/embeddings": Route(post, embeddings.create, openai.failure),
        "/v1/completions": Route(post, text.complete, openai.failure),
        "/v1/chat/completions": Route(post, text.chat, openai.failure),
    }
    for name, model in served.items():
        routes[f"/v2/models/{name}"] = Route(get, _of(v2.metadata, model), v2.failure)
        routes[f"/v2/models/{name}/ready"] = Route(get, _of(v2.model_ready, model), v2.failure)
        routes[f"/v2/models/{name}/infer"] = Route(post, _of(v2.infer, model), v2.failure)
        routes[f"/v1/models/{name}"] = Route(get, _of(openai.retrieve, model), openai.failure)
    for path in extra_routes or ():
        routes.pop(path, None)
    keys = ApiKeys(api_keys_file) if api_keys_file is not None else None
    return _Application(served, routes, dict(extra_routes or {}), keys, max_body_bytes, v2.failure, openai.failure)


def _of(answer: Callable[[Exchange, Model], Awaitable[None]], model: Model) -> Answer:
    return lambda exchange: answer(exchange, model)


class _Application:
    def __init__(
        self,
        models: Models,
        routes: Mapping[str, Route],
        extra: Mapping[str, App],
        keys: ApiKeys | None,
        body_limit: int,
        v2_failure: Callable[[Exception], Reply],
        openai_failure: Callable[[Exception], Reply],
    ) -> None:
        self._models, self._routes, self._extra, self._keys, self._body_limit = models, routes, extra, keys, body_limit
        self._v2_failure, self._openai_failure = v2_failure, openai_failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        if root and path.startswith(root):
            path = path[len(root) :] or "/"
        exchange = Exchange(scope, receive, send, self._body_limit)
        route = self._routes.get(path) or self._routes.get(path.rstrip("/"))
        failure = route.failure if route is not None else self._openai_failure if path.startswith("/v1/") else self._v2_failure
        try:
            if self._keys is not None and not (route is not None and route.is_open) and not self._keys.admits(exchange.headers.get(b"authorization")):
                raise HttpError(
                    HTTPStatus.UNAUTHORIZED, "Unauthorized", "a valid API key is needed: Authorization: Bearer KEY", ("WWW-Authenticate", "Bearer")
                )
            if route is None:
                if path in self._extra:
                    await self._extra[path](scope, receive, send)
                    return
                raise self._nothing_at(path)
            if scope["method"] not in route.methods:
                allow = ", ".join(route.methods)
                raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "MethodNotAllowed", f"this path takes {allow}", ("Allow", allow))
            await route.answer(exchange)
        except ClientLeft:
            pass
        except asyncio.CancelledError:
            if not exchange.is_over():
                raise
            log.debug("%s: the client has left", path)
        except Exception as error:
            if exchange.has_started:
                raise  # the server closes the connection: that is all that can be said now
            reply = failure(error)
            if reply.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                log.exception("%s failed", path)
            await exchange.reply(reply.status, reply.body, reply_headers(reply))

    def _nothing_at(self, path: str) -> HttpError:
        kind, _, rest = path.removeprefix("/").partition("/models/")
        if kind in ("v1", "v2") and rest:
            name = next((name for name in self._models if rest.startswith(f"{name}/versions/")), None)
            if name is not None:
                return HttpError(HTTPStatus.NOT_FOUND, "NotFound", f"model {name!r} has no versions; leave /versions/... out of the path")
            if not any(rest == name or rest.startswith(f"{name}/") for name in self._models):
                known = ", ".join(map(repr, self._models))
                return HttpError(HTTPStatus.NOT_FOUND, "ModelNotFound", f"there is no model {rest.partition('/')[0]!r:.100}; there are {known}")
        return HttpError(HTTPStatus.NOT_FOUND, "NotFound", "there is nothing at this path")

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The server's own events, and what is no HTTP."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        while scope["type"] == "lifespan":
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self._models.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})
