"""`gpuworker tune`, as a user meets it; and whether what it predicts comes true."""

import argparse
import asyncio
import ctypes
import json
import logging
import os
import shlex
import subprocess
import sys
import time
import typing
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gpuworker
from gpuworker.cli import main
from gpuworker.cli.serve import add_options
from gpuworker.testing import poisson
from gpuworker.worker import WorkerOptions

SECONDS = 7
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
    """40 ms and 40 us for each token, padding included; requests are texts."""

    made: typing.ClassVar = []

    def warmup(self):
        return ["a" * n for n in (50, 100, 100, 200, 200, 500)]

    def length(self, request):
        return len(request)

    def run_batch(self, requests):
        time.sleep((40 + 0.04 * len(requests) * max(map(len, requests))) / 1e3)
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


class FailsToMeasure(Tokens):
    def example(self, length):
        raise LookupError("no such text")


class LengthFails(Tokens):
    def length(self, request):
        return request.tokens


class FailsToLoad(Sleeps):
    def load(self):
        raise FileNotFoundError("weights.bin is not there")


class Exits(Sleeps):
    """At once, or in a method."""

    where = "run_batch"

    def warmup(self):
        return sys.exit(3) if self.where == "warmup" else [b"example"]

    def load(self):
        if self.where == "load":
            sys.exit()

    def length(self, request):
        return sys.exit("bye") if self.where == "length" else len(request)

    def run_batch(self, requests):
        if self.where == "run_batch" and len(requests) > 2:
            sys.exit(0)
        return requests

    def close(self):
        if self.where == "close":
            sys.exit(0)


class ExitsInLoad(Exits):
    where = "load"


class ExitsInWarmup(Exits):
    where = "warmup"


class ExitsInLength(Exits):
    where = "length"


class ExitsInClose(Exits):
    where = "close"


class IsCancelled(Sleeps):
    def run_batch(self, requests):
        raise asyncio.CancelledError


class IsInterrupted(Sleeps):
    def run_batch(self, requests):
        if len(requests) > 2:
            raise KeyboardInterrupt
        return requests


class Huge(Sleeps):
    returned = 1 << 70

    def length(self, request):
        return self.returned


class Negative(Huge):
    returned = -1


class Infinite(Huge):
    returned = float("inf")


class Chatty(Sleeps):
    """Prints in Python and below it."""

    def warmup(self):
        print("noise of warmup")
        return [b"example"]

    def run_batch(self, requests):
        print("noise of run_batch")
        sys.__stdout__.write("noise that is buffered\n")
        ctypes.CDLL(None).puts(b"noise of C")
        os.write(1, b"noise of the file\n")
        return requests

    def close(self):
        print("noise of close")


def no_examples(requests):
    return requests


def tune(tmp_path, handler, *args):
    """-> what --json has."""
    file = tmp_path / "tuned.json"
    assert main(["tune", f"tests.test_tune:{handler}", *map(str, args), "--json", str(file)]) == 0
    return json.loads(file.read_text())


def drive(worker, requests, times_ns, budget_ms):
    """Sends each request at its time, whatever became of the others. -> (share answered in time, mean latency of the answered in ms)."""
    latencies_ms, rejected = [], []

    def collect(pending, enqueued_ns):
        try:
            pending.result()
            latencies_ms.append((time.monotonic_ns() - enqueued_ns) / 1e6)
        except gpuworker.BudgetExceeded as error:
            rejected.append(error)

    with worker.connect() as client, ThreadPoolExecutor(64) as collectors:
        client.submit(requests[0])
        start_ns = time.monotonic_ns()
        for request, at_ns in zip(requests, times_ns.tolist(), strict=True):
            time.sleep(max(start_ns + at_ns - time.monotonic_ns(), 0) / 1e9)
            enqueued_ns = time.monotonic_ns()
            try:
                collectors.submit(collect, client.enqueue(request), enqueued_ns)
            except gpuworker.BudgetExceeded as error:
                rejected.append(error)
    assert len(latencies_ms) + len(rejected) == len(requests)
    return sum(latency <= budget_ms for latency in latencies_ms) / len(requests), sum(latencies_ms) / len(latencies_ms)


@pytest.mark.parametrize(
    ("handler", "rate_per_s", "budget_ms", "is_overload"),
    [("Sleeps", 90, 160, False), ("Sleeps", 180, 160, True), ("Tokens", 100, 240, True)],
    ids=["served", "overload", "lengths"],
)
def test_a_worker_with_the_recommended_options_does_what_was_predicted(tmp_path, name, handler, rate_per_s, budget_ms, is_overload):
    tuned = tune(tmp_path, handler, "--rate", rate_per_s, "--latency-budget-ms", budget_ms, "--max-batch-size", 8, "--requests", 3000)
    predicted = tuned["predicted"]
    assert (predicted["goodput"] < 0.95) == is_overload
    times_ns = poisson(rate_per_s, rate_per_s * SECONDS, seed=99)
    requests = np.random.default_rng(99).choice(np.array(globals()[handler]().warmup(), dtype=object), len(times_ns)).tolist()
    expected = pytest.approx((predicted["goodput"], predicted["mean_latency_ms"]), rel=0.15)
    for _ in range(3):  # whoever else uses the machine may spoil one run of it
        with gpuworker.Worker(f"tests.test_tune:{handler}", name=name, cost_file="off", **tuned["options"]) as worker:
            observed = drive(worker, requests, times_ns, budget_ms)
        print(f"predicted {predicted['goodput']:.3f}, {predicted['mean_latency_ms']:.1f} ms; observed {observed}; {tuned['options']}")
        if observed == expected:
            break
    assert observed == expected


def test_the_report(tmp_path, capsys):
    tuned = tune(tmp_path, "Quick", "--rate", 100, *FEW)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "tests.test_tune:Quick: Poisson arrivals, 100/s, latency budget 60 ms"
    assert lines[3].split() == ["LENGTH", "1", "2", "3", "4"]
    assert "1.00  100/s" in out
    command = next(line for line in lines if line.startswith("  gpuworker serve")).strip()
    assert command == tuned["command"]
    assert f"predicted: {100 * tuned['predicted']['goodput']:.1f} % in time" in out
    assert f"capacity: 99 % in time up to {tuned['capacity_per_s']:,.0f}/s" in out


def test_the_command_line_says_what_the_options_say(tmp_path):
    tuned = tune(tmp_path, "Tokens", "--rate", 100, "--latency-budget-ms", 200.5, "--pads", *FEW[:4])
    words = shlex.split(tuned["command"])
    assert words[:5] == ["gpuworker", "serve", "tests.test_tune:Tokens", "--name", "NAME"]
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert WorkerOptions.of(vars(parser.parse_args(words[5:]))) == WorkerOptions.of(tuned["options"])
    assert tuned["options"]["allowed_batch_sizes"][-1] == 4


def test_all_figures_in_json_and_what_simulate_makes_of_the_profile(tmp_path, capsys):
    profile = tmp_path / "profile.json"
    tuned = tune(tmp_path, "Quick", "--rate", 100, *FEW, "--profile-out", profile)
    assert list(tuned["profile_ms"]) == ["1x0", "2x0", "3x0", "4x0"]
    assert tuned["profile_ms"] == json.loads(profile.read_text())
    assert tuned["predicted"]["requests"] == 200
    assert [point["load"] for point in tuned["curve"]] == [0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5]
    assert next(point for point in tuned["curve"] if point["load"] == 1)["goodput"] == tuned["predicted"]["goodput"]
    assert tuned["arguments"]["rate"] == 100
    assert main(["simulate", "--profile", str(profile), "--max-batch-size", "4", "--rate", "100", "--requests", "200"]) == 0


def test_json_to_stdout_is_all_there_is(capsys):
    assert main(["tune", "tests.test_tune:Quick", "--rate", "100", *FEW, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["latency_budget_ms"] == 60


def test_png(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    command = ["tune", "tests.test_tune:Quick", "--rate", "100", *FEW, "--png", str(tmp_path / "tuned.png")]
    assert main(command) == 0
    assert (tmp_path / "tuned.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(command) == 1
    assert "pip install 'gpuworker[plot]'" in capsys.readouterr().err


def trace_file(tmp_path, lengths, rate_per_s=100):
    file = tmp_path / "trace.csv"
    times_s = poisson(rate_per_s, len(lengths)) / 1e9
    rows = [f"{at},{length}" if length else f"{at}" for at, length in zip(times_s, lengths, strict=True)]
    file.write_text("\n".join(["time_s,length" if lengths[0] else "time_s", *rows]))
    return file


def test_lengths_of_a_trace_are_measured_with_example(tmp_path, monkeypatch):
    monkeypatch.setattr(AnyTokens, "made", [])
    file = trace_file(tmp_path, [10, 40, 160, 640] * 50)
    tuned = tune(tmp_path, "AnyTokens", "--trace", file, *FEW)
    assert AnyTokens.made == [10, 40, 160, 640]
    assert {shape.split("x")[1] for shape in tuned["profile_ms"]} == {"10", "40", "160", "640"}
    assert tuned["longest"] == 640
    assert tuned["rate_per_s"] == pytest.approx(100, rel=0.2)


def test_a_trace_is_sped_up_to_the_rate(tmp_path):
    tuned = tune(tmp_path, "Quick", "--trace", trace_file(tmp_path, [0] * 200), "--rate", 250, *FEW)
    assert tuned["rate_per_s"] == pytest.approx(250)
    assert tuned["predicted"]["requests"] == 100


def test_lengths_that_no_example_has_are_said_to_be_guessed(tmp_path, capsys):
    tune(tmp_path, "Tokens", "--trace", trace_file(tmp_path, [50, 100, 2000, 30] * 30), *FEW[:4], "--latency-budget-ms", 200)
    assert "Longer ones than 500 (there are, up to 2000) are guessed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("handler", "args", "message"),
    [
        ("NoSuch", ("--rate", "5"), "has no attribute 'NoSuch'"),
        ("Quick", (), "give --rate or --trace"),
        ("Quick", ("--trace", "/nonexistent.csv"), "No such file"),
        ("Quick", ("--rate", "5", "--requests", "10"), "give at least 100"),
        ("no_examples", ("--rate", "5"), "add a method warmup() that returns a list of examples"),
        ("Sleeps", ("--rate", "5", "--latency-budget-ms", "30"), "no option can meet a latency budget of 30 ms: one request alone takes 42"),
        ("Sleeps", ("--rate", "5", "--limit-s", "0.01"), "--limit-s 0.01: there was not even time"),
        ("FailsOnMany", ("--rate", "5"), "run_batch failed with 4 requests: MemoryError: no room. If batches were too large"),
        ("Exits", ("--rate", "5"), "run_batch failed with 4 requests: it called sys.exit(0)"),
        ("ExitsInLoad", ("--rate", "5"), "could not be loaded: it called sys.exit(None)"),
        ("ExitsInWarmup", ("--rate", "5"), "could not be loaded: it called sys.exit(3)"),
        ("ExitsInLength", ("--rate", "5"), "length() of tests.test_tune:ExitsInLength failed: it called sys.exit('bye')"),
        ("ExitsInClose", ("--rate", "5"), "close() of tests.test_tune:ExitsInClose failed: it called sys.exit(0)"),
        ("IsCancelled", ("--rate", "5"), "could not be loaded: CancelledError"),
        ("Huge", ("--rate", "5"), "length(request) returned 1180591620717411303424: it must be an integer from 0 to 16,777,215"),
        ("Negative", ("--rate", "5"), "length(request) returned -1: it must be"),
        ("Infinite", ("--rate", "5"), "length(request) returned inf: it must be"),
        ("Quick", ("--rate", "0.000001"), "a second can be simulated"),
        ("FailsToLoad", ("--rate", "5"), "could not be loaded: FileNotFoundError: weights.bin is not there"),
        ("ReturnsOne", ("--rate", "5"), "run_batch failed with 4 requests: BatchSizeMismatch"),
        ("Quick", ("--rate", "5", "--max-batch-size", "5000"), "max_batch_size=5000: give an integer from 1 to 4,096"),
        ("LengthFails", ("--rate", "5"), "length() of tests.test_tune:LengthFails failed: AttributeError"),
        ("FailsToMeasure", ("--rate", "5"), "length() or example() of tests.test_tune:FailsToMeasure failed: LookupError: no such text"),
        ("Quick", ("--rate", "5", "--json", "/nonexistent/out.json"), "--json: "),
        ("Quick", ("--rate", "5", "--profile-out", "/nonexistent/out.json"), "--profile-out: "),
    ],
)
def test_a_mistake_is_one_clear_line(handler, args, message, capsys, caplog):
    caplog.set_level(logging.CRITICAL)
    assert main(["tune", f"tests.test_tune:{handler}", *FEW, *args]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("gpuworker: ")
    assert message in last


def test_what_the_handler_prints_goes_to_stderr():
    command = [sys.executable, "-m", "gpuworker.cli", "tune", "tests.test_tune:Chatty", "--rate", "5", *FEW, "--json", "-"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=buffered)
    assert json.loads(done.stdout)["options"]["latency_budget_ms"] == 60
    for where in ("of warmup", "of run_batch", "that is buffered", "of C", "of the file", "of close"):
        assert f"noise {where}" in done.stderr


def test_an_interrupt_ends_it_without_words(capsys):
    assert main(["tune", "tests.test_tune:IsInterrupted", "--rate", "5", *FEW]) == 130
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == ["measuring tests.test_tune:IsInterrupted for at most 60 s ..."]


def test_a_trace_of_one_time_is_refused(tmp_path, capsys):
    file = tmp_path / "trace.csv"
    file.write_text("time_ns\n" + "1\n" * 150 + "2\n")
    assert main(["tune", "tests.test_tune:Quick", *FEW[2:], "--requests", "120", "--trace", str(file), "--rate", "5"]) == 1
    assert "--requests 120: all of its first 120 requests have the same time" in capsys.readouterr().err


def test_a_trace_with_lengths_needs_a_handler_that_tells_them(tmp_path, capsys):
    assert main(["tune", "tests.test_tune:Quick", *FEW, "--trace", str(trace_file(tmp_path, [10, 20] * 60))]) == 1
    assert "has no length(request) -> int: add one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "the following arguments are required: MODULE:ATTR, --latency-budget-ms"),
        (("tests.test_tune:Quick", "--latency-budget-ms", "50", "--rate", "0"), "0: give a number above 0"),
        (("tests.test_tune:Quick", "--latency-budget-ms", "50", "--rate", "5", "--seed", "-1"), "--seed: -1: give an integer from 0"),
        (("tests.test_tune:Quick", "--latency-budget", "50"), "did you mean --latency-budget-ms?"),
    ],
)
def test_wrong_usage_is_explained(args, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["tune", *args])
    assert message in capsys.readouterr().err


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["tune", "--help"])
    assert "gpuworker tune myapp.model:Embedder --latency-budget-ms 50 --rate 200" in capsys.readouterr().out
