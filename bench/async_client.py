"""What an event loop pays for a call: gpuworker.AsyncClient beside the blocking client, alone and in a thread pool (run_in_executor).

    python bench/async_client.py [--rounds N] [--seconds S] [--wake park,adaptive] [--uvloop]

Everything is measured in turns in one run, so what else runs on the machine meets all of it; medians over the rounds, and of the ratios within each round. The owner
is a process of its own and answers each request with itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import gpuworker

IN_FLIGHT = 64
REQUEST = b"x" * 64
LEAST_TIMES_EXECUTOR, MOST_TIMES_BLOCKING = 5.0, 1.5


def identity(requests: list[object]) -> list[object]:
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7, help="of each measurement")
    parser.add_argument("--wake", type=lambda text: text.split(","), default=["park", "adaptive"])
    parser.add_argument("--uvloop", action="store_true", help="uvloop's loop instead of asyncio's")
    options = parser.parse_args()
    factory = __import__("uvloop").new_event_loop if options.uvloop else asyncio.new_event_loop
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    print(
        f"## AsyncClient, {'uvloop' if options.uvloop else 'asyncio'}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, {options.rounds} rounds\n"
    )
    print(
        f"| wake | {IN_FLIGHT} in flight: AsyncClient | run_in_executor | times | target | 1 in flight, p50: AsyncClient | Client | times | target |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for wake in options.wake:
        print(measure(wake, options.rounds, options.seconds, factory))


def measure(wake: str, rounds: int, seconds: float, factory: Callable[[], asyncio.AbstractEventLoop]) -> str:
    name = f"bench-async-{os.getpid()}"
    loop = factory()
    with (
        gpuworker.Worker("async_client:identity", name=name, max_batch_size=IN_FLIGHT, max_wait_ms=0, capacity=256, wake=wake),
        gpuworker.connect(name) as blocking,
        ThreadPoolExecutor(IN_FLIGHT) as pool,
    ):
        client = gpuworker.AsyncClient(name)

        async def in_executor(request: bytes) -> object:
            return await loop.run_in_executor(pool, blocking.submit, request)

        loop.run_until_complete(_all_at_once(client.submit, 0.2))
        loop.run_until_complete(_all_at_once(in_executor, 0.2))
        found = []
        for _ in range(rounds):
            ours = loop.run_until_complete(_all_at_once(client.submit, seconds))
            executor = loop.run_until_complete(_all_at_once(in_executor, seconds))
            ours_us = loop.run_until_complete(_one_by_one(client.submit, seconds / 2))
            blocking_us = _one_by_one_blocking(blocking.submit, seconds / 2)
            found.append((ours, executor, ours / executor, ours_us, blocking_us, ours_us / blocking_us))
        loop.run_until_complete(client.aclose())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    ours, executor, times, ours_us, blocking_us, times_us = (median(column) for column in zip(*found, strict=True))
    met = "met" if times >= LEAST_TIMES_EXECUTOR else "NOT met"
    met_us = "met" if times_us < MOST_TIMES_BLOCKING else "NOT met"
    return (
        f"| {wake} | {ours:,.0f}/s | {executor:,.0f}/s | {times:.1f} | >= {LEAST_TIMES_EXECUTOR:g}: {met} "
        f"| {ours_us:.1f} us | {blocking_us:.1f} us | {times_us:.2f} | < {MOST_TIMES_BLOCKING:g}: {met_us} |"
    )


async def _all_at_once(submit: Callable[[bytes], Awaitable[object]], seconds: float) -> float:
    """Requests a second of IN_FLIGHT tasks, each of which sends its next request when it has its answer."""
    until = time.perf_counter() + seconds
    count = 0

    async def caller() -> None:
        nonlocal count
        while time.perf_counter() < until:
            await submit(REQUEST)
            count += 1

    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
    return count / (time.perf_counter() - start)


async def _one_by_one(submit: Callable[[bytes], Awaitable[object]], seconds: float) -> float:
    """The median round trip in us."""
    took = []
    until = time.perf_counter_ns() + int(seconds * 1e9)
    while (start := time.perf_counter_ns()) < until:
        await submit(REQUEST)
        took.append(time.perf_counter_ns() - start)
    return median(took) / 1e3


def _one_by_one_blocking(submit: Callable[[bytes], object], seconds: float) -> float:
    took = []
    until = time.perf_counter_ns() + int(seconds * 1e9)
    while (start := time.perf_counter_ns()) < until:
        submit(REQUEST)
        took.append(time.perf_counter_ns() - start)
    return median(took) / 1e3


if __name__ == "__main__":
    main()
