"""Decode steps of a language model on a GPU, as they are and as CUDA graphs, at small batches: where a step is launches rather than work.

A llama of SmolLM2-135M's shape (30 layers, random weights, bfloat16), from the step's plan to its tokens on the host, greedily; each row has CONTEXT tokens behind
it. The two take turns, round by round; figures are medians. What is not measured: scheduling, sampling, clients (bench/generation.py has them). Prints a markdown
table, and writes it with a JSON file to bench/results/. Without a CUDA device it says so and ends.

    python bench/gpu_generation.py [--quick] [--output DIR]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ipc import machine, output, report

from gpuworker.generation.graphs import DecodeGraphs
from gpuworker.generation.model import BLOCK_TOKENS, PagedModel
from gpuworker.generation.sequence import Chunk
from gpuworker.generation.sequence import Sequence as Answer

BATCHES = (1, 2, 4, 8)
CONTEXT = 512
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}

Forward = Callable[[list[Chunk]], torch.Tensor]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """-> a record for each batch size; none without a device."""
    options = _options(arguments)
    if not torch.cuda.is_available():
        built = "there is no CUDA device" if torch.backends.cuda.is_built() else f"this torch ({torch.__version__}) is built without CUDA"
        print(f"Nothing measured: {built}.")
        return []
    paged = PagedModel(model(SHAPE), blocks=blocks_for(BATCHES, CONTEXT), dtype=torch.bfloat16, device="cuda")
    graphs = DecodeGraphs(paged, max_rows=max(BATCHES), max_tokens=2 * CONTEXT)
    began_s = time.perf_counter()
    while graphs.capture_next():
        pass
    captured_s = time.perf_counter() - began_s
    found = measure(paged.forward, graphs.forward, BATCHES, CONTEXT, rounds=3 if options.quick else 9, steps=20 if options.quick else 100)
    if graphs.reason is not None or graphs.misses:
        raise RuntimeError(f"the benchmark's own model ran without graphs ({graphs.reason}, {graphs.misses} steps)")
    _report(found, {"graphs": graphs.count, "graphs_mib": graphs.size_bytes / 2**20, "captured_s": captured_s}, options)
    return found


def model(shape: dict[str, int]) -> Any:
    """A llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=2048, tie_word_embeddings=True, **shape))


def blocks_for(batches: Sequence[int], context: int) -> int:
    """Of the cache: block 0, and what the largest batch holds."""
    return 1 + max(batches) * -(-(context + 1) // BLOCK_TOKENS)


def step_of(rows: int, context: int) -> list[Chunk]:
    """A decode step of so many sequences, each in blocks of its own."""
    per_row = -(-(context + 1) // BLOCK_TOKENS)
    chunks = []
    for row in range(rows):
        answer = Answer(row, [7 + (row + k) % 1000 for k in range(context + 1)], max_tokens=1)
        answer.computed, answer.blocks = context, list(range(1 + row * per_row, 1 + (row + 1) * per_row))
        chunks.append(Chunk(answer, context, 1))
    return chunks


def measure(eager: Forward, graphs: Forward, batches: Sequence[int], context: int, *, rounds: int, steps: int) -> list[dict[str, float]]:
    """By batch size: ms of a step of each, tokens/s, and the ratio of the two (above 1: graphs are faster)."""
    found = []
    for rows in batches:
        chunks = step_of(rows, context)
        for forward in (eager, graphs):
            run(forward, chunks, 5)
        pairs = [(run(eager, chunks, steps), run(graphs, chunks, steps)) for _ in range(rounds)]
        eager_s, graph_s = (median(column) for column in zip(*pairs, strict=True))
        found.append(
            {
                "rows": rows,
                "eager_ms": eager_s * 1e3,
                "graph_ms": graph_s * 1e3,
                "eager_tokens_per_s": rows / eager_s,
                "graph_tokens_per_s": rows / graph_s,
                "ratio": median(one / other for one, other in pairs),
            }
        )
    return found


def run(forward: Forward, chunks: list[Chunk], steps: int) -> float:
    """-> seconds a step. Each waits for its tokens, as whoever sends them does."""
    began_s = time.perf_counter()
    for _ in range(steps):
        tokens = forward(chunks).argmax(-1).tolist()
    assert len(tokens) == len(chunks)
    return (time.perf_counter() - began_s) / steps


def table(found: Sequence[dict[str, float]]) -> str:
    """Of the records."""
    columns = ("eager_ms", "graph_ms", "eager_tokens_per_s", "graph_tokens_per_s", "ratio")
    rows = [(str(record["rows"]), *(report.number(record[name]) for name in columns)) for record in found]
    return report.markdown(("sequences", "eager ms", "graph ms", "eager tokens/s", "graph tokens/s", "eager / graph"), rows)


def _report(found: Sequence[dict[str, float]], captured: dict[str, float], options: argparse.Namespace) -> None:
    about = {**machine.description(), "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda}
    title = f"## Decode steps on {about['gpu']}: torch {about['torch']}, CUDA {about['cuda']}, {about['cpu']}, {about['cores']} cores"
    memory = f"{captured['graphs']} graphs of {captured['graphs_mib']:.1f} MiB in all, captured in {captured['captured_s']:.1f} s; {CONTEXT} tokens of context"
    text = "\n\n".join([title, memory, table(found)])
    print(text)
    records = {"machine": about, "quick": options.quick, "captured": captured, "steps": found}
    output.write(options.output, "gpu-generation", text, records, said_on=sys.stderr)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON and the table")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
