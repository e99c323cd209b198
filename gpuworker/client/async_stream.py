"""An answer that comes piece by piece, read by a task."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuworker.errors import RequestCancelled

if TYPE_CHECKING:
    from gpuworker.client.async_watch import Watch
    from gpuworker.client.stream import Delta, Generation, Stream


class AsyncStream(AsyncIterator["Delta"]):
    """The answer to one request, as it is generated; made by `AsyncClient.stream`. For one task at a time.

        async with client.stream("Once upon a time") as stream:
            async for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.generation.finish_reason)

    As a Stream: a slow reader holds up nobody and loses nothing; one that is dropped, closed, or whose block is left withdraws its request, and so does a task that
    is cancelled while it reads. Reading raises what `AsyncClient.submit` would.
    """

    class Begun(NamedTuple):
        """What it is once its request is on its way."""

        watch: Watch
        stream: Stream

    def __init__(self, send: Callable[[], Awaitable[Begun]] | None = None, begun: Begun | None = None) -> None:
        """send: sends the request, which has not been sent yet."""
        self._send, self._begun = send, begun
        self._is_read = self._closed = False

    @property
    def generation(self) -> Generation | None:
        """The whole answer, once it has been read to its end."""
        return self._begun.stream.generation if self._begun is not None else None

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        delta: Delta | None = await self._read(at_once=False)
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def result(self) -> Generation:
        """Reads to the end, and returns all of it."""
        begun = await self._begin()
        at_once = not begun.stream.has_stops
        while await self._read(at_once) is not None:
            pass
        generation = begun.stream.generation
        assert generation is not None
        return generation

    def cancel(self) -> bool:
        """Withdraws the request: the owner drops it before its next step. True if it was not over; then reading raises RequestCancelled."""
        if self._begun is None:
            was_over, self._closed = self._closed, True
            return not was_over
        cancelled = self._begun.stream.cancel()
        self._begun.watch.look()  # whoever reads is to learn of it
        return cancelled

    def close(self) -> None:
        """Gives its slot back now, whether or not it was read to its end."""
        self._closed = True
        if self._begun is not None:
            self._begun.stream.close()
            self._begun.watch.line.call(1)

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    async def __aenter__(self) -> AsyncStream:
        await self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<gpuworker.AsyncStream, {self._begun.stream!r}>" if self._begun is not None else "<gpuworker.AsyncStream, not sent yet>"

    async def _begin(self) -> Begun:
        if self._begun is None:
            if self._closed or self._send is None:
                raise RequestCancelled("the stream was closed before its request was sent")
            send, self._send = self._send, None
            self._begun = await send()
            if self._closed:
                self.close()
                raise RequestCancelled("the stream was closed while its request was being sent")
        return self._begun

    async def _read(self, at_once: bool) -> Any:
        if self._is_read:
            raise RuntimeError("this stream is being read by another task")
        self._is_read = True
        try:
            watch, stream = await self._begin()
            if watch.is_closed:
                raise RequestCancelled("the client was closed")
            was_called = False
            while isinstance(delta := stream.poll(at_once, was_called), str):
                ticket, seen, deadline_ns = stream.awaited(at_once)
                news = watch.news(ticket, seen, deadline_ns)
                try:
                    await news.future
                    was_called = True  # if there is nothing all the same, somebody had better ask why
                except BaseException:
                    watch.leave(news)
                    stream.close()
                    raise
            if stream.generation is not None:  # its slot is free
                watch.line.call(1)
            return delta
        finally:
            self._is_read = False
