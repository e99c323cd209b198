"""The pure parts of the IPC benchmark: percentiles, fairness, medians and ratios, tables, targets."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from ipc.cells import FREE, ONE_CORE, TWO_CORES, Cell, plan, size_text
from ipc.report import markdown, number, spread
from ipc.statistics import Results, fairness, percentile
from ipc.targets import evaluate


def record(contestant: str, cell: Cell, round_number: int = 0, foreign_cores: float = 0.0, **metrics: float) -> dict[str, object]:
    return {"contestant": contestant, "cell": cell, "round": round_number, "foreign_cores": foreign_cores, **metrics}


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (1, 1), (50, 50), (50.5, 51), (99, 99), (100, 100)])
def test_percentile_is_the_nearest_rank(percent: float, value: int) -> None:
    assert percentile(range(1, 101), percent) == value


def test_percentile_of_few_and_of_none() -> None:
    assert percentile([7], 99) == 7
    assert percentile([1, 2], 50) == 1
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@pytest.mark.parametrize(("calls", "share"), [([10], 1.0), ([10, 10], 1.0), ([5, 10, 10], 0.5), ([0, 3], 0.0), ([0, 0], 1.0)])
def test_fairness_is_the_slowest_over_the_mean_of_the_others(calls: list[int], share: float) -> None:
    assert fairness(calls) == share


def test_busy_rounds_count_only_where_no_round_was_quiet() -> None:
    mixed, busy = Cell(64), Cell(4096)
    results = Results(
        [
            record("a", mixed, 0, foreign_cores=0.9, p50_us=900.0),
            record("a", mixed, 1, p50_us=10.0),
            record("a", mixed, 2, p50_us=20.0),
            record("a", busy, 0, foreign_cores=0.9, p50_us=30.0),
        ]
    )
    assert results.values("a", mixed, "p50_us") == [10.0, 20.0]
    assert results.median("a", mixed, "p50_us") == 15.0
    assert results.median("a", busy, "p50_us") == 30.0
    assert results.median("b", busy, "p50_us") is None


def test_ratios_are_taken_within_a_round() -> None:
    cell = Cell(64)
    rounds = [(10.0, 5.0), (100.0, 50.0), (8.0, 2.0)]
    results = Results([record(name, cell, i, p50_us=pair[side]) for i, pair in enumerate(rounds) for side, name in enumerate("ab")])
    assert results.ratio("a", "b", cell, "p50_us") == 2.0  # the medians alone would say 10 / 5 of different rounds


def test_ratio_without_a_common_round_uses_the_medians() -> None:
    cell = Cell(64)
    results = Results([record("a", cell, 0, p50_us=9.0), record("b", cell, 1, p50_us=3.0)])
    assert results.ratio("a", "b", cell, "p50_us") == 3.0
    assert results.ratio("a", "nobody", cell, "p50_us") is None


def test_errors_are_told() -> None:
    results = Results([{"contestant": "a", "cell": Cell(64), "round": 0, "error": "zmq is not installed"}])
    assert results.error("a", Cell(64)) == "zmq is not installed"
    assert results.values("a", Cell(64), "p50_us") == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.12345, "0.123"), (0.005, "0.00500"), (4.5678, "4.57"), (78.94, "78.9"), (123.4, "123"), (304_123.0, "304,123"), (0.0, "0.000")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_spread_of_one_round_is_none() -> None:
    assert spread([3.0]) == "-"
    assert spread([3.0, 20.0, 1.5]) == "1.50..20.0"


def test_markdown_table() -> None:
    assert markdown(("who", "µs"), [("pipe", "53.1"), ("**ours**", "2")]).splitlines() == [
        "| who      |   µs |",
        "| -------- | ---: |",
        "| pipe     | 53.1 |",
        "| **ours** |    2 |",
    ]


@pytest.mark.parametrize(("size_bytes", "text"), [(64, "64 B"), (4096, "4 KiB"), (1 << 20, "1 MiB"), (1500, "1500 B")])
def test_sizes_in_words(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


def test_every_contestant_meets_every_placement_at_64_bytes() -> None:
    placements = {cell.placement for cell in plan(quick=False, every_placement=False) if cell.payload_bytes == 64}
    assert placements == {ONE_CORE, TWO_CORES, FREE}
    assert set(plan(quick=False, every_placement=False)) < set(plan(quick=False, every_placement=True))


def verdicts(*records: dict[str, object]) -> dict[str, str]:
    return {target.title: target.verdict for target in evaluate(Results(records), import_ms=49.9)}


def test_targets_without_figures_are_not_available() -> None:
    assert set(verdicts().values()) == {"n/a", "met"}  # "met": the import time given above


def test_targets_at_their_limits() -> None:
    one_core, loaded = Cell(64, 1, ONE_CORE), Cell(4096, 16)
    found = verdicts(
        record("floor", one_core, p50_us=4.0),
        record("gpuworker-park", one_core, p50_us=8.0),
        record("pipe", Cell(64), p50_us=5.0),
        record("gpuworker-adaptive", Cell(64), p50_us=5.0),
        record("gpuworker-busy", Cell(64), p50_us=3.1),
        record("pyzmq", loaded, requests_per_s=30_000.0),
        record("iceoryx2-polled", loaded, requests_per_s=100_000.0),
        record("iceoryx2-events", loaded, requests_per_s=50_000.0),
        record("gpuworker-adaptive", loaded, requests_per_s=150_000.0, fairness=0.49, cpu_s_per_100k=1.2),
        record("gpuworker-adaptive", Cell(4096, 4, idle=True), server_cores=0.005),
    )
    assert {title: verdict for title, verdict in found.items() if verdict != "n/a"} == {
        "64 B, 1 client, one core, park: p50 / C floor (sem_t) there": "met",
        "64 B, 1 client, free, adaptive: p50 µs, below the fastest other": "missed",
        "64 B, 1 client, free, adaptive: p50 µs": "met",
        "64 B, 1 client, free, busy: p50 µs": "missed",
        "4 KiB, 16 clients, free, adaptive: requests/s over pyzmq": "met",
        "4 KiB, 16 clients, free, adaptive: requests/s over iceoryx2-polled and iceoryx2-events": "missed",
        "4 KiB, 16 clients, free, adaptive: slowest client / mean of the others": "missed",
        "4 KiB, 16 clients, free, adaptive: CPU-s per 100k requests": "met",
        "4 KiB, 4 clients silent, free, adaptive: what the owner uses of a core": "missed",
        "import gpuworker and connect, without torch: ms over numpy": "met",
    }
