"""Two batches on their way against one, on the CPU: whether the owner's copies run beside a forward that releases the GIL.

The client sends sixteen full batches, and the clock runs, by the wall, from the owner's first look until the last answer is published."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from execution_turns import Sample, Stage, Watch, medians, on_stage
from ipc.report import markdown, number, spread

import gpuworker

ROWS, FLOATS, BATCHES = 32, 16384, 16  # 64 KiB a row: both copies of a batch take about half a millisecond
SHORT, LONG = 24, 96
"""Columns of the matrix that rows are multiplied with: a forward about as long as the copies, and one that is several times longer."""


class Product(gpuworker.TensorHandler):
    """Rows, given back after a product of them that nobody needs; on one core."""

    device = "cpu"
    inputs = outputs = gpuworker.TensorSpec("float32", (FLOATS,))

    def __init__(self, watch: Watch, columns: int, depth: int) -> None:
        self.watch, self.pipeline_depth = watch, depth
        self.matrix = torch.zeros(FLOATS, columns)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        began_ns = self.watch.clock()
        torch.mm(batch, self.matrix)
        self.watch.spent["forward"] += self.watch.clock() - began_ns
        return batch


class _Depth(Stage):
    def round(self, turns: int) -> Sample:
        return medians(self.turns(turns))


def are_same(requests: Sequence[Any], answers: Sequence[Any]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(requests, answers, strict=True))


def measure(quick: bool) -> list[dict[str, Any]]:
    """A record per forward; its rounds have ns a batch by depth, and those of forward at depth 1."""
    random = np.random.default_rng(2)
    requests = [random.standard_normal(FLOATS, np.float32) for _ in range(ROWS)] * BATCHES
    room = {"max_request_bytes": 4 * FLOATS + 1024, "max_response_bytes": 4 * FLOATS + 1024, "max_batch_size": ROWS}
    records = []
    for columns in (SHORT, LONG):
        stages = []
        for depth in (1, 2):
            watch = Watch(time.perf_counter_ns)
            stages.append(_Depth(f"depth {depth}", Product(watch, columns, depth), watch, requests, are_same, **room))
        record: dict[str, Any] = {"columns": columns, "depth_1": [], "depth_2": [], "forward": [], "forward_2": []}

        def play(stages: list[Stage] = stages, record: dict[str, Any] = record) -> None:
            for number_of_round in range(4 if quick else 10):
                one, two = (stage.round(3 if quick else 10) for stage in stages)
                if number_of_round:
                    record["depth_1"].append(one["total"] / BATCHES)
                    record["depth_2"].append(two["total"] / BATCHES)
                    record["forward"].append(one["forward"] / BATCHES)
                    record["forward_2"].append(two["forward"] / BATCHES)

        on_stage(stages, play)
        records.append(record)
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    def us(record: dict[str, Any], what: str) -> str:
        return number(median(record[what]) / 1e3)

    rows = []
    for r in records:
        gain = [one / two for one, two in zip(r["depth_1"], r["depth_2"], strict=True)]
        best = [one / max(forward, one - forward) for one, forward in zip(r["depth_1"], r["forward"], strict=True)]
        outside = number(median(one - forward for one, forward in zip(r["depth_1"], r["forward"], strict=True)) / 1e3)
        times = (us(r, what) for what in ("depth_1", "depth_2", "forward_2"))
        rows.append((f"{r['columns']} columns", us(r, "forward"), outside, *times, number(median(gain)), spread(gain), number(median(best))))
    header = ("a product with", "forward, µs a batch", "outside", "depth 1", "depth 2", "its forward", "depth 1 / depth 2", "of rounds", "at best")
    title = f"### Batches on their way: {BATCHES} of {ROWS} rows of {4 * FLOATS // 1024} KiB, forward on one core"
    note = "At best: were forward and all else to overlap without a loss, by the figures of depth 1."
    return f"{title}\n\n{markdown(header, rows)}\n\n{note}"
