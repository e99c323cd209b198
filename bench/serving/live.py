"""A real worker under recorded arrivals, beside the simulator on the same ones."""

from __future__ import annotations

import multiprocessing
import os
import queue
import resource
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from ipc import machine
from ipc.report import markdown
from ipc.targets import Target

import gpuworker
from gpuworker.scheduling import Queued
from gpuworker.segment.stats import Stats
from gpuworker.testing import Simulation
from serving.fake_gpu import FakeGpu, length_of, packed
from serving.workload import BATCH, Cost, Workload

FRONTENDS = 4
POINTS = 3.0
_LEAD_NS = 300_000_000
_ANSWERED, _FORECAST, _GIVEN_UP = range(3)


class Sent(NamedTuple):
    """What became of one request, as its frontend saw it: `ended_ns` is when its batch had run."""

    at_ns: int
    outcome: int
    ended_ns: int


def drive(workload: Workload, policy: str, scale: float, count: int, seed: int) -> dict[str, Any]:
    """The record of one workload, on the real worker and in the simulator."""
    cost = Cost(token_ms=0.0005 if workload.lengths else 0.0).times(scale)
    requests = [request._replace(participant=1 + request.ticket % FRONTENDS) for request in workload.requests(cost, count, seed)]
    setting = workload.setting(cost)
    simulated = setting.simulate(policy, requests)
    options: dict[str, Any] = {"latency_budget_ms": setting.budget_ns / 1e6} if policy == "ours" else {"max_wait_ms": 0.0}
    if workload.lengths and policy == "ours":
        options["length_buckets"] = workload.lengths
    handler = FakeGpu(cost, workload.lengths)
    with gpuworker.Worker(handler, max_batch_size=BATCH, capacity=2048, client_quota=2048, cost_file="off", **options) as worker:
        measured = _measure(worker, requests, setting.budget_ns)
    title = workload.title if policy == "ours" else f"{workload.title}: {policy}"
    return {"workload": title, "requests": len(requests), "worker": measured, "simulator": _of(simulated)}


def _measure(worker: gpuworker.Worker, requests: Sequence[Queued], budget_ns: int) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(FRONTENDS)]
    frontends = [
        context.Process(target=_frontend, args=(worker.name, requests[i::FRONTENDS], theirs), daemon=True) for i, (_, theirs) in enumerate(pipes)
    ]
    for frontend in frontends:
        frontend.start()
    ours = [mine for mine, _ in pipes]
    for pipe in ours:
        pipe.recv()  # it is connected
    owner = worker.pid or 0
    before, began = worker.stats(), _Usage.now(owner)
    begin_ns = time.monotonic_ns() + _LEAD_NS
    for pipe in ours:
        pipe.send(begin_ns)
    sent = [Sent(*one) for pipe in ours for one in pipe.recv()]
    after = worker.stats()
    for frontend in frontends:
        frontend.join()
    foreign_cores = began.foreign_cores(_Usage.now(owner))
    return {**_counted(sent, budget_ns), **_difference(before, after), "foreign_cores": foreign_cores}


def _frontend(name: str, requests: Sequence[Queued], pipe: Connection) -> None:
    """Sends each request at its time, whatever has become of those before; a thread collects the answers."""
    machine.die_with_parent()
    client = gpuworker.connect(name, length=length_of)
    client.submit(packed(1))
    pipe.send(None)
    begin_ns = pipe.recv()
    pending: queue.SimpleQueue[tuple[int, gpuworker.Pending] | None] = queue.SimpleQueue()
    sent: list[Sent] = []

    def collect() -> None:
        while (one := pending.get()) is not None:
            at_ns, request = one
            _note(sent, at_ns, request.result)

    collector = threading.Thread(target=collect)
    collector.start()
    for request in requests:
        at_ns = begin_ns + request.enqueue_ns
        if (left_ns := at_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / 1e9)
        try:
            pending.put((at_ns, client.enqueue(packed(request.length))))
        except gpuworker.BudgetExceeded:
            sent.append(Sent(at_ns, _FORECAST, 0))
    pending.put(None)
    collector.join()
    pipe.send([tuple(one) for one in sent])
    client.close()


def _note(sent: list[Sent], at_ns: int, result: Callable[[], bytes]) -> None:
    try:
        sent.append(Sent(at_ns, _ANSWERED, length_of(result())))
    except gpuworker.BudgetExceeded:
        sent.append(Sent(at_ns, _GIVEN_UP, 0))


def _counted(sent: Sequence[Sent], budget_ns: int) -> dict[str, Any]:
    """As the callers saw it. A batch's time ends when it has run: how soon a caller then runs again is up to a machine with more processes than cores."""
    latency_ns = np.array([one.ended_ns - one.at_ns for one in sent if one.outcome == _ANSWERED])
    outcomes = np.bincount([one.outcome for one in sent], minlength=3)
    return {
        "requests": len(sent),
        "goodput": 100 * float(np.count_nonzero(latency_ns <= budget_ns)) / len(sent),
        "late": 100 * float(np.count_nonzero(latency_ns > budget_ns)) / len(sent),
        "rejected_at_enqueue": 100 * outcomes[_FORECAST] / len(sent),
        "given_up": 100 * outcomes[_GIVEN_UP] / len(sent),
        "mean_ms": float(latency_ns.mean()) / 1e6,
        "p99_ms": float(np.percentile(latency_ns, 99)) / 1e6,
    }


def _difference(before: Stats, after: Stats) -> dict[str, Any]:
    """From the worker's own statistics."""
    batches = after.batches - before.batches

    def mean_ms(which: str) -> float:
        total = getattr(after, which) * after.predicted_batches - getattr(before, which) * before.predicted_batches
        return float(total / max(after.predicted_batches - before.predicted_batches, 1))

    counted = after.on_time + after.late + after.rejected_late + after.rejected_forecast
    counted -= before.on_time + before.late + before.rejected_late + before.rejected_forecast
    tokens = after.tokens - before.tokens
    return {
        "mean_batch_size": (after.completed - before.completed) / max(batches, 1),
        "batches": batches,
        "predicted_ms": mean_ms("predicted_run_ms"),
        "observed_ms": mean_ms("observed_run_ms"),
        "overruns": 100 * (after.overruns - before.overruns) / max(batches, 1),
        "padding": (after.padded_tokens - before.padded_tokens) / tokens if tokens else None,
        "reasons": {why: share for why, n in after.dispatch_reasons.items() if (share := 100 * (n - before.dispatch_reasons[why]) / max(batches, 1))},
        "counted": counted,
        "goodput_by_stats": 100 * (after.on_time - before.on_time) / counted if counted else None,
        "wake_p99_ms": after.wake.p99_us / 1e3,
    }


def _of(simulation: Simulation) -> dict[str, Any]:
    count, figures = len(simulation.requests), simulation.to_dict()
    run_ms = sum(batch.end_ns - batch.start_ns for batch in simulation.batches) / len(simulation.batches) / 1e6
    return {
        "requests": count,
        "goodput": 100 * simulation.goodput,
        "late": 100 * simulation.late / count,
        "rejected_at_enqueue": 100 * figures["rejected_at_enqueue"] / count,
        "given_up": 100 * figures["rejected_at_dispatch"] / count,
        "mean_ms": figures["mean_latency_ms"],
        "p99_ms": figures["p99_latency_ms"],
        "mean_batch_size": simulation.mean_batch_size,
        "batches": len(simulation.batches),
        "predicted_ms": run_ms,
        "observed_ms": run_ms,
        "overruns": 0.0,
        "padding": figures["padding"],
        "reasons": {why: 100 * n / len(simulation.batches) for why, n in figures["reasons"].items()},
    }


class _Usage(NamedTuple):
    wall_s: float
    idle_s: float
    ours_s: float

    @classmethod
    def now(cls, owner: int) -> _Usage:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(time.monotonic(), machine.idle_s(), machine.cpu_s(owner) + time.process_time() + children.ru_utime + children.ru_stime)

    def foreign_cores(self, later: _Usage) -> float:
        wall_s = later.wall_s - self.wall_s
        return max((os.cpu_count() or 1) - (later.idle_s - self.idle_s + later.ours_s - self.ours_s) / wall_s, 0.0)


def table(records: Sequence[dict[str, Any]]) -> str:
    header = (
        "arrivals", "", "on time %", "late %", "at enqueue %", "given up %", "mean ms", "p99 ms", "batch", "run ms: predicted", "observed", "padding",
        "left because %",
    )  # fmt: skip
    rows = [
        (record["workload"] if side == "worker" else "", side, *_cells(record[side]))
        for record in records
        for side in ("worker", "simulator")
    ]  # fmt: skip
    return "### A real worker beside the simulator, on the same arrivals\n\n" + markdown(header, rows)


def _cells(figures: dict[str, Any]) -> tuple[str, ...]:
    shares = [f"{figures[name]:.2f}" for name in ("goodput", "late", "rejected_at_enqueue", "given_up")]
    times = [f"{figures[name]:.1f}" for name in ("mean_ms", "p99_ms", "mean_batch_size")]
    runs = [f"{figures[name]:.2f}" if figures["predicted_ms"] else "-" for name in ("predicted_ms", "observed_ms")]
    why = sorted(figures["reasons"].items(), key=lambda item: -item[1])
    return (
        *shares,
        *times,
        *runs,
        f"{figures['padding']:.3f}" if figures["padding"] else "-",
        ", ".join(f"{name} {share:.0f}" for name, share in why),
    )


def targets(records: Sequence[dict[str, Any]]) -> list[Target]:
    return [
        Target(
            f"{record['workload']}: goodput of worker and simulator, points apart",
            "<=", POINTS, abs(record["worker"]["goodput"] - record["simulator"]["goodput"]), record["worker"]["foreign_cores"],
        )
        for record in records
    ]  # fmt: skip
