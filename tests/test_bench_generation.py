"""The generation benchmark: each of its parts, with a tiny model."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import generation
import generation_others
import generation_report
import generation_runs
import generation_work
from generation_work import Spread


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs some parts. -> (records, the JSON, the tables)."""
    monkeypatch.setattr(generation.machine, "adopt_orphans", lambda: None)  # this process is to stay what it is

    def run(*parts, **options):
        more = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        records = generation.main(["--quick", "--part", ",".join(parts), "--output", str(tmp_path), *more])
        (written,) = tmp_path.glob("*.json")
        assert written.with_suffix(".png").stat().st_size > 1000
        return records, json.loads(written.read_text()), written.with_suffix(".md").read_text()

    return run


def test_together_and_alone_are_the_same_and_contestants_have_the_same_work(run):
    records, figures, text = run("exact", "compare")
    assert records["exact"]["same"] == records["exact"]["requests"] == 6
    compared = {record["contestant"]: record for record in records["compare"]}
    assert list(compared)[:3] == [generation_runs.OURS, generation_runs.TRANSFORMERS_STATIC, generation_runs.TRANSFORMERS]
    assert len({record["tokens"] for record in compared.values()}) == 1
    assert compared[generation_runs.TRANSFORMERS_STATIC]["raw_tokens"] > compared[generation_runs.OURS]["raw_tokens"]
    assert figures["targets"]["float32: % of requests token-exact"]["verdict"] == "met"
    assert "6 of 6 requests" in text


def test_slots_and_what_a_step_is_made_of(run):
    records, figures, text = run("slots")
    few, many = records["slots"]
    assert (few["slots"], many["slots"]) == (4, 64)
    assert few["steps"] > many["steps"] > 0
    assert 2 < few["sequences"] <= 4 < many["sequences"] <= 12
    assert 0.5 < few["occupancy"] <= 1
    assert (many["occupancy"] or 0) <= 12 / 64
    for record in (few, many):
        assert 0 < record["pack"] < record["own"] < 1
        assert 0 < record["waste"] < 0.5
        assert record["first_ms"]["p50"] > 0 < record["between_ms"]["p99"]  # a frontend that is late has several tokens at a time
    assert figures["targets"]["scheduler and bookkeeping, % of a step, 64 slots"]["measured"] == pytest.approx(100 * many["own"])
    assert "### By slots" in text


def test_the_same_tokens_are_compared_with_a_long_prompt_and_without(run):
    records, figures, text = run("waste", "prefill")
    found = records["prefill"]
    assert found["gaps"] >= 30
    assert len(found["stalls"]) == len(found["prefill_ms"]) == len(found["alone_ms"]) == 1
    assert found["alone_ms"][0] > 0
    assert found["inside"]["p50"] <= found["inside"]["p99"]
    assert found["step_inside"]
    assert found["step_outside"]
    assert figures["targets"]["time between tokens p99, with a long prompt / without"]["measured"] == generation_report.stall(found)
    short, long = records["waste"]
    assert 0.03 < short["waste"] < 0.08  # half a block of 16 for each, and a request has some 100 tokens when it is half done
    assert long["waste"] < 0.02
    assert "### KV waste by length" in text


def test_a_traces_lengths_fit_the_model(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("time,tokens\n0,40000\n1,0\n2,8\n")
    replay = generation_work.replay(file, list(range(50)), 3, 2, 100)
    assert [len(request.prompt) for request in replay.requests] == [75, 1, 4]
    assert all(1 <= request.max_tokens <= 100 - len(request.prompt) for request in replay.requests)
    assert replay.arrivals_s == [0.0, 1.0, 2.0]


def record(contestant, number, tokens_per_s, cpu_s=1.0):
    return {"contestant": contestant, "round": number, "tokens": tokens_per_s, "raw_tokens": None, "seconds": 1.0, "cpu_s": cpu_s}


def test_ratios_are_within_a_round_and_targets_say_so():
    rival = generation_runs.TRANSFORMERS
    compared = [record(generation_runs.OURS, 0, 200), record(rival, 0, 100), record(generation_runs.OURS, 1, 20), record(rival, 1, 10)]
    assert generation_report.ratios(compared, rival, generation_report.per_s) == [2.0, 2.0]
    found = {target.title: target for target in generation_report.targets({"compare": compared})}
    assert found[f"tokens/s, ours / {rival}, 16 slots"].verdict == "met"
    assert found[f"tokens/s, ours / {generation_runs.TRANSFORMERS_STATIC}, 16 slots"].verdict == "n/a"
    assert found["KV waste, % of used blocks, 16 slots"].verdict == "n/a"


def test_one_that_fails_is_named_and_not_compared():
    failed = {"contestant": "vllm", "round": 0, "error": "its process ended with status 1"}
    compared = [record(generation_runs.OURS, 0, 200), failed]
    assert "n/a: its process ended with status 1" in generation_report.tables({"compare": compared})[0]
    assert generation_report.ratios(compared, "vllm", generation_report.per_s) == []


FAKE_VLLM = """
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert (temperature, ignore_eos) == (0, True)
        self.max_tokens = max_tokens
class _Output:
    def __init__(self, tokens):
        self.token_ids, self.outputs = tokens, [self]
class LLM:
    def __init__(self, model, dtype, max_num_seqs, max_model_len):
        print("what an engine prints is no answer")
    def generate(self, prompts, params, use_tqdm):
        return [_Output([0] * each.max_tokens) for each in params]
"""


def test_an_engine_that_is_installed_takes_part(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.syspath_prepend(str(tmp_path))
    subject = generation_work.Subject("tiny", "somewhere", "float32", [1])
    with generation_others.installed(subject, 4) as found:
        assert [other.label for other in found] == [generation_others.VLLM]
        assert found[0].run([generation_work.Request([1, 2], 5), generation_work.Request([3], 2)])["tokens"] == 7


def test_lengths_have_the_same_mean_and_differ_more_and_more():
    found = generation_work.spreads(4000, 64)
    assert found[0] == Spread("all the same", [64] * 4000)
    assert all(sum(spread.lengths) / 4000 == pytest.approx(64, rel=0.08) for spread in found)
    assert [spread.variation for spread in found] == sorted(spread.variation for spread in found)


def test_against_whom_is_said_and_checked(capsys):
    with pytest.raises(SystemExit):
        generation.main(["--quick", "--part", "compare", "--against", "static,nobody"])
    assert "nobody to compare with: nobody" in capsys.readouterr().err
