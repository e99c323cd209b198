"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import os
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Any

from gpuworker.client.async_generate import AsyncGenerates
from gpuworker.client.async_loop import LoopClient
from gpuworker.client.async_watch import Awaited
from gpuworker.client.client import _OVERFLOW, Client
from gpuworker.client.link import Link
from gpuworker.client.locks import Lock
from gpuworker.client.pending import deadline

_clients: weakref.WeakSet[AsyncClient] = weakref.WeakSet()
_running_loop = asyncio.get_running_loop


def connect_async(
    name: str,
    *,
    connect_timeout_s: float = 10.0,
    on_full: str | None = None,
    fallback: Callable[[Any], Any] | None = None,
    wake: str | None = None,
    group: str | None = None,
    allow_pickle: bool = False,
    length: Callable[[Any], int] | None = None,
    tracing: bool | None = None,
) -> AsyncClient:
    """A client of the worker called `name` for asyncio. As `connect`, which explains the options; `fallback` may return an awaitable."""
    return AsyncClient(
        name, connect_timeout_s=connect_timeout_s, on_full=on_full, fallback=fallback, wake=wake, group=group, allow_pickle=allow_pickle, length=length,
        tracing=tracing,
    )  # fmt: skip


class AsyncClient(AsyncGenerates):
    """Calls one worker from event loops, without a thread for each request: the owner wakes a loop once for all its answers of a batch.

    Nothing is opened before the first request, so it may be made at import time and before a fork. It may be used by several loops, each in a thread of its own, at
    once: each joins the worker by itself. It leaves when it is closed, and for one loop when that is shut down in order, as asyncio.run does.
    """

    def __init__(
        self,
        name: str,
        *,
        connect_timeout_s: float = 10.0,
        on_full: str | None = None,
        fallback: Callable[[Any], Any] | None = None,
        wake: str | None = None,
        group: str | None = None,
        allow_pickle: bool = False,
        length: Callable[[Any], int] | None = None,
        tracing: bool | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "connect_timeout_s": connect_timeout_s,
            "on_full": on_full,
            "fallback": fallback,
            "wake": wake,
            "group": group,
            "allow_pickle": allow_pickle,
            "length": length,
            "tracing": tracing,
        }
        Client(name, **self._options)  # mistakes are errors here, not at the first request
        self.name = name
        self._fallback = fallback
        self._loops: dict[asyncio.AbstractEventLoop, LoopClient] = {}
        self._last: LoopClient | None = None  # the one that was used last
        self._lock = Lock()
        self._closed = False
        _clients.add(self)

    async def submit(self, request: Any, timeout: float | None = None, *, latency_budget_ms: float | None = None, priority: int = 0) -> Any:
        """Sends a request and waits for its answer; arguments, answer and errors are those of `Client.submit`.

        A task that is cancelled withdraws its request: it does not run if it has not started.
        """
        deadline_ns = 0 if timeout is None else deadline(timeout)
        here = self._last
        if here is None or here.loop is not _running_loop():
            here = self._here()
        link = here._link
        if link is None or link.lost:
            link = await here.live(deadline_ns)
        payload, terms = request, 0
        if link.fits or latency_budget_ms is not None or priority != 0 or here._length is not None:
            link, payload, terms = await self._prepare(here, request, latency_budget_ms, priority, deadline_ns)
        sent = here.send(payload, deadline_ns, terms)
        if isinstance(sent, int):
            if here._falls_back(sent):
                return await self._fall_back(request)
            sent = await self._send_late(here, sent, link, request, payload, deadline_ns, terms)
        try:
            return await sent.future
        except BaseException:
            sent.watch.forget(sent)
            raise

    async def map(
        self,
        requests: Iterable[Any] | AsyncIterable[Any],
        timeout: float | None = None,
        *,
        latency_budget_ms: float | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Any]:
        """Answers in the order of the requests, with several on their way at a time; as `Client.map`. The requests may come from an asynchronous iterable, too."""
        here = self._here()
        pending: deque[Awaited] = deque()
        try:
            async for request in _each(requests):
                prepared_for: Link | None = None
                while True:
                    deadline_ns = 0 if timeout is None else deadline(timeout)
                    link = await here.live(deadline_ns)
                    if link is not prepared_for:
                        prepared_for, payload, terms = await self._prepare(here, request, latency_budget_ms, priority, deadline_ns)
                        link = prepared_for
                    sent = -errno.EAGAIN if len(pending) >= link.window else here.send(payload, deadline_ns, terms)
                    if sent in _OVERFLOW and pending:
                        answer = await pending[0].future
                        pending.popleft()
                        yield answer
                        continue
                    if isinstance(sent, int) and here._falls_back(sent):
                        sent = here.settled(await self._fall_back(request))
                    elif isinstance(sent, int):
                        sent = await self._send_late(here, sent, link, request, payload, deadline_ns, terms)
                    pending.append(sent)
                    break
            while pending:
                answer = await pending[0].future
                pending.popleft()
                yield answer
        finally:
            for left in pending:
                left.drop()

    def close(self) -> None:
        """Leaves the worker, in all loops. Requests that are on their way are withdrawn (RequestCancelled). From any thread; closing twice is fine."""
        with self._lock:
            self._closed, self._last = True, None
            loops = list(self._loops.values())
        for here in loops:
            if here.loop.is_running() and here.loop is not _running_loop_or_none():
                with contextlib.suppress(RuntimeError):  # closed in this moment
                    here.loop.call_soon_threadsafe(here.close)
            else:
                here.close()

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end even asyncio may be gone
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"connected in {len(self._loops)} loops" if self._loops else "not connected yet"
        return f"<gpuworker.AsyncClient of {self.name!r}, {state}>"

    def _here(self) -> LoopClient:
        """The part of this client that belongs to the loop that runs in this thread. Raises RuntimeError."""
        here, loop = self._last, _running_loop_or_none()
        if loop is None:
            raise RuntimeError(
                f"{self!r} needs asyncio: await it in a running asyncio event loop (under trio there is none; use gpuworker.Client in a thread)"
            )
        if here is not None and here.loop is loop:
            return here
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self!r} cannot send")
            here = self._loops.get(loop)
            ended = [one for one in self._loops.values() if one.loop.is_closed()]
            if here is None:
                forget = weakref.WeakMethod(self._forget)
                here = self._loops[loop] = LoopClient(loop, self.name, self._options, lambda one: (method := forget()) and method(one))
            self._last = here
        for one in ended:
            one.close()
        return here

    def _forget(self, here: LoopClient) -> None:
        with self._lock:
            self._loops.pop(here.loop, None)
            if self._last is here:
                self._last = None

    async def _prepare(
        self, here: LoopClient, request: Any, latency_budget_ms: float | None, priority: int, deadline_ns: int
    ) -> tuple[Link, Any, int]:  # fmt: skip
        link = here._link
        assert link is not None
        while (found := here._fit(link, request, latency_budget_ms, priority)) is None:
            link = await here.drive(here._successor(link, deadline_ns))
        return link, *found

    async def _send_late(self, here: LoopClient, problem: int, sent_to: Link, request: Any, payload: Any, deadline_ns: int, terms: int) -> Awaited:
        def take_charge(link: Link, ticket: int) -> Awaited:
            assert here.watch is not None
            return here.watch.answer(ticket, deadline_ns)

        sent: Awaited = await here.drive(here._send_late(problem, sent_to, request, payload, deadline_ns, terms, take_charge))
        return sent

    async def _fall_back(self, request: Any) -> Any:
        assert self._fallback is not None
        answer = self._fallback(request)
        return await answer if inspect.isawaitable(answer) else answer


async def _each(requests: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request


def _running_loop_or_none() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_of_the_parent: list[LoopClient] = []


def _after_fork_in_child() -> None:
    """Loops, links and FIFOs belong to the parent: the child makes its own, and touches none of these, not even to tidy them up."""
    for client in list(_clients):
        client._lock = Lock()
        for here in client._loops.values():
            here.let_go()
            _of_the_parent.append(here)
        client._loops, client._last = {}, None


os.register_at_fork(after_in_child=_after_fork_in_child)
