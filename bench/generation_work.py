"""The models that are served, and the requests that they get."""

from __future__ import annotations

import csv
import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from examples.llm_chat.model import PACKAGE, fast_dtype, gguf_file, model_directory
from examples.llm_chat.work import TEXT, Request
from gpuworker.client import vocabulary
from gpuworker.testing.traces import Trace, read_trace

LONGEST_MODEL_TOKENS = 8192


class Subject(NamedTuple):
    """A model. ids: of the text that prompts are cut from. gguf: the file that it was made of, if it was."""

    name: str
    directory: str
    dtype: str
    ids: list[int]
    gguf: str | None = None


def smollm2() -> Subject:
    directory = model_directory()
    return Subject(f"SmolLM2-135M-Instruct ({PACKAGE})", directory, fast_dtype(), vocabulary.load(directory).encode(TEXT), str(gguf_file()))


def has_smollm2() -> bool:
    return importlib.util.find_spec(PACKAGE.replace("-", "_")) is not None


def mix(ids: Sequence[int], count: int = 64, seed: int = 0, least: int = 8, most: int = 128) -> list[Request]:
    """Prompts and answers of `least` to `most` tokens each, evenly."""
    choice = random.Random(seed)
    made = []
    for _ in range(count):
        length, tokens = choice.randint(least, most), choice.randint(least, most)
        made.append(Request(cut(ids, length, choice), tokens))
    return made


def cut(ids: Sequence[int], length: int, choice: random.Random) -> list[int]:
    """So many ids from somewhere on; from the beginning again where the text ends."""
    start = choice.randrange(len(ids))
    return [ids[(start + i) % len(ids)] for i in range(length)]


class Spread(NamedTuple):
    """Answers of the same mean length. variation: standard deviation / mean."""

    label: str
    lengths: list[int]

    @property
    def variation(self) -> float:
        mean = sum(self.lengths) / len(self.lengths)
        return (sum((length - mean) ** 2 for length in self.lengths) / len(self.lengths)) ** 0.5 / mean


def spreads(count: int, mean: int, seed: int = 1) -> list[Spread]:
    """From all the same to a few long ones among many short ones."""
    choice = random.Random(seed)
    draws = {
        "all the same": lambda: mean,
        "within a quarter of the mean": lambda: choice.randint(mean * 3 // 4, mean * 5 // 4),
        "from nothing to twice the mean": lambda: choice.randint(1, 2 * mean - 1),
        "exponential": lambda: max(1, round(choice.expovariate(1 / mean))),
        "one in eight is long": lambda: mean * 9 // 2 if choice.random() < 1 / 8 else mean // 2,
    }
    return [Spread(label, [draw() for _ in range(count)]) for label, draw in draws.items()]


class Replay(NamedTuple):
    """A trace, for a small machine: as many times shorter as `shrink` says, prompts and answers alike."""

    requests: list[Request]
    arrivals_s: list[float]
    """As recorded; the mean rate is set by whoever plays it."""


def replay(file: Path, ids: Sequence[int], count: int, shrink: int, longest: int) -> Replay:
    """The trace's first requests. Raises ValueError for a file that is no trace."""
    trace: Trace = read_trace(file).first(count)
    answers, choice = _answers(file, count), random.Random(2)
    made = []
    for index, length in enumerate(trace.lengths.tolist()):
        tokens = answers[index] if index < len(answers) else choice.randint(8, 400)
        prompt = min(max(1, length // shrink), longest * 3 // 4)
        made.append(Request(cut(ids, prompt, choice), max(1, min(tokens // shrink, longest - prompt))))
    return Replay(made, (trace.arrivals_ns / 1e9).tolist())


def _answers(file: Path, count: int) -> list[int]:
    """Lengths of answers, where the file says them as the Azure traces do; in its order."""
    with file.open(encoding="utf-8-sig", errors="replace") as opened:
        rows = csv.DictReader(opened)
        if "GeneratedTokens" not in (rows.fieldnames or ()):
            return []
        return [int(row["GeneratedTokens"]) for row, _ in zip(rows, range(count), strict=False)]
