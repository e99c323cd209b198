"""generate and stream for event loops. What they need is loaded when they are first called."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from gpuworker.client.async_stream import AsyncStream
from gpuworker.client.generate import Generates, begin, samples, wish_of
from gpuworker.client.pending import deadline

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpuworker.client.async_loop import LoopClient
    from gpuworker.client.order import Wish


class Options(TypedDict, total=False):
    """The keywords of `Client.stream`, which explains them, and has the defaults; but for timeout."""

    max_tokens: int | None
    stop: str | Iterable[str] | None
    stop_ids: Iterable[int]
    ignore_eos: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    logprobs: int | None
    priority: int


_DEFAULTS = {
    name: one.default for name, one in inspect.signature(Generates.stream).parameters.items() if one.kind is one.KEYWORD_ONLY and name != "timeout"
}


class AsyncGenerates:
    """Mixed into AsyncClient."""

    async def generate(self, prompt: Any, *, n: int = 1, timeout: float | None = None, **options: Unpack[Options]) -> Any:
        """What the model says after `prompt`: arguments, result and errors are those of `Client.generate`. A task that is cancelled withdraws the request."""
        deadline_ns = 0 if timeout is None else deadline(timeout)
        n, wish = samples(n), _wish("generate", prompt, options)
        results = await _results(self._here(), wish, n, deadline_ns)
        return results if n > 1 else results[0]

    def stream(self, prompt: Any, *, timeout: float | None = None, **options: Unpack[Options]) -> AsyncStream:
        """The answer as it is generated: an AsyncStream; arguments are those of `Client.stream`.

            async for delta in client.stream("Once upon a time"):
                print(delta.text, end="", flush=True)

        The request is sent when the first of it is asked for, or by `async with`: errors are raised there.
        """
        deadline_ns = 0 if timeout is None else deadline(timeout)
        wish = _wish("stream", prompt, options)

        async def send() -> AsyncStream.Begun:
            here = self._here()
            stream = await here.drive(begin(here, wish, 0, deadline_ns))
            assert here.watch is not None
            return AsyncStream.Begun(here.watch, stream)

        return AsyncStream(send)

    def _here(self) -> LoopClient:
        raise NotImplementedError


def _wish(method: str, prompt: Any, options: Mapping[str, Any]) -> Wish:
    for name in options:
        if name not in _DEFAULTS:
            raise TypeError(f"AsyncClient.{method}() got an unexpected keyword argument {name!r}")
    return wish_of(prompt, **{**_DEFAULTS, **options})


async def _results(here: LoopClient, wish: Wish, n: int, deadline_ns: int) -> list[Any]:
    """n samples, as many of them at once as there are slots for."""
    streams: deque[AsyncStream] = deque()
    results = []
    try:
        for sample in range(n):
            while isinstance(stream := await here.drive(begin(here, wish, sample, deadline_ns, may_wait=not streams)), int):
                results.append(await streams[0].result())  # the slot that we wait for may be ours
                streams.popleft()
            assert here.watch is not None
            streams.append(AsyncStream(begun=AsyncStream.Begun(here.watch, stream)))
        for one in streams:
            results.append(await one.result())
    finally:
        for one in streams:
            one.close()
    return results
