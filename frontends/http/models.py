"""The models that an application serves: names of its own for workers, each with a client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import gpuworker
from gpuworker import AsyncClient, DeadlineExceeded, Declaration, Declared

CONNECT_TIMEOUT_S = 1.0  # a caller should not wait for long for an owner that is not there
WAKE = "park"  # a loop that serves other connections does not spin, and what they all send goes out with one ring, so batches are larger


class Model:
    """One of them. Opens nothing before the first request, so that it may be made before a fork."""

    def __init__(self, name: str, worker: str | AsyncClient) -> None:
        self.name = name
        self.is_own = isinstance(worker, str)
        self.client = gpuworker.connect_async(worker, connect_timeout_s=CONNECT_TIMEOUT_S, wake=WAKE) if isinstance(worker, str) else worker
        self.worker: str = self.client.name
        self._declared = Declared(self.worker)

    def declaration(self) -> Declaration:
        """What its worker says of its requests now. Raises WorkerNotFound, SegmentError."""
        return self._declared.now()

    async def answers(self, requests: list[Any], timeout_s: float) -> list[Any]:
        """To several requests at once, of which the first error withdraws the rest. timeout_s: for all of them together. Raises what submitting them does."""
        if len(requests) == 1:
            return [await self.client.submit(requests[0], timeout=timeout_s)]
        try:
            return await asyncio.wait_for(self._mapped(requests, timeout_s), timeout_s)
        except DeadlineExceeded:
            raise
        except asyncio.TimeoutError:
            raise DeadlineExceeded("not all answers came within the timeout", "running") from None

    async def _mapped(self, requests: list[Any], timeout_s: float) -> list[Any]:
        return [answer async for answer in self.client.map(requests, timeout=timeout_s)]


class Models(Mapping[str, Model]):
    """By name."""

    def __init__(self, models: str | Mapping[str, str | AsyncClient]) -> None:
        named = {models: models} if isinstance(models, str) else dict(models)
        if not named:
            raise ValueError("models: give at least one, as a worker's name, or as a dict from the names of models to those of their workers")
        for name in named:
            if not isinstance(name, str) or not name or len(name) > 200 or not name.isprintable():
                raise ValueError(f"models: {name!r:.100} is no name for a model")
        self._models = {name: Model(name, worker) for name, worker in named.items()}

    def __getitem__(self, name: str) -> Model:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    async def aclose(self) -> None:
        """Closes the clients that were made here."""
        for model in self._models.values():
            if model.is_own:
                await model.client.aclose()
