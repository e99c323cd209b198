"""SmolLM2-135M in one owner process, streamed to 16 forked frontends at once; then the same requests through transformers, in static batches and by its own
continuous batching.

Exits with 0 only if every request got all its tokens, those of some requests were, in float32, the very ones that transformers generates for each alone, and
a question got its answer.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import platform
import signal
import sys
import time

import gpuworker
from examples.semantic_search.fleet import FleetError
from examples.semantic_search.show import say
from examples.semantic_search.usage import cores
from gpuworker.execution.model_directory import DECODER, Recipe

from .fleet import Served, serve
from .model import NAME, PACKAGE, fast_dtype, model_directory
from .report import report, rows
from .rivals import ALONE, CONTINUOUS, STATIC, Outcome, Rivals
from .view import watching
from .work import Request, requests

SLOTS = 16
CHECKED, CHECKED_TOKENS = 8, 40
QUESTION, ANSWER = "What is the capital of France?", "Paris"


class WrongAnswerError(Exception):
    """The demo ran, and what came is not what must come."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.llm_chat", description=__doc__)
    parser.add_argument("--requests", type=int, default=32, help="how many (default: %(default)s)")
    parser.add_argument("--frontends", type=int, default=16, help="forked processes (default: %(default)s)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the owner and of transformers alike
    logging.basicConfig(level=logging.INFO, format="  %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that every process started is ended
    started = time.monotonic()
    try:
        run(options.requests, options.frontends)
    except KeyboardInterrupt:
        say("\nInterrupted.")
        return 128 + signal.SIGINT
    except (WrongAnswerError, FleetError, gpuworker.GpuWorkerError, OSError, RuntimeError, ValueError) as error:
        say(f"\nFAILED: {error}")
        return 1
    except ModuleNotFoundError as error:
        say(f"\nFAILED: {error}. The demo needs its packages: make demo-llm installs them")
        return 1
    say(f"All right, in {time.monotonic() - started:.0f} s.")
    return 0


def run(count: int, frontends: int) -> None:
    """Raises WrongAnswerError, FleetError, RuntimeError or what gpuworker raises."""
    torch, transformers, model = (importlib.metadata.version(package) for package in ("torch", "transformers", PACKAGE))
    dtype, asked = fast_dtype(), requests(count)
    say(f"{cores()} cores ({platform.machine()}), Python {platform.python_version()}, torch {torch}, transformers {transformers}")
    directory = model_directory()
    tokens = sum(request.max_tokens for request in asked)
    say(f"{NAME} ({PACKAGE} {model}) on the CPU, in {dtype}")
    say(
        f"{count} requests from {frontends} forked frontends at once, {tokens:,} tokens to generate; the owner works on up to {SLOTS} sequences in each step"
    )
    with worker(directory, dtype) as name:
        answer = gpuworker.connect(name).generate([{"role": "user", "content": QUESTION}], max_tokens=48)
        say(f"? {QUESTION}\n  {' '.join(answer.text.split())}")
        if ANSWER not in answer.text:
            raise WrongAnswerError(f"{ANSWER!r} is not in the answer to {QUESTION!r}")
        served = stream(name, asked, frontends)
    show_some(served, asked)
    few = [Request(request.prompt, min(request.max_tokens, CHECKED_TOKENS)) for request in asked[:CHECKED]]
    say(f"In float32, {len(few)} of them at once, to be compared with each alone")
    with worker(directory, "float32") as name:
        exact = stream(name, few, min(frontends, len(few)))
    with Rivals(directory) as rivals:
        say("The same by transformers: each alone (float32), static batches, continuous batching")
        expected = rivals.run(ALONE, few, dtype="float32")
        check(exact, expected)
        static, continuous = (rivals.run(way, asked, dtype=dtype, slots=SLOTS) for way in (STATIC, CONTINUOUS))
    for outcome in (static, continuous):
        if outcome.prompt_tokens != served.prompt_tokens or [*map(len, outcome.tokens)] != [*map(len, served.tokens)]:
            raise WrongAnswerError("transformers had other work to do: the comparison would be none")
    say()
    report(rows(served, static, continuous, SLOTS, frontends), served)


class worker:  # noqa: N801 (used as a function)
    """A worker while the block runs; gives its name."""

    def __init__(self, directory: str, dtype: str) -> None:
        self._worker = gpuworker.Worker(
            Recipe(DECODER, directory, {"dtype": dtype, "device": "cpu"}), name=f"llm-chat-{os.getpid()}-{dtype}", max_batch_size=SLOTS, capacity=512
        )

    def __enter__(self) -> str:
        self._worker.__enter__()
        return self._worker.name

    def __exit__(self, *problem: object) -> None:
        self._worker.__exit__(*problem)


def stream(name: str, asked: list[Request], frontends: int) -> Served:
    """Raises WrongAnswerError where a request got other than its number of tokens."""
    with watching(name) as watch:
        served = serve(name, asked, frontends=frontends, watch=watch)
    for number, (request, tokens) in enumerate(zip(asked, served.tokens, strict=True)):
        if len(tokens) != request.max_tokens:
            raise WrongAnswerError(f"request {number} got {len(tokens)} tokens of {request.max_tokens}")
    say(f"  {served.count:,} tokens in {served.seconds:.1f} s")
    return served


def show_some(served: Served, asked: list[Request]) -> None:
    for number in range(0, len(asked), -(-len(asked) // 3)):
        prompt = asked[number].prompt[-1]["content"]
        say(f'  "... {" ".join(prompt.split())[-70:]}" -> "{" ".join(served.heads[number].split())[:90]} ..."')


def check(found: Served, expected: Outcome) -> None:
    """Raises WrongAnswerError where one token differs."""
    differ = [number for number, (ours, alone) in enumerate(zip(found.tokens, expected.tokens, strict=True)) if ours != alone]
    if differ:
        raise WrongAnswerError(f"requests {differ} got other tokens than transformers generates for each alone")
    say(f"  {found.count} tokens of {len(found.tokens)} requests, streamed in one batch, are those that transformers generates for each alone")
