"""What is measured: each function starts the workers that it needs, and returns plain records."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import generation_others as others
import numpy as np
from generation_watch import StepRecord, WatchedRecipe, read
from generation_work import LONGEST_MODEL_TOKENS, Replay, Spread, Subject, cut

import gpuworker
from examples.llm_chat.fleet import Served, serve
from examples.llm_chat.rivals import ALONE, CONTINUOUS, STATIC, Outcome, Rivals
from examples.llm_chat.work import Request

OURS, TRANSFORMERS_STATIC, TRANSFORMERS = "gpuworker", "transformers, static batches", "transformers, continuous batching"
SLOTS = (1, 4, 8, 16, 32, 64)
COMPARED = 16
"""Slots at which contestants are compared."""
FRONTENDS = 16
REQUESTS_PER_SLOT = 16
CACHE_BYTES = 1 << 30


class Running:
    """A worker. steps: all that it made; there when it has ended."""

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        self.steps: list[StepRecord] = []


@contextmanager
def worker(subject: Subject, slots: int, dtype: str | None = None, batch_tokens: int = 512) -> Iterator[Running]:
    """One that is warm."""
    with tempfile.TemporaryDirectory(prefix="gpuworker-bench-") as folder:
        running = Running(f"bench-generation-{os.getpid()}-{os.urandom(3).hex()}", Path(folder) / "steps.json")
        options = {"dtype": dtype or subject.dtype, "device": "cpu", "kv_cache_bytes": CACHE_BYTES, "max_model_tokens": LONGEST_MODEL_TOKENS}
        recipe = WatchedRecipe(subject.directory, str(running.file), options)
        with gpuworker.Worker(recipe, name=running.name, max_batch_size=slots, max_batch_tokens=max(batch_tokens, slots), capacity=512):
            serve(running.name, [Request(subject.ids[-9:], 3)] * 2, frontends=1)
            yield running
        running.steps = read(running.file)


def frontends_for(requests: Sequence[Request]) -> int:
    return min(FRONTENDS, len(requests))


def by_slots(subject: Subject, requests: Sequence[Request], slots: Sequence[int]) -> list[dict[str, Any]]:
    """All requests at once, for workers of so many slots; the first of them where one slot would take minutes."""
    records = []
    for count in slots:
        with worker(subject, count) as running:
            few = requests[: REQUESTS_PER_SLOT * count]
            served = serve(running.name, few, frontends=frontends_for(few))
        records.append({"slots": count, "requests": len(few), **of_served(served), **of_steps(_during(running, served), count)})
    return records


WAYS = {STATIC: TRANSFORMERS_STATIC, CONTINUOUS: TRANSFORMERS}
OTHERS = "others"


def compare(subject: Subject, requests: Sequence[Request], slots: int, rounds: int, against: Sequence[str] = (*WAYS, OTHERS)) -> list[dict[str, Any]]:
    """Every contestant in turn, round by round, on the same requests: those that are installed. against: STATIC, CONTINUOUS, OTHERS."""
    records: list[dict[str, Any]] = []
    with worker(subject, slots) as running, Rivals(subject.directory) as rivals, ExitStack() as stack:
        more = stack.enter_context(others.installed(subject, slots)) if OTHERS in against else []
        for number in range(rounds):
            served = serve(running.name, requests, frontends=frontends_for(requests))
            records.append({"contestant": OURS, "round": number, **of_served(served)})
            for way, label in WAYS.items():
                if way not in against:
                    continue
                outcome = rivals.run(way, requests, dtype=subject.dtype, slots=slots)
                records.append({"contestant": label, "round": number, **of_outcome(outcome)})
            records += [{"contestant": other.label, "round": number, **other.run(requests)} for other in more]
    return records


def exact(subject: Subject, requests: Sequence[Request], slots: int) -> dict[str, Any]:
    """In float32, all at once, against each alone."""
    with worker(subject, slots, "float32", batch_tokens=48) as running:
        served = serve(running.name, requests, frontends=frontends_for(requests))
    with Rivals(subject.directory) as rivals:
        expected = rivals.run(ALONE, requests, dtype="float32")
    return {"requests": len(requests), "tokens": expected.count, "same": sum(a == b for a, b in zip(served.tokens, expected.tokens, strict=True))}


def by_variance(subject: Subject, spreads: Sequence[Spread], prompt_tokens: int, slots: int) -> list[dict[str, Any]]:
    """Ours and static batches, for answers of the same mean length."""
    records, choice = [], random.Random(3)
    with worker(subject, slots) as running, Rivals(subject.directory) as rivals:
        for spread in spreads:
            requests = [Request(cut(subject.ids, prompt_tokens, choice), tokens) for tokens in spread.lengths]
            served = serve(running.name, requests, frontends=frontends_for(requests))
            static = rivals.run(STATIC, requests, dtype=subject.dtype, slots=slots)
            records.append({"spread": spread.label, "variation": spread.variation, "ours": of_served(served), "static": of_outcome(static)})
    return records


def at_loads(subject: Subject, replay: Replay, slots: int, loads: Sequence[float]) -> list[dict[str, Any]]:
    """A trace. Load 1: the rate at which its requests are finished when all are there at once."""
    records = []
    with worker(subject, slots) as running:
        flat_out = serve(running.name, replay.requests, frontends=frontends_for(replay.requests))
    capacity = len(replay.requests) / flat_out.seconds
    mean = len(replay.requests) / max(replay.arrivals_s[-1], 1e-9)
    for load in loads:
        with worker(subject, slots) as running:  # a new one: the last one's prefixes are no part of the trace
            at_s = [at * mean / (load * capacity) for at in replay.arrivals_s]
            served = serve(running.name, replay.requests, frontends=frontends_for(replay.requests), at_s=at_s)
        records.append({"load": load, "per_s": load * capacity, **of_served(served), **of_steps(_during(running, served), slots)})
    return records


def of_served(served: Served) -> dict[str, Any]:
    return {
        "tokens": served.count,
        "raw_tokens": served.count,
        "seconds": served.seconds,
        "cpu_s": served.cpu_s,
        "owner_cpu_s": served.owner_cpu_s,
        "foreign_cores": served.foreign,
        "first_ms": quantiles(served.first_ms()),
        "between_ms": quantiles(served.between_ms()),
    }


def of_outcome(outcome: Outcome) -> dict[str, Any]:
    return {"tokens": outcome.count, "raw_tokens": outcome.raw_tokens, "seconds": outcome.seconds, "cpu_s": outcome.cpu_s}


def of_steps(steps: Sequence[StepRecord], slots: int) -> dict[str, Any]:
    """occupancy: of the slots, in the mean step in which something waited (None: nothing ever did). waste: of used blocks' places, over all steps. own: share of
    the owner's CPU time that is neither the model nor the sampler; pack: the part of it that makes the model's inputs."""
    total_ns = sum(step.total_ns for step in steps)
    full = [step.sequences / slots for step in steps if step.waiting]
    return {
        "steps": len(steps),
        "step_ms": median(step.total_ns for step in steps) / 1e6,
        "sequences": sum(step.sequences for step in steps) / len(steps),
        "occupancy": sum(full) / len(full) if full else None,
        "waste": sum(step.empty for step in steps) / max(1, sum(step.used for step in steps)),
        "own": sum(step.own_ns for step in steps) / total_ns,
        "own_us": median(step.own_ns for step in steps) / 1e3,
        "pack": sum(step.pack_ns for step in steps) / total_ns,
        "sample": sum(step.sample_ns for step in steps) / total_ns,
        "preemptions": steps[-1].preemptions - steps[0].preemptions,
    }


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": float(p50), "p99": float(p99)}


def _during(running: Running, served: Served) -> list[StepRecord]:
    return [step for step in running.steps if step.end_ns >= min(served.sent_ns)]
