"""A GenerationHandler that looks at its own steps: what each was made of, and where its owner's CPU time went. They land in a file when the worker ends."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_CLOCK = time.thread_time_ns


class StepRecord(NamedTuple):
    """One step. end_ns: CLOCK_MONOTONIC. The rest of the times are CPU time of the owner's thread: total_ns is all since the last step ended; model_ns without
    making its inputs. sequences: that took part; tokens: computed; used: places for tokens in used blocks, empty: those that hold nothing."""

    end_ns: int
    total_ns: int
    model_ns: int
    pack_ns: int
    sample_ns: int
    sequences: int
    tokens: int
    running: int
    waiting: int
    used: int
    empty: float
    preemptions: int

    @property
    def own_ns(self) -> int:
        """Scheduling and bookkeeping: all but the model and the sampler."""
        return self.total_ns - self.model_ns - self.sample_ns


class WatchedRecipe:
    """Becomes a Watched in the owner. file: where its steps are written; options: GenerationHandler's."""

    def __init__(self, directory: str, file: str, options: dict[str, Any]) -> None:
        self._made_of = directory, file, options

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str, dict[str, Any]]]:
        return _make, self._made_of


def read(file: str | Path) -> list[StepRecord]:
    return [StepRecord(*record) for record in json.loads(Path(file).read_text())]


def _make(directory: str, file: str, options: dict[str, Any]) -> Any:
    from gpuworker.generation import model
    from gpuworker.generation.handler import GenerationHandler

    class Watched(GenerationHandler):
        def make_loop(self, segment: Any, exchange: Any) -> Any:
            loop = super().make_loop(segment, exchange)
            self._watch = _Watch(loop, self._engine, model)
            return loop

        def close(self) -> None:
            Path(file).write_text(json.dumps(self._watch.records))
            super().close()

    return Watched(directory, **options)


class _Watch:
    def __init__(self, loop: Any, engine: Any, model: Any) -> None:
        self.records: list[StepRecord] = []
        self._spent: Counter[str] = Counter()
        self._engine, self._make_step = engine, loop._step
        engine._model.forward = self._timed("forward", engine._model.forward)
        engine._sampler.sample = self._timed("sample", engine._sampler.sample)
        model.pack = self._timed("pack", model.pack)
        loop._step = self._step
        self._ended_ns = _CLOCK()

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def lap(*args: Any) -> Any:
            began_ns = _CLOCK()
            try:
                return function(*args)
            finally:
                self._spent[part] += _CLOCK() - began_ns

        return lap

    def _step(self) -> None:
        self._spent.clear()
        self._make_step()
        total_ns, spent = _CLOCK() - self._ended_ns, self._spent
        chunks, found = self._engine.planned, self._engine.scheduler.stats()
        used = found.blocks_used * self._engine.scheduler.pool.block_tokens
        self.records.append(
            StepRecord(
                time.monotonic_ns(),
                total_ns,
                spent["forward"] - spent["pack"],
                spent["pack"],
                spent["sample"],
                len(chunks),
                sum(chunk.count for chunk in chunks),
                found.running,
                found.waiting,
                used,
                found.waste * used,
                found.preemptions,
            )
        )
        self._ended_ns = _CLOCK()  # looking is not counted
