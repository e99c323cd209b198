"""`gpuworker stats` of workers with a latency budget or lengths."""

import dataclasses

import pytest

from gpuworker.cli import main, screen
from gpuworker.cli.interval import BUDGET_COUNTERS, COUNTERS, Interval
from gpuworker.scheduling import Reason
from tests.conftest import Gate
from tests.test_cli_text import BUSY, stats

SCHEDULED = {
    "options": {"max_batch_size": 32, "latency_budget_ms": 26.0},
    "on_time": 900, "late": 20, "rejected_late": 30, "rejected_forecast": 50, "goodput": 0.9,
    "predicted_batches": 100, "predicted_run_ms": 12.5, "observed_run_ms": 11.25, "overruns": 7,
    "predicted_ns": 1_250_000_000, "observed_ns": 1_125_000_000,
    "tokens": 1000, "padded_tokens": 1210, "padding": 1.21,
}  # fmt: skip
PARTS = ("latency budget", "predicted", "padding", "given up")


def shown_of(found, recent=None):
    """The whole screen, which never is wider than a terminal."""
    shown = screen.lines(found, recent)
    assert max(map(len, shown)) <= 80
    return shown


def test_a_budget_and_lengths_are_shown():
    shown = shown_of(stats(**BUSY | SCHEDULED))
    assert "latency budget of 26 ms: 90.0% on time" in shown
    assert "  on time  900      forecast late  50" in shown
    assert "  late      20      given up       30" in shown
    assert "  ran 11.2 ms, predicted 12.5 ms; 7.0% took longer than predicted" in shown
    assert "  padding: 1.21 tokens were run for each real one" in shown


def test_nothing_is_said_of_what_a_worker_does_not_do():
    plain = "\n".join(shown_of(stats(**BUSY)))
    assert not [part for part in PARTS if part in plain]
    without = "\n".join(shown_of(stats(**BUSY | SCHEDULED | {"options": {"max_batch_size": 32, "length_buckets": [128]}})))
    assert [part for part in PARTS if part in without] == ["predicted", "padding"], "length buckets without a budget"
    without = "\n".join(shown_of(stats(**BUSY | SCHEDULED | {"padding": 0.0, "predicted_batches": 0})))
    assert [part for part in PARTS if part in without] == ["latency budget", "given up"], "a budget without lengths, and no batch yet"


def test_before_the_first_answer_there_is_no_share():
    fresh = stats(options=SCHEDULED["options"])
    assert "latency budget of 26 ms: no answers yet" in shown_of(fresh)
    assert "latency budget of 26 ms in the last 2 s: no answers" in shown_of(fresh, Interval.between(fresh, fresh, 2.0))


def test_an_interval_has_its_own_share_run_times_and_padding():
    before = stats(**BUSY | SCHEDULED)
    now = dataclasses.replace(
        before, submitted=1400, completed=1300, batches=120, on_time=950, late=20, rejected_late=70, rejected_forecast=60, goodput=0.8636,
        predicted_batches=120, predicted_ns=1_650_000_000, observed_ns=1_725_000_000, overruns=17,
        tokens=1100, padded_tokens=1410, padding=1.2818,
    )  # fmt: skip
    recent = Interval.between(before, now, 4.0)
    assert (recent.stats.on_time, recent.stats.late, recent.stats.rejected_late, recent.stats.rejected_forecast) == (50, 0, 40, 10)
    assert recent.stats.goodput == 0.5
    assert (round(recent.stats.predicted_run_ms, 6), round(recent.stats.observed_run_ms, 6), recent.stats.padding) == (20.0, 30.0, 2.0)
    shown = shown_of(now, recent)
    assert "latency budget of 26 ms in the last 4 s: 50.0% on time" in shown
    assert "  on time  950  12/s    forecast late  60  2.5/s" in shown
    assert "  late      20   0/s    given up       70   10/s" in shown
    assert "  ran 30 ms, predicted 20 ms; 50.0% took longer than predicted" in shown
    assert "  padding: 2 tokens were run for each real one" in shown


def test_all_the_reasons_and_large_numbers_stay_within_the_screen():
    many = {name: 10**9 for pair in (*COUNTERS, *BUDGET_COUNTERS) for name in pair}
    why = {reason.name.lower(): 10**8 for reason in Reason}
    busy = stats(**BUSY | SCHEDULED | many | {"dispatch_reasons": why, "batches": 10**9, "predicted_batches": 10**9, "overruns": 10**9})
    shown = shown_of(busy)
    shown_of(busy, Interval.between(stats(options=SCHEDULED["options"]), busy, 1e4))
    joined = " ".join(" ".join(shown).split())
    for reason in Reason:
        assert f"{reason.name.lower()} 12%" in joined


@pytest.mark.parametrize("lengths", [False, True])
def test_the_command_shows_a_live_worker(in_process, capsys, lengths):
    gate = Gate()
    gate.length = len
    options = {"length_buckets": (4, 8)} if lengths else {}
    worker = in_process(gate, latency_budget_ms=20_000, cost_file="off", **options)
    with worker.connect() as client:
        for _ in range(5):  # nothing is predicted before something has run twice
            assert [client.submit(b"x" * n) for n in (1, 4, 5)] == [b"x", b"xxxx", b"xxxxx"]
        assert worker.stats().predicted_batches >= 5
    assert main(["stats", worker.name]) == 0
    out = capsys.readouterr().out
    assert "latency budget of 20 s: 100.0% on time" in out
    assert "took longer than predicted" in out
    assert ("padding: 1.6 tokens" in out) == lengths, "4 + 4 + 8 for 1 + 4 + 5"
