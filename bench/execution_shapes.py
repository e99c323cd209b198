"""Requests of different lengths, and batches between two allowed sizes.

Lengths: token ids of up to 512, gathered with mask and lengths into a padded batch, by the owner's native code and by a handler of lists in numpy; and the same
under length_buckets, which is the line that encoders use. Sizes: n requests at once, as one batch padded up to the next allowed size, or as the largest allowed
batch that they fill and then the rest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from execution_rows import BATCH, LISTS, NATIVE, parts_table
from execution_turns import Sample, Stage, Watch, alternate, on_stage
from ipc.report import markdown, number

import gpuworker
from gpuworker._native import ffi
from gpuworker.execution.engine import Engine
from gpuworker.execution.grid import Grid
from gpuworker.execution.program import make_program
from gpuworker.scheduling.sizes import doubling
from gpuworker.tensors import Signature

LONGEST, WIDTH = 512, 384
BUCKETS = (32, 64, 128, 256, 512)
BUCKETED = "TensorHandler, length_buckets"
COUNTS = (3, 5, 17, 24, 33, 40, 48, 63)
LAYERS, SIDE = 4, 1024
_CLOCK = time.thread_time_ns


class Pool(gpuworker.TensorHandler):
    """Of ids to a vector; here made before, as what it costs to make one is no matter."""

    device = "cpu"
    inputs = {"ids": gpuworker.TensorSpec("int64", ("tokens",), mask="mask", lengths="lengths")}
    outputs = gpuworker.TensorSpec("float32", (WIDTH,))
    max_extents = {"tokens": LONGEST}

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.vectors = torch.zeros(BATCH, WIDTH)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        began_ns = self.watch.clock()
        rows = batch["ids"].shape[0]
        self.vectors[:rows, 0] = batch["lengths"]
        self.watch.spent["forward"] += self.watch.clock() - began_ns
        return self.vectors[:rows]


class PoolList:
    """The same by hand: padding, mask and lengths in numpy."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.pool = watch, Pool(watch)

    def run_batch(self, requests: list[Any]) -> list[Any]:
        clock, spent = self.watch.clock, self.watch.spent
        began_ns = clock()
        rows = [request["ids"] for request in requests]
        lengths = np.array([len(row) for row in rows])
        ids, mask = (np.zeros((len(rows), lengths.max()), np.int64) for _ in range(2))
        for at, row in enumerate(rows):
            ids[at, : len(row)] = row
            mask[at, : len(row)] = 1
        padded_ns = clock()
        with torch.inference_mode():
            vectors = self.pool.forward({name: torch.from_numpy(array) for name, array in (("ids", ids), ("mask", mask), ("lengths", lengths))})
        split = list(vectors.numpy())
        spent["gather"] += padded_ns - began_ns
        spent["launch"] += clock() - padded_ns
        return split


def are_lengths(requests: Sequence[Any], answers: Sequence[Any]) -> bool:
    return all(got.shape == (WIDTH,) and got[0] == len(sent["ids"]) for sent, got in zip(requests, answers, strict=True))


def measure(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Records of both parts."""
    return {"lengths": _measure_lengths(quick), "sizes": _measure_sizes(quick)}


def _measure_lengths(quick: bool) -> list[dict[str, Any]]:
    random = np.random.default_rng(3)
    lengths = np.clip(random.lognormal(3.5, 0.9, 4 * BATCH), 3, LONGEST).astype(int)
    requests = [{"ids": random.integers(0, 30_000, length)} for length in lengths]
    options = {"max_batch_size": BATCH, "max_response_bytes": 4096}
    stages = [
        Stage(NATIVE, Pool(watch := Watch()), watch, requests[:BATCH], are_lengths, **options),
        Stage(LISTS, PoolList(watch := Watch()), watch, requests[:BATCH], are_lengths, **options),
        Stage(BUCKETED, Pool(watch := Watch()), watch, requests, are_lengths, length_buckets=BUCKETS, **options),
    ]
    found: dict[str, list[Sample]] = {}
    on_stage(stages, lambda: found.update(alternate(stages, 3 if quick else 9, 40 if quick else 200)))
    return [{"contestant": stage.label, "requests": len(stage.requests), "rounds": found[stage.label]} for stage in stages]


def _measure_sizes(quick: bool) -> list[dict[str, Any]]:
    """Rounds of ms, by count: until all have run, and until the mean request has."""
    weights = [torch.randn(SIDE, SIDE) / SIDE**0.5 for _ in range(LAYERS)]

    def forward(batch: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            batch = torch.relu(batch @ weight)
        return batch

    spec = gpuworker.TensorSpec("float32", (SIDE,))
    signature, grid = Signature(spec, spec), Grid(doubling(BATCH))
    engine = Engine(make_program(forward, signature), signature, grid, torch.device("cpu"))
    source, rows = np.random.default_rng(4).standard_normal((BATCH, SIDE), np.float32), ffi.new("gw_row[]", BATCH)
    kept = [engine.place(rows[k], source[k], ()) for k in range(BATCH)]

    def run(start: int, n: int) -> float:
        began_ns = _CLOCK()
        engine.run_rows(rows + start, n, grid.shape(n, ()))
        return (_CLOCK() - began_ns) / 1e6

    records = [
        {"count": count, "largest": max(size for size in doubling(BATCH) if size <= count), "up": [], "down": [], "up_mean": [], "down_mean": []}
        for count in COUNTS
    ]
    tries = 5 if quick else 15
    for number_of_round in range(4 if quick else 10):
        for record in records:
            count, below = record["count"], record["largest"]
            up = median(run(0, count) for _ in range(tries))
            first, rest = (median(run(*part) for _ in range(tries)) for part in ((0, below), (below, count - below)))
            if number_of_round:
                record["up"].append(up)
                record["up_mean"].append(up)
                record["down"].append(first + rest)
                record["down_mean"].append(first + rest * (count - below) / count)
    engine.close()
    del kept
    return records


def table(records: dict[str, list[dict[str, Any]]]) -> str:
    def ms(record: dict[str, Any], what: str) -> str:
        return number(median(record[what]))

    def ratio(record: dict[str, Any], what: str) -> str:
        return number(median(down / up for down, up in zip(record[f"down{what}"], record[f"up{what}"], strict=True)))

    def batches(record: dict[str, Any]) -> str:
        rest = record["count"] - record["largest"]
        return f"{record['largest']} + {rest}"

    rows = [
        (str(r["count"]), ms(r, "up"), batches(r), ms(r, "down"), ratio(r, ""), ms(r, "up_mean"), ms(r, "down_mean"), ratio(r, "_mean"))
        for r in records["sizes"]
    ]
    header = ("requests", "up: all, ms", "down", "down: all, ms", "all: down / up", "up: mean, ms", "down: mean, ms", "mean: down / up")
    title = f"### Padded up to the next of 1, 2, 4 to {BATCH}, or batched down: {LAYERS} layers of {SIDE} x {SIDE} on one core"
    sizes = f"{title}\n\n{markdown(header, rows)}\n\nAll: until the last request has run; mean: until the mean one has. The rest is padded up."
    mean_batch = median(sample["batches"] for sample in records["lengths"][-1]["rounds"])
    note = f"{BUCKETED}: {4 * BATCH} requests at once, in {mean_batch:g} batches of up to {BATCH}; the others have one full batch of {BATCH}."
    lengths = parts_table(f"Outside forward, token ids of 3 to {LONGEST} with mask and lengths", records["lengths"])
    return "\n\n".join([lengths, note, sizes])
