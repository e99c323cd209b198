"""The execution benchmark: small runs of each of its parts."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import execution
import execution_pipeline
import execution_rows
import execution_shapes
from execution_turns import PARTS, Stage, Watch, alternate, medians, on_stage, split


def play(stages, what):
    """What `what()` returns while the stages' workers are ready."""
    found = []
    on_stage(stages, lambda: found.append(what()))
    return found[0]


def test_a_turn_is_one_full_batch_and_its_parts_are_all_of_it():
    stages = execution_rows.stages(32)
    found = play(stages, lambda: {stage.label: stage.turns(3, in_parts=True) for stage in stages})
    assert list(found) == [execution_rows.NATIVE, execution_rows.LISTS]
    for label, samples in found.items():
        assert len(samples) == 3
        for sample in samples:
            assert sample["batches"] == 1
            parts = split(sample)
            assert tuple(parts) == PARTS
            assert sum(parts.values()) == sample["total"] - sample["forward"], label
            assert all(spent >= 0 for spent in parts.values()), parts
            assert min(parts["read"], parts["copy into the batch"], parts["copy out of it"], sample["forward"]) > 0


def test_looking_at_parts_leaves_the_worker_as_it_was():
    (stage, _) = stages = execution_rows.stages(32)
    assert play(stages, lambda: [set(stage.turns(1, in_parts=in_parts)[0]) for in_parts in (True, False)])[1] == {"forward", "total", "batches"}


def test_wrong_answers_are_no_result():
    watch = Watch()
    stage = Stage("wrong", execution_rows.EchoList(watch), watch, [np.ones(4, np.float32)], lambda requests, answers: answers[0][0] == 1)
    with pytest.raises(RuntimeError, match="wrong: wrong answers"):
        on_stage([stage], lambda: stage.turns(1))


def test_rounds_have_every_contestant_and_a_first_one_that_does_not_count():
    stages = execution_rows.stages(32)
    found = play(stages, lambda: alternate([*stages, execution_rows.Memcpys(stages[0])], 2, 2))
    assert {label: len(rounds) for label, rounds in found.items()} == {execution_rows.NATIVE: 2, execution_rows.LISTS: 2, execution_rows.FLOOR: 2}
    assert all(sample["own"] > 0 for rounds in found.values() for sample in rounds)
    assert {*PARTS, "total", "forward", "own", "batches"} == set(found[execution_rows.NATIVE][0])


def records(small_us, large_us, floor_us):
    """Of rows, as `measure` makes them: ns of a whole batch in each round."""

    def record(size, contestant, rounds_us):
        rounds = [dict.fromkeys(PARTS, 64) | {"own": us * 64e3} for us in rounds_us]
        return {"bytes": size, "requests": 64, "contestant": contestant, "rounds": rounds}

    who = execution_rows.NATIVE, execution_rows.LISTS
    found = [record(size, name, us) for size, us in ((4096, small_us), (262144, large_us)) for name in who]
    return [*found, record(262144, execution_rows.FLOOR, floor_us)]


@pytest.mark.parametrize(("large_us", "verdicts"), [([13.0, 260.0], ["met", "met"]), ([13.2, 266.0], ["met", "missed"])])
def test_targets_are_ratios_within_a_round(large_us, verdicts):
    found = records([3.0, 2.9], large_us, [10.0, 200.0])
    assert [target.verdict for target in execution_rows.targets(found)] == verdicts
    assert "| all / two bare memcpys " in execution_rows.table(found)
    assert [target.verdict for target in execution_rows.targets(records([3.1, 3.1], large_us, [10.0, 200.0]))] == ["missed", verdicts[1]]


def test_the_encoders_rows_are_targets_where_they_have_one():
    rows = [
        {"name": "served / direct", "value": 0.89, "unit": "x", "target": 0.9},
        {"name": "served", "value": 9.0, "unit": "requests/s", "target": None},
    ]
    (target,) = execution._targets({"encoder": rows}, {"encoder": 0.1})
    assert (target.comparison, target.verdict, target.foreign_cores) == (">=", "missed", 0.1)


def test_requests_of_different_lengths(monkeypatch):
    monkeypatch.setattr(execution_shapes, "alternate", lambda stages, rounds, turns: alternate(stages, 1, 1))
    found = execution_shapes._measure_lengths(quick=True)
    assert [(record["contestant"], record["requests"]) for record in found] == [
        (execution_shapes.NATIVE, 64),
        (execution_shapes.LISTS, 64),
        (execution_shapes.BUCKETED, 256),
    ]
    assert [record["rounds"][0]["batches"] for record in found[:2]] == [1, 1]
    assert found[2]["rounds"][0]["batches"] >= len(execution_shapes.BUCKETS)


def test_padding_up_and_batching_down(monkeypatch):
    monkeypatch.setattr(execution_shapes, "SIDE", 16)
    sizes = execution_shapes._measure_sizes(quick=True)
    assert [(record["count"], record["largest"]) for record in sizes] == [(3, 2), (5, 4), (17, 16), (24, 16), (33, 32), (40, 32), (48, 32), (63, 32)]
    for record in sizes:
        assert len(record["up"]) == len(record["down"]) == 3
        assert all(mean < whole for mean, whole in zip(record["down_mean"], record["down"], strict=True))
    lengths = [
        {"contestant": name, "requests": 64, "rounds": [dict.fromkeys(PARTS, 64) | {"own": 64, "batches": 8}]}
        for name in (execution_shapes.NATIVE, execution_shapes.LISTS, execution_shapes.BUCKETED)
    ]
    text = execution_shapes.table({"lengths": lengths, "sizes": sizes})
    assert "| 32 + 31 |" in text
    assert "in 8 batches" in text


def test_two_batches_on_their_way(monkeypatch):
    monkeypatch.setattr(execution_pipeline, "FLOATS", 64)
    monkeypatch.setattr(execution_pipeline.Product, "inputs", execution_pipeline.gpuworker.TensorSpec("float32", (64,)))
    monkeypatch.setattr(execution_pipeline.Product, "outputs", execution_pipeline.gpuworker.TensorSpec("float32", (64,)))
    found = execution_pipeline.measure(quick=True)
    assert [record["columns"] for record in found] == [execution_pipeline.SHORT, execution_pipeline.LONG]
    assert all(len(record[depth]) == 3 and min(record[depth]) > 0 for record in found for depth in ("depth_1", "depth_2"))
    assert "depth 1 / depth 2" in execution_pipeline.table(found)


def test_medians_are_part_by_part():
    assert medians([{"a": 1, "b": 9}, {"a": 3}, {"a": 2, "b": 4}]) == {"a": 2, "b": 4}
