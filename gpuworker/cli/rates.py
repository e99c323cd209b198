"""What a worker did between two readings of its statistics, as `gpuworker top` shows it. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from gpuworker.cli.interval import OUTCOMES, STAGES, is_same_life, since, with_budget
from gpuworker.segment.execution import Execution
from gpuworker.segment.generation import Generation
from gpuworker.segment.stats import Histogram, Stats

OCTAVES = 24
"""Of a wait's histogram: from 256 ns to 4 s, what is longer in the last one."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """One stage of a request's life, over the interval. `octaves[i]`: how many took from 256 << i ns on, up to twice that (the first: all that was shorter)."""

    count: int
    mean_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    octaves: tuple[int, ...]

    @classmethod
    def of(cls, h: Histogram) -> Wait:
        """From a histogram of four buckets an octave."""
        by_octave = [sum(h.buckets[i : i + 4]) for i in range(0, len(h.buckets), 4)]
        octaves = (*by_octave[: OCTAVES - 1], sum(by_octave[OCTAVES - 1 :]))
        return cls(h.count, h.mean_us, h.quantile_us(0.5), h.quantile_us(0.9), h.quantile_us(0.99), octaves)


@dataclasses.dataclass(frozen=True)
class Device:
    """Of a worker of tensors. `busy`: share of the interval that programs had the device (0 where that is not measured); `graph_hits`: share of batches that were
    replays of a CUDA graph, None without graphs; `row_padding`: rows run for each real one."""

    busy: float
    device_ms: float
    row_padding: float
    to_device_bytes_per_s: float
    from_device_bytes_per_s: float
    graph_hits: float | None
    graphs: int
    memory_bytes: int
    memory_reserved_bytes: int
    memory_total_bytes: int

    @classmethod
    def between(cls, before: Execution | None, now: Execution | None, elapsed_s: float) -> Device | None:
        """None for a worker that has run no tensors."""
        if now is None:
            return None
        counted = now.since(before)
        runs = counted.graph_hits + counted.graph_misses
        return cls(
            busy=round(min(counted.device_ns / 1e9 / elapsed_s, 1.0), 4),
            device_ms=counted.device_ms,
            row_padding=round(counted.padded_rows / counted.rows, 4) if counted.rows else 0.0,
            to_device_bytes_per_s=round(counted.to_device_bytes / elapsed_s),
            from_device_bytes_per_s=round(counted.from_device_bytes / elapsed_s),
            graph_hits=round(counted.graph_hits / runs, 4) if runs else None,
            graphs=now.graphs,
            memory_bytes=now.memory_bytes,
            memory_reserved_bytes=now.memory_reserved_bytes,
            memory_total_bytes=now.memory_total_bytes,
        )


@dataclasses.dataclass(frozen=True)
class Generating:
    """Of a worker that generates: tokens and steps per second, and what it holds now. blocks_cached are among blocks_free. graph_hits: share of decode steps that
    were replays of a CUDA graph, None without graphs."""

    per_s: dict[str, float]
    graph_hits: float | None
    graphs: int
    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    waste: float

    @classmethod
    def between(cls, before: Generation | None, now: Generation | None, elapsed_s: float) -> Generating | None:
        """None for a worker that does not generate."""
        if now is None:
            return None
        counted = now.since(before or now)
        per_s = {
            name: round(getattr(counted, name) / elapsed_s, 3) for name in ("tokens", "prompt_tokens", "prefix_hit_tokens", "steps", "preemptions")
        }
        held = {name: getattr(now, name) for name in ("running", "waiting", "blocks_used", "blocks_cached", "blocks_free", "waste")}
        replays = counted.graph_hits + counted.graph_misses
        return cls(per_s, round(counted.graph_hits / replays, 4) if replays else None, now.graphs, **held)


@dataclasses.dataclass(frozen=True)
class Rates:
    """A worker over `interval_s` seconds. `per_s`: requests by outcome, and batches; `totals`: the same since the segment was made. `reasons`: why batches left, as
    shares. `clients`: slots held, by pid. `padding`: tokens run for each real one, 0 where lengths are not used; `goodput`: share of requests with a latency budget
    that were on time, None where there were none. `restarts`, `note`: of its owners, and why the last one ended."""

    name: str
    state: str
    owner_pid: int
    handler: str
    uptime_s: float
    heartbeat_age_s: float
    batch_running_s: float
    restarts: int
    reloads: int
    note: str
    interval_s: float
    per_s: dict[str, float]
    totals: dict[str, int]
    waits: dict[str, Wait]
    mean_batch_size: float
    max_batch_size: int
    batch_sizes: dict[str, int]
    reasons: dict[str, float]
    slots_in_use: int
    capacity: int
    clients: dict[int, int]
    padding: float
    latency_budget_ms: float
    goodput: float | None
    device: Device | None
    generation: Generating | None

    @classmethod
    def between(cls, before: Stats, now: Stats, elapsed_s: float) -> Rates:
        """elapsed_s: seconds between the two, > 0. Where they are not of one owner nothing is known to have happened between them: rates are then 0."""
        if not is_same_life(before, now):
            before = now
        counted = since(before, now)
        names = (*OUTCOMES, "batches")
        total = sum(counted.dispatch_reasons.values())
        ended = with_budget(vars(counted))
        return cls(
            name=now.name, state=now.condition(), owner_pid=now.owner_pid, handler=now.handler,
            uptime_s=now.uptime_s, heartbeat_age_s=now.heartbeat_age_s, batch_running_s=now.batch_running_s,
            restarts=now.restarts, reloads=now.reloads, note=now.cause(),
            interval_s=round(elapsed_s, 3),
            per_s={name: round(getattr(counted, name) / elapsed_s, 3) for name in names},
            totals={name: getattr(now, name) for name in names},
            waits={stage.removesuffix("_wait"): Wait.of(getattr(counted, stage)) for stage in STAGES},
            mean_batch_size=round(counted.mean_batch_size, 3), max_batch_size=int(now.number("max_batch_size") or 0),
            batch_sizes=counted.batch_sizes,
            reasons={reason: round(n / total, 4) for reason, n in sorted(counted.dispatch_reasons.items(), key=lambda item: -item[1])},
            slots_in_use=now.slots_in_use, capacity=now.capacity,
            clients=now.slots_by_pid(),
            padding=round(counted.padding, 4),
            latency_budget_ms=now.number("latency_budget_ms") or 0.0, goodput=round(counted.goodput, 4) if ended else None,
            device=Device.between(before.execution, now.execution, elapsed_s),
            generation=Generating.between(before.generation, now.generation, elapsed_s),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return dataclasses.asdict(self)
