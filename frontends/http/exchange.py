"""One HTTP request and its answer, as ASGI has them: the body within limits, the client that may leave, the reply."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from ..replies import HttpError, Reply
from . import patience

log = logging.getLogger("gpuworker.http")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SLOW_READER_S = 5.0
"""What a caller has, after the time limit of its answer, to take what is there of it."""
LONG_TEXT = 1 << 12
"""More letters are made into tokens in a thread: the tokenizer lets others run meanwhile."""
JSON = ((b"content-type", b"application/json"),)


class ClientLeft(Exception):
    """There is nobody to answer."""


class Exchange:
    """A request that is being answered.

    Within `with exchange:` the running task is cancelled when the client leaves, which withdraws what it has sent to workers; `has_left` tells that from other
    reasons.
    """

    __slots__ = (
        "_body_limit",
        "_limit",
        "_patience",
        "_receive",
        "_send",
        "_task",
        "_watcher",
        "has_left",
        "has_started",
        "headers",
        "is_head",
        "scope",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, body_limit: int) -> None:
        self.scope, self._receive, self._send, self._body_limit = scope, receive, send, body_limit
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.is_head: bool = scope["method"] == "HEAD"
        self.has_left = self.has_started = False
        self._task: asyncio.Task[Any] | None = None
        self._patience: patience.Patience | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def body(self) -> bytes:
        """All of it. Raises HttpError for one that is too long (at once where its length is declared) or compressed, ClientLeft."""
        limit, headers = self._body_limit, self.headers
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType", "compressed bodies are not taken; send it as it is")
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and len(declared) < 20 and int(declared) <= limit:
            message = await self._receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                body: bytes = message.get("body", b"")
                if len(body) <= limit:
                    return body
            else:
                return await self._rest(message, limit)
        raise too_long(limit)

    async def _rest(self, message: Message, limit: int) -> bytes:
        body = bytearray()
        while message["type"] == "http.request":
            body += message.get("body", b"")
            if len(body) > limit:
                raise too_long(limit)
            if not message.get("more_body"):
                return bytes(body)
            message = await self._receive()
        raise ClientLeft

    def timeout_s(self, most: float) -> float:
        """Seconds that the request gives itself (X-Timeout-Ms), at most `most`. Raises HttpError."""
        asked = self.headers.get(b"x-timeout-ms")
        return most if asked is None else min(milliseconds(asked) / 1e3, most)

    async def reply(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = JSON) -> None:
        """The whole answer at once."""
        self.has_started = True
        await self._send({"type": "http.response.start", "status": int(status), "headers": [*headers, (b"content-length", b"%d" % len(body))]})
        await self._send({"type": "http.response.body", "body": b"" if self.is_head else body})

    async def begin(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """The head of an answer that comes piece by piece."""
        self.has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(headers)})

    async def write(self, piece: bytes, is_last: bool = False) -> None:
        """Waits while the connection takes no more."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": not is_last})

    def watch(self) -> None:
        """Looks from now on whether the client is still there. Its body must have been read."""
        if self._patience is not None:
            self._patience.leave(self)
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def hurry(self, seconds: float) -> None:
        """A caller that has not taken its answer after so many seconds is treated as one that has left: what it does not read would keep its slot for ever."""
        self._limit = asyncio.get_running_loop().call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self._task is not None:
            log.warning("%s: the caller has not read its answer within the time limit; it is not waited for any more", self.scope["path"])
            self.has_left = True
            self._task.cancel()

    def is_over(self) -> bool:
        """For who catches the cancellation: whether it was for the client's sake. Then it is undone, so that nobody further out takes it for his."""
        task = asyncio.current_task()
        if self.has_left and task is not None and hasattr(task, "uncancel"):  # from Python 3.11 on
            task.uncancel()
        return self.has_left

    async def _watch(self) -> None:
        message = await self._receive()
        if message["type"] == "http.disconnect" and self._task is not None:
            self.has_left = True
            self._task.cancel()

    def __enter__(self) -> Exchange:
        loop = asyncio.get_running_loop()  # once: Python 3.11 makes a system call for it
        self._task = asyncio.current_task(loop)
        self._patience = patience.of(loop)
        self._patience.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._task = None
        if self._limit is not None:
            self._limit.cancel()
        if self._patience is not None:
            self._patience.leave(self)
        if self._watcher is not None:
            self._watcher.cancel()


def milliseconds(text: bytes) -> float:
    """Raises HttpError."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise HttpError(HTTPStatus.BAD_REQUEST, "BadRequest", "the timeout must be a number of milliseconds >= 0")
    return found


def too_long(limit: int, what: str = "the body", advice: str = "") -> HttpError:
    """The error for more bytes than are taken."""
    return HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "PayloadTooLarge", f"{what} is longer than {limit:,} bytes{advice}")


def encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI has them."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def reply_headers(reply: Reply) -> list[tuple[bytes, bytes]]:
    """Of an answer in JSON."""
    return [*JSON, *encoded(reply.headers)]
