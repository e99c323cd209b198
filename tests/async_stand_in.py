"""gpuworker.AsyncClient, thinly, on threads."""

import asyncio

import gpuworker


class AsyncClient:
    def __init__(self, name, **options):
        self.name = name
        self._client = gpuworker.connect(name, **options)

    async def submit(self, request, timeout=None, **options):
        pending = self._client.enqueue(request, timeout, **options)
        try:
            while not pending.done():
                await asyncio.sleep(0.001)
            return pending.result()
        except asyncio.CancelledError:
            pending.cancel()
            raise

    async def map(self, requests, timeout=None, **options):
        for one in requests:
            yield await self.submit(one, timeout, **options)

    async def generate(self, prompt, **options):
        return await asyncio.get_running_loop().run_in_executor(None, lambda: self._client.generate(prompt, **options))

    def stream(self, prompt, **options):
        return AsyncStream(self._client, prompt, options)

    def close(self):
        self._client.close()

    async def aclose(self):
        self.close()


class AsyncStream:
    def __init__(self, client, prompt, options):
        self._make, self._stream = lambda: client.stream(prompt, **options), None

    @property
    def generation(self):
        return self._stream.generation

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._stream is None:
            self._stream = self._make()
        delta = await asyncio.get_running_loop().run_in_executor(None, next, self._stream, None)
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def aclose(self):
        if self._stream is not None:
            self._stream.close()


if not hasattr(gpuworker, "AsyncClient") and "AsyncClient" not in gpuworker.__all__:
    gpuworker.AsyncClient = AsyncClient
    gpuworker.connect_async = AsyncClient
