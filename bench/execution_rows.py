"""What the owner spends on a batch of 64 arrays outside `forward`: natively gathered and scattered, and by a handler of lists that stacks and splits them.

At 4 KiB a request counts; at 256 KiB the bytes do, and two bare memcpys of the same memory are measured beside it: slots to batch, batch to slots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from execution_turns import PARTS, Sample, Stage, Watch, alternate, on_stage
from ipc.report import markdown, number, spread
from ipc.targets import Target

import gpuworker
from gpuworker._native import ffi
from gpuworker.execution.grid import Shape
from gpuworker.payload.arrays import LINE

BATCH = 64
SMALL, LARGE = 1024, 65536  # float32: 4 KiB and 256 KiB
SMALL_LIMIT_US, LARGE_LIMIT = 3.0, 1.3
NATIVE, LISTS, FLOOR = "TensorHandler", "run_batch of a list", "two bare memcpys"
_CLOCK = time.thread_time_ns


class Echo(gpuworker.TensorHandler):
    """Rows of `floats`, given back: as they are where even that would cost something, else negated, which is memory of its own as a model's outputs are."""

    device = "cpu"

    def __init__(self, watch: Watch, floats: int) -> None:
        self.watch = watch
        self.inputs = self.outputs = gpuworker.TensorSpec("float32", (floats,))
        self._floats = floats

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        began_ns = _CLOCK()
        result = answer(batch)
        self.watch.spent["forward"] += _CLOCK() - began_ns
        return result


class EchoList:
    """The same without declared shapes, as one would write it by hand."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def run_batch(self, rows: list[Any]) -> list[Any]:
        began_ns = _CLOCK()
        stacked = np.stack(rows)
        stacked_ns = _CLOCK()
        with torch.inference_mode():
            batch = torch.from_numpy(stacked)
            before_ns = _CLOCK()
            result = answer(batch)
            after_ns = _CLOCK()
        split = list(result.numpy())
        spent = self.watch.spent
        spent["gather"] += stacked_ns - began_ns
        spent["forward"] += after_ns - before_ns
        spent["launch"] += _CLOCK() - stacked_ns
        return split


def answer(batch: torch.Tensor) -> torch.Tensor:
    return batch if batch.shape[1] == LARGE else -batch


def is_echo(requests: Sequence[Any], answers: Sequence[Any]) -> bool:
    return all(np.array_equal(got, sent if len(sent) == LARGE else -sent) for sent, got in zip(requests, answers, strict=True))


def stages(floats: int) -> list[Stage]:
    random = np.random.default_rng(1)
    requests = [random.standard_normal(floats, np.float32) for _ in range(BATCH)]
    room = 4 * floats + 1024
    options: dict[str, Any] = {"max_batch_size": BATCH, "max_request_bytes": room, "max_response_bytes": room}
    watches = Watch(), Watch()
    return [
        Stage(NATIVE, Echo(watches[0], floats), watches[0], requests, is_echo, **options),
        Stage(LISTS, EchoList(watches[1]), watches[1], requests, is_echo, **options),
    ]


class Memcpys:
    """The floor, on a stage's own memory: the slots that its next batches would have, and the arrays that its executor gathers into."""

    label = FLOOR

    def __init__(self, stage: Stage) -> None:
        segment, self._requests = stage.session.segment, [ffi.from_buffer(request) for request in stage.requests]
        self._bytes = len(self._requests[0])
        self._areas = [
            (ffi.from_buffer(ask, require_writable=True) + LINE, ffi.from_buffer(answer, require_writable=True) + LINE)
            for ask, answer in zip(segment.requests, segment.responses, strict=True)
        ]
        (batch,) = stage.runner.engine.executor.inputs(0, Shape(BATCH)).values()
        rows = ffi.from_buffer(batch, require_writable=True)
        self._rows = [rows + k * self._bytes for k in range(BATCH)]
        self._next = 0

    def round(self, turns: int) -> Sample:
        """Fills the slots as a client does, copies there and back, which is what is timed, and reads the answers as a client does."""
        move, size, took_ns = ffi.memmove, self._bytes, []
        for _ in range(2 * turns):
            slots = [self._areas[(self._next + k) % len(self._areas)] for k in range(BATCH)]
            self._next += BATCH - 1  # a client claims the slot first that it has used last
            for (ask, _), request in zip(slots, self._requests, strict=True):
                move(ask, request, size)
            began_ns = _CLOCK()
            for (ask, _), row in zip(slots, self._rows, strict=True):
                move(row, ask, size)
            for (_, reply), row in zip(slots, self._rows, strict=True):
                move(reply, row, size)
            took_ns.append(_CLOCK() - began_ns)
            landed = [bytearray(size) for _ in slots]
            for (_, reply), place in zip(slots, landed, strict=True):
                move(place, reply, size)
            if landed[-1] != bytes(ffi.buffer(self._requests[-1])):
                raise RuntimeError("the floor has copied something else")
        return {"own": round(median(took_ns))}


def measure(quick: bool) -> list[dict[str, Any]]:
    """A record per size and contestant: rounds of medians."""
    records = []
    for floats, turns in ((SMALL, 60 if quick else 300), (LARGE, 8 if quick else 20)):
        played, found = stages(floats), {}

        def play(floats: int = floats, turns: int = turns, played: list[Stage] = played, found: dict[str, list[Sample]] = found) -> None:
            floor = [Memcpys(played[0])] if floats == LARGE else []
            found.update(alternate([*played, *floor], 3 if quick else 9, turns))

        on_stage(played, play)
        records += [{"bytes": 4 * floats, "requests": BATCH, "contestant": label, "rounds": rounds} for label, rounds in found.items()]
    return records


def overhead_us(record: dict[str, Any]) -> list[float]:
    """Per request and round."""
    return [sample["own"] / record["requests"] / 1e3 for sample in record["rounds"]]


def over_floor(records: Sequence[dict[str, Any]], contestant: str) -> list[float]:
    """At 256 KiB, within each round."""
    ours, floor = (overhead_us(_record(records, LARGE, who)) for who in (contestant, FLOOR))
    return [mine / bare for mine, bare in zip(ours, floor, strict=True)]


def _record(records: Sequence[dict[str, Any]], floats: int, contestant: str) -> dict[str, Any]:
    return next(record for record in records if (record["bytes"], record["contestant"]) == (4 * floats, contestant))


def parts_table(title: str, records: Sequence[dict[str, Any]], more: Sequence[Sequence[str]] = ()) -> str:
    """The owner's µs a request, part by part; a column per record."""

    def us(record: dict[str, Any], part: str) -> str:
        return number(median(sample[part] for sample in record["rounds"]) / record["requests"] / 1e3)

    rows = [(part, *(us(record, part) for record in records)) for part in PARTS]
    rows.append(("**all, by itself**", *(number(median(overhead_us(record))) for record in records)))
    rows.append(("of rounds", *(spread(overhead_us(record)) for record in records)))
    return f"### {title}\n\n" + markdown(("the owner's µs a request", *(record["contestant"] for record in records)), [*rows, *more])


def table(records: Sequence[dict[str, Any]]) -> str:
    small, large = ([_record(records, floats, contestant) for contestant in (NATIVE, LISTS)] for floats in (SMALL, LARGE))
    floor = number(median(overhead_us(_record(records, LARGE, FLOOR))))
    more = [
        (f"{FLOOR}", floor, floor),
        (f"all / {FLOOR}", *(number(median(over_floor(records, contestant))) for contestant in (NATIVE, LISTS))),
    ]
    title = f"Outside forward, batches of {BATCH}, rows of"
    return parts_table(f"{title} 4 KiB", small) + "\n\n" + parts_table(f"{title} 256 KiB", large, more)


def targets(records: Sequence[dict[str, Any]]) -> list[Target]:
    small = median(overhead_us(_record(records, SMALL, NATIVE)))
    return [
        Target("batches of 64, rows of 4 KiB: the owner's time outside forward, µs a request", "<=", SMALL_LIMIT_US, small),
        Target(
            "batches of 64, rows of 256 KiB: the owner's time outside forward / two memcpys", "<=", LARGE_LIMIT, median(over_floor(records, NATIVE))
        ),
    ]
