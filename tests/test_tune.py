"""`gpuworker tune`, as a user meets it; and whether what it predicts comes true."""

import json
import logging
import queue
import shlex
import sys
import threading
import time

import numpy as np
import pytest

import gpuworker
from gpuworker.cli import main
from gpuworker.cli.serve import add_options
from gpuworker.testing import poisson
from gpuworker.worker import WorkerOptions

FEW = ("--requests", "400", "--max-batch-size", "4", "--latency-budget-ms", "60")


class Sleeps:
    """40 + 2 b ms: so long that a busy machine adds little to it."""

    fixed_ms, each_ms = 40.0, 2.0

    def warmup(self):
        return [b"example"]

    def run_batch(self, requests):
        time.sleep((self.fixed_ms + self.each_ms * len(requests)) / 1e3)
        return requests


class Quick(Sleeps):
    fixed_ms, each_ms = 2.0, 0.5


class Tokens(Sleeps):
    """20 ms and 20 us for each token, padding included; requests are texts."""

    made = []

    def warmup(self):
        return ["a" * n for n in (50, 100, 100, 200, 200, 500)]

    def length(self, request):
        return len(request)

    def run_batch(self, requests):
        time.sleep((20 + 0.02 * len(requests) * max(map(len, requests))) / 1e3)
        return requests


class AnyTokens(Tokens):
    def example(self, length):
        self.made.append(length)
        return "a" * length

    def run_batch(self, requests):
        return requests


class FailsOnMany(Sleeps):
    def run_batch(self, requests):
        if len(requests) > 2:
            raise MemoryError("no room")
        return requests


class ReturnsOne(Sleeps):
    def run_batch(self, requests):
        return requests[:1]


class FailsToLoad(Sleeps):
    def load(self):
        raise FileNotFoundError("weights.bin is not there")


def no_examples(requests):
    return requests


def tune(tmp_path, handler, *args):
    """-> what --json has."""
    file = tmp_path / "tuned.json"
    assert main(["tune", f"tests.test_tune:{handler}", *map(str, args), "--json", str(file)]) == 0
    return json.loads(file.read_text())


def drive(worker, requests, times_ns, budget_ms):
    """Sends each request at its time, whatever became of the others. -> (share answered in time, mean latency of the answered in ms)."""
    latencies_ms, sent = [], queue.SimpleQueue()
    outcomes = {"answered": 0, "rejected": 0}

    def collect():
        while (item := sent.get()) is not None:
            pending, enqueued_ns = item
            try:
                pending.result()
                latencies_ms.append((time.monotonic_ns() - enqueued_ns) / 1e6)
                outcomes["answered"] += 1
            except gpuworker.BudgetExceeded:
                outcomes["rejected"] += 1

    with worker.connect() as client:
        client.submit(requests[0], latency_budget_ms=60_000)
        collector = threading.Thread(target=collect)
        collector.start()
        start_ns = time.monotonic_ns()
        for request, at_ns in zip(requests, times_ns.tolist(), strict=True):
            time.sleep(max(start_ns + at_ns - time.monotonic_ns(), 0) / 1e9)
            enqueued_ns = time.monotonic_ns()
            try:
                sent.put((client.enqueue(request), enqueued_ns))
            except gpuworker.BudgetExceeded:
                outcomes["rejected"] += 1
        sent.put(None)
        collector.join()
    assert sum(outcomes.values()) == len(requests)
    return sum(latency <= budget_ms for latency in latencies_ms) / len(requests), sum(latencies_ms) / len(latencies_ms)


@pytest.mark.parametrize(
    ("handler", "rate_per_s", "budget_ms", "is_overload"),
    [("Sleeps", 90, 160, False), ("Sleeps", 180, 160, True), ("Tokens", 200, 120, True)],
    ids=["served", "overload", "lengths"],
)
def test_a_worker_with_the_recommended_options_does_what_was_predicted(tmp_path, name, handler, rate_per_s, budget_ms, is_overload):
    tuned = tune(tmp_path, handler, "--rate", rate_per_s, "--latency-budget-ms", budget_ms, "--max-batch-size", 8, "--requests", 4000)
    predicted = tuned["predicted"]
    assert (predicted["goodput"] < 0.95) == is_overload
    times_ns = poisson(rate_per_s, rate_per_s * 7, seed=99)
    requests = np.random.default_rng(99).choice(np.array(globals()[handler]().warmup(), dtype=object), len(times_ns)).tolist()
    with gpuworker.Worker(f"tests.test_tune:{handler}", name=name, cost_file="off", **tuned["options"]) as worker:
        goodput, mean_ms = drive(worker, requests, times_ns, budget_ms)
    print(f"predicted {predicted['goodput']:.3f}, {predicted['mean_latency_ms']:.1f} ms; observed {goodput:.3f}, {mean_ms:.1f} ms; {tuned['options']}")
    assert goodput == pytest.approx(predicted["goodput"], rel=0.15)
    assert mean_ms == pytest.approx(predicted["mean_latency_ms"], rel=0.15)
