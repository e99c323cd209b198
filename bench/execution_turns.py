"""A worker whose client and owner are the same thread, by turns: the client sends, the owner's own loop runs until all is answered, the client reads.

So what the owner spends is measured alone and batch by batch, and full batches form without anybody hurrying. Where nothing waits the clock is the thread's CPU
time, which does not run while others have the core."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol
from unittest import mock

import gpuworker
from gpuworker.execution.runner import TensorFlight
from gpuworker.worker.options import WorkerOptions
from gpuworker.worker.session import Session

Sample = dict[str, int]
"""Of one turn: part -> ns. "total": from the first look at the ring until everything is answered, forward and all. "batches": how many there were."""
Check = Callable[[Sequence[Any], Sequence[Any]], bool]

PARTS = ("collect, decide", "take", "read", "copy into the batch", "launch, outside forward", "copy out of it", "publish", "loop, bookkeeping")
"""Of the owner's time outside forward. Together a little more than "own", as looking at them takes time too."""


class Contestant(Protocol):
    label: str

    def round(self, turns: int) -> Sample: ...


class TurnsOver(Exception):
    """Ends the owner's loop."""


class Watch:
    """Where time goes: ns of `clock` by part, since the last `clear`."""

    def __init__(self, clock: Callable[[], int] = time.thread_time_ns) -> None:
        self.clock = clock
        self.spent: Counter[str] = Counter()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is added to `part`."""
        spent, clock = self.spent, self.clock

        def lap(*args: Any) -> Any:
            began_ns = clock()
            try:
                return function(*args)
            finally:
                spent[part] += clock() - began_ns

        return lap


class Stage:
    """One worker. `requests` are what the client sends in a turn, in order; `check(requests, answers)` says whether all is as it should be.

    The handler adds what it spends in its own forward to watch.spent["forward"].
    """

    def __init__(self, label: str, handler: Any, watch: Watch, requests: Sequence[Any], check: Check, **options: Any) -> None:
        self.label, self.watch, self.requests, self.check = label, watch, requests, check
        self._handler, self._options = handler, WorkerOptions.of({"cost_file": "off", "capacity": max(256, len(requests)), **options})

    def run(self, ready: Callable[[], None]) -> None:
        """Has a worker, in this thread, while `ready` runs."""
        name = f"bench-{os.getpid()}-{os.urandom(3).hex()}"
        self.session = Session(self._handler, name, self._options, may_exit=False)
        self.owner, self._client = self.session.owner, gpuworker.connect(name)

        def play() -> None:
            try:
                ready()
            finally:
                self._client.close()
                self.owner.stop(drain=False)

        self.session.run(play)

    @property
    def runner(self) -> Any:
        """Once the worker is ready: what begins batches."""
        return self.owner._runner

    def send(self) -> list[gpuworker.Pending]:
        return [self._client.enqueue(request) for request in self.requests]

    def turns(self, count: int, in_parts: bool = False) -> list[Sample]:
        """Has the client and the owner take so many turns. in_parts: samples tell more, and each of the watch's laps costs the total something.
        Raises RuntimeError for a wrong answer: those to the first turn are looked at."""
        owner = self.owner
        with contextlib.ExitStack() as patches:
            for whose, method, part in self._parts() if in_parts else ():
                patches.enter_context(mock.patch.object(whose, method, self.watch.timed(part, getattr(whose, method))))
            turns = _Turns(self, count)
            patches.enter_context(mock.patch.object(owner, "line", turns))
            patches.enter_context(contextlib.suppress(TurnsOver))
            owner.run(lambda: None)
        return turns.samples

    def _parts(self) -> list[tuple[Any, str, str]]:
        """(object, its method, the part that the method's time goes to)."""
        owner, runner, line = self.owner, self.runner, self.owner.line
        parts = [
            (line, "collect", "collect"),
            (line, "decide", "decide"),
            (line, "take", "take"),
            (owner, "_dispatch", "dispatch"),
            (runner, "begin", "begin"),
        ]
        if not hasattr(runner, "engine"):
            return [*parts, (runner.exchange, "read", "read"), (runner.exchange, "respond", "scatter")]
        engine = runner.engine
        more = [(runner, "_read", "read"), (engine, "gather", "gather"), (engine.executor, "launch", "launch"), (TensorFlight, "_scatter", "scatter")]
        return [*parts, *more]

    def round(self, turns: int) -> Sample:
        """Medians: "total" and "own" (the total without forward) of turns that nothing else is measured of, and "forward" and PARTS of as many others."""
        whole, parts = self.turns(turns), self.turns(turns, in_parts=True)
        own = median(sample["total"] - sample["forward"] for sample in whole)
        return {**medians([split(sample) for sample in parts]), **medians(whole), "own": round(own)}


class _Turns:
    """The owner's line, which lets the client have its turn when all is answered."""

    def __init__(self, stage: Stage, count: int) -> None:
        self._stage, self._left, line = stage, count, stage.owner.line
        self._collect, self._take = line.collect, line.take
        for name in set(dir(line)) - set(dir(self)):
            setattr(self, name, getattr(line, name))  # all else is the line's own, and costs the owner nothing more
        self._pending: list[gpuworker.Pending] = []
        self._taken = self._batches = self._began_ns = 0
        self.samples: list[Sample] = []

    def collect(self, until_ns: int) -> int:
        now_ns = self._stage.watch.clock()
        if self._taken == len(self._pending) and not self._stage.owner._flights:
            self._change_sides(now_ns)
        return self._collect(until_ns)

    def take(self, run: Any, taken: Any) -> Any:
        run = self._take(run, taken)
        self._taken += run.size
        self._batches += bool(run.size)
        return run

    def _change_sides(self, now_ns: int) -> None:
        stage = self._stage
        if self._pending:
            sample = {**stage.watch.spent, "total": now_ns - self._began_ns, "batches": self._batches}
            answers = [pending.result() for pending in self._pending]
            if not self.samples and not stage.check(stage.requests, answers):
                raise RuntimeError(f"{stage.label}: wrong answers")
            self.samples.append(sample)
            del answers  # giving their memory back is the client's business
        if not self._left:
            raise TurnsOver
        self._left -= 1
        self._pending, self._taken, self._batches = stage.send(), 0, 0
        stage.watch.spent.clear()
        self._began_ns = stage.watch.clock()


def on_stage(stages: Sequence[Stage], play: Callable[[], None]) -> None:
    """Calls `play` while all the workers are ready."""
    if not stages:
        play()
        return
    first, *others = stages
    first.run(lambda: on_stage(others, play))


def alternate(contestants: Sequence[Contestant], rounds: int, turns: int) -> dict[str, list[Sample]]:
    """Label -> a sample of medians for each round. Each round has every contestant, one after the other; a first short one does not count."""
    found: dict[str, list[Sample]] = {one.label: [] for one in contestants}
    for number in range(rounds + 1):
        for one in contestants:
            sample = one.round(turns if number else 3)
            if number:
                found[one.label].append(sample)
    return found


def medians(samples: Sequence[Sample]) -> Sample:
    """Part by part."""
    return {part: round(median(sample.get(part, 0) for sample in samples)) for part in samples[-1]}


def split(sample: Sample) -> Sample:
    """A sample as the watch has it, as PARTS."""
    at = Counter(sample)
    asked, dispatched = at["collect"] + at["decide"], at["dispatch"]
    gathered, launched = at["gather"], at["launch"] - at["forward"]
    published = dispatched - at["take"] - at["begin"] - at["scatter"]
    rest = at["total"] - asked - dispatched + at["begin"] - at["read"] - gathered - at["launch"]
    return dict(zip(PARTS, (asked, at["take"], at["read"], gathered, launched, at["scatter"], published, rest), strict=True))
