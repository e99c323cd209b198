"""Answers as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html): a chunk each, and [DONE].

Until there is a first piece nothing is sent, so that an error before it has a status of its own; later it is an event, and the stream ends. What a slow reader has
not taken waits in its request's slot: this process keeps no more than a piece for each choice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from gpuworker import AsyncClient, Delta, Generation

from ..replies import encode
from .choices import Completions, usage_of
from .exchange import Exchange
from .openai import error_object

log = logging.getLogger("gpuworker.http")
HEAD = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
Piece = tuple[int, Delta | Generation]
"""Of the choice of that number; a Generation is its end."""


class Events:
    """One answer. n: choices for each prompt."""

    def __init__(self, shape: Completions, n: int, with_usage: bool) -> None:
        self._shape, self._n, self._with_usage = shape, n, with_usage
        self._more: dict[str, Any] = {"usage": None} if with_usage else {}

    async def send(self, exchange: Exchange, client: AsyncClient, calls: list[tuple[Any, dict[str, Any]]]) -> None:
        """calls: prompt and options of each choice. Raises what happens before the first piece."""
        pieces = _one(client, 0, *calls[0]) if len(calls) == 1 else _merged(client, calls)
        ends: dict[int, Generation] = {}
        try:
            first = await anext(pieces)
            await exchange.begin(HEAD)
            for index in range(len(calls)):
                opening = self._shape.opening(index)
                if opening is not None:
                    await self._write(exchange, opening)
            await self._take(exchange, first, ends)
            async for piece in pieces:
                await self._take(exchange, piece, ends)
            if self._with_usage:
                usage = usage_of([ends[index].usage for index in range(len(calls))], self._n)
                await exchange.write(_event(self._shape.chunk([], usage=usage)))
            await exchange.write(b"data: [DONE]\n\n", is_last=True)
        except Exception as error:
            if not exchange.has_started:
                raise
            said = error_object(error)
            log.warning("an answer ended in the middle: %s", error, exc_info=said["type"] == "server_error")
            await exchange.write(_event({"error": said}), is_last=True)
        finally:
            await pieces.aclose()

    async def _take(self, exchange: Exchange, piece: Piece, ends: dict[int, Generation]) -> None:
        index, what = piece
        if isinstance(what, Generation):
            ends[index] = what
            await self._write(exchange, self._shape.ending(index, what.finish_reason))
        elif what.text or what.logprobs:
            await self._write(exchange, self._shape.piece(index, what))

    async def _write(self, exchange: Exchange, choice: dict[str, Any]) -> None:
        await exchange.write(_event(self._shape.chunk([choice], **self._more)))


def _event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


async def _one(client: AsyncClient, index: int, prompt: Any, options: dict[str, Any]) -> AsyncGenerator[Piece, None]:
    stream = client.stream(prompt, **options)
    try:
        async for delta in stream:
            yield index, delta
        assert stream.generation is not None
        yield index, stream.generation
    finally:
        await stream.aclose()


async def _merged(client: AsyncClient, calls: list[tuple[Any, dict[str, Any]]]) -> AsyncGenerator[Piece, None]:
    """The pieces of several streams as they come; the first error ends all."""
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(len(calls))

    async def pump(index: int) -> None:
        pieces: AsyncIterator[Piece] = _one(client, index, *calls[index])
        try:
            async for piece in pieces:
                await queue.put(piece)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    tasks = [asyncio.ensure_future(pump(index)) for index in range(len(calls))]
    try:
        running = len(tasks)
        while running:
            got = await queue.get()
            if isinstance(got, Exception):
                raise got
            if got is None:
                running -= 1
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
