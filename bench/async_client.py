"""What an event loop pays for a call: gpuworker.AsyncClient beside the blocking client, alone and in a thread pool (run_in_executor).

    python bench/async_client.py [--rounds N] [--seconds S] [--wake park,adaptive] [--uvloop]

Everything is measured in turns in one run, so what else runs on the machine meets all of it; medians over the rounds, and of the ratios within each round. The owner
is a process of its own and answers each request of 64 bytes with itself.

Throughput: 64 tasks, each of which sends its next request when it has its answer. Beside requests a second the CPU time of both processes per request is
given, which depends less on what else runs here: 64 threads get more of a busy machine than one does, and the rate of run_in_executor gains by that.

Latency: one task, one request at a time; with a core for each process (how a machine with idle cores places them), and with one core for both, where a sleeper
costs no wake-up of an idle core, so the loop's own work weighs most.
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

import psutil

import gpuworker

IN_FLIGHT = 64
REQUEST = b"x" * 64
LEAST_TIMES_EXECUTOR, MOST_TIMES_BLOCKING = 5.0, 1.5

Submit = Callable[[bytes], Awaitable[object]]


def identity(requests: list[object]) -> list[object]:
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each measurement")
    parser.add_argument("--wake", type=lambda text: text.split(","), default=["park", "adaptive"])
    parser.add_argument("--uvloop", action="store_true", help="uvloop's loop instead of asyncio's")
    options = parser.parse_args()
    factory = __import__("uvloop").new_event_loop if options.uvloop else asyncio.new_event_loop
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    loop, cores = "uvloop" if options.uvloop else "asyncio", sorted(os.sched_getaffinity(0))
    print(
        f"## AsyncClient under {loop}, Python {sys.version.split()[0]}, {len(cores)} cores, load {os.getloadavg()[0]:.1f}, {options.rounds} rounds\n"
    )
    rates, latencies = [], []
    for wake in options.wake:
        with Bench(wake, factory, cores) as bench:
            rates.append(bench.rates(options.rounds, options.seconds))
            latencies += bench.latencies(options.rounds, options.seconds / 2)
    print(f"| {IN_FLIGHT} in flight | AsyncClient | CPU | run_in_executor | CPU | times | target |\n|---|---|---|---|---|---|---|")
    print("\n".join(rates))
    print("\n| 1 in flight, p50 | AsyncClient | Client | times | target |\n|---|---|---|---|---|")
    print("\n".join(latencies))


class Bench:
    def __init__(self, wake: str, factory: Callable[[], asyncio.AbstractEventLoop], cores: list[int]) -> None:
        self.wake, self.cores, self.loop = wake, cores, factory()
        name = f"bench-async-{os.getpid()}"
        self.worker = gpuworker.Worker("async_client:identity", name=name, max_batch_size=IN_FLIGHT, max_wait_ms=0, capacity=256, wake=wake)
        self.blocking, self.client = gpuworker.connect(name), gpuworker.AsyncClient(name)

    def __enter__(self) -> Bench:
        self.worker.start()
        assert self.worker.pid is not None
        self.owner = psutil.Process(self.worker.pid)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.run_until_complete(self.client.aclose())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        self.blocking.close()
        self.worker.stop()

    def rates(self, rounds: int, seconds: float) -> str:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:

            async def in_executor(request: bytes) -> object:
                return await self.loop.run_in_executor(pool, self.blocking.submit, request)

            for submit in (self.client.submit, in_executor):
                self.loop.run_until_complete(_all_at_once(submit, 0.2))
            found = []
            for _ in range(rounds):
                ours, executor = self._rate(self.client.submit, seconds), self._rate(in_executor, seconds)
                found.append((*ours, *executor, ours[0] / executor[0]))
        ours, ours_us, executor, executor_us, times = (median(column) for column in zip(*found, strict=True))
        met = "met" if times >= LEAST_TIMES_EXECUTOR else "NOT met"
        return (
            f'| wake="{self.wake}" | {ours:,.0f}/s | {ours_us:.0f} us | {executor:,.0f}/s | {executor_us:.0f} us | {times:.1f} '
            f"| >= {LEAST_TIMES_EXECUTOR:g}: {met} |"
        )

    def _rate(self, submit: Submit, seconds: float) -> tuple[float, float]:
        """-> (requests a second, us of CPU time of both processes for each)."""
        used_s = self._cpu_s()
        start = time.perf_counter()
        count = self.loop.run_until_complete(_all_at_once(submit, seconds))
        return count / (time.perf_counter() - start), (self._cpu_s() - used_s) / count * 1e6

    def _cpu_s(self) -> float:
        of_owner = self.owner.cpu_times()
        return time.process_time() + of_owner.user + of_owner.system

    def latencies(self, rounds: int, seconds: float) -> list[str]:
        each = [("one core", self.cores[:1], self.cores[:1])]
        if len(self.cores) > 1:
            each.insert(0, ("a core each", self.cores[:1], self.cores[1:2]))
        rows = []
        for title, mine, owners in each:
            os.sched_setaffinity(0, mine)
            os.sched_setaffinity(self.owner.pid, owners)
            found = []
            for _ in range(rounds):
                ours_us = self.loop.run_until_complete(_one_by_one(self.client.submit, seconds))
                blocking_us = _one_by_one_blocking(self.blocking.submit, seconds)
                found.append((ours_us, blocking_us, ours_us / blocking_us))
            ours_us, blocking_us, times = (median(column) for column in zip(*found, strict=True))
            met = "met" if times < MOST_TIMES_BLOCKING else "NOT met"
            rows.append(f'| wake="{self.wake}", {title} | {ours_us:.1f} us | {blocking_us:.1f} us | {times:.2f} | < {MOST_TIMES_BLOCKING:g}: {met} |')
        os.sched_setaffinity(0, self.cores)
        os.sched_setaffinity(self.owner.pid, self.cores)
        return rows


async def _all_at_once(submit: Submit, seconds: float) -> int:
    """How many requests IN_FLIGHT tasks get answered, one after the other each."""
    until = time.perf_counter() + seconds
    count = 0

    async def caller() -> None:
        nonlocal count
        while time.perf_counter() < until:
            await submit(REQUEST)
            count += 1

    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
    return count


async def _one_by_one(submit: Submit, seconds: float) -> float:
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
