"""The scheduling benchmark: small runs of each of its parts."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import padding
from serving import decisions, live, plot, ratios, workload


def test_ratios_and_their_targets():
    found = ratios.measure(workload.to_compare([]), 2_000, seed=1)
    assert [record["limit"] for record in found] == [0.99, 0.97, 0.985]
    assert all(0 < ratio <= 1 for record in found for ratio in record["ratios"].values())
    trap = [target for target in ratios.targets(found) if ratios.TRAP in target.title]
    assert [target.verdict for target in trap] == ["met"] * 3, "edf-head fails where ours does not"
    assert "| MMPP, 4x bursts, L = 2 T(B), load 0.8 |" in ratios.table(found)


def test_a_trace_brings_the_target_that_goes_with_its_name(tmp_path):
    file = tmp_path / "Some_code.csv"
    file.write_text("TIMESTAMP,ContextTokens\n" + "".join(f"{i * i},{i + 1}\n" for i in range(50)))
    other = tmp_path / "decode.csv"
    other.write_text(file.read_text())
    *_, known, unknown = workload.to_compare([file, other])
    assert (known.limit, unknown.limit) == (0.97, None)
    requests = known.requests(workload.Cost(), 20, seed=0)
    assert len(requests) == 20
    assert requests[-1].enqueue_ns == pytest.approx(20 / (0.9 * 32 / 13) * 1e6)


def test_decisions_are_about_a_thousand_requests():
    found = decisions.measure(40, seed=1)
    assert [(record["load"], record["clients"], record["buckets"]) for record in found] == [
        (load, clients, buckets) for load in ("under load", "overload") for clients in (1, 16) for buckets in (8, 0)
    ]
    assert all(record["median_us"] > 0 for record in found)
    assert [record["rejected_each"] > 0 for record in found] == [False] * 4 + [True] * 4
    assert len(decisions.targets(found)) == 4


@pytest.mark.parametrize(("at", "policy"), [(0, "ours"), (-1, "ours"), (-3, "eager")])
def test_the_worker_and_the_simulator_are_asked_the_same(at, policy, tmp_path):
    one, planned = workload.to_drive([])[at]
    assert planned == policy
    record = live.drive(one, policy, 1.0, 150, seed=1)
    for side in ("worker", "simulator"):
        figures = record[side]
        assert figures["requests"] == 150
        assert sum(figures[part] for part in ("goodput", "late", "rejected_at_enqueue", "given_up")) == pytest.approx(100)
        assert sum(figures["reasons"].values()) == pytest.approx(100)
        assert bool(figures["padding"]) == bool(one.lengths)
    assert record["worker"]["counted"] == (150 if policy == "ours" else 0)
    assert one.title in live.table([record])
    assert [target.limit for target in live.targets([record])] == [3.0]
    pytest.importorskip("matplotlib")
    plot.draw([], [record], {"cpu": "a", "cores": 2, "python": "3"}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_geometric_boundaries_grow_by_their_ratio_in_multiples_to_the_maximum():
    assert padding.geometric(512, 2) == (16, 32, 64, 128, 256, 512)
    assert padding.geometric(100, 1.25, 8) == (8, 16, 24, 32, 40, 56, 72, 96, 100)
    assert padding.geometric(16, 2) == (16,)
    assert padding.geometric(5, 2) == (5,)
