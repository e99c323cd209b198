"""`gpuworker simulate`, as a user meets it."""

import json
import subprocess
import sys

import pytest

from gpuworker.cli import main, simulate
from gpuworker.testing import costs
from gpuworker.testing.comparison import POLICIES

MS = 1_000_000
COST = ("simulate", "--cost", "5+0.25b", "--requests", "1500")


def test_the_command_knows_every_policy():
    assert tuple(POLICIES) == simulate.POLICIES


def test_the_table(capsys):
    assert main([*COST, "--latency-budget-ms", "26", "--load", "0.5,1.0", "--policy", "ours,eager"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "latency budget 26 ms, a full batch runs 13 ms"
    assert lines[2].startswith("load 0.50, 1,231/s, 1,500 requests; the best schedule answers 100.0 % in time")
    assert lines[3].split() == ["POLICY", "GOODPUT", "RATIO", "LATE", "REJECTED", "MEAN", "P50", "P99", "BATCH", "BUSY"]
    assert [line.split()[0] for line in lines[4:6]] == ["ours", "eager"]
    assert lines[7].startswith("load 1.00, 2,462/s")
    assert max(map(len, lines)) <= 100
    ours, eager = (float(line.split()[1]) for line in lines[9:])
    assert ours > eager


def test_the_example_of_the_help_runs(capsys):
    example = next(line for line in simulate.EXAMPLE.splitlines() if line.startswith("  gpuworker simulate"))
    words = example.replace('"', "").split()
    assert main([*words[1:], "--requests", "300"]) == 0
    assert "size-timeout" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["simulate", "--help"])
    assert "edf-head" in capsys.readouterr().out


def test_json_has_every_figure_and_the_same_seed_gives_the_same(capsys, tmp_path):
    assert main([*COST, "--arrivals", "mmpp", "--seed", "3", "--policy", "all", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["options"]["cost"] == "5+0.25b"
    assert figures["latency_budget_ms"] == 26.0
    (run,) = figures["runs"]
    assert set(run["policies"]) == set(POLICIES)
    for policy in run["policies"].values():
        assert policy["requests"] == 1500 == policy["on_time"] + policy["late"] + policy["rejected_at_enqueue"] + policy["rejected_at_dispatch"]
        assert policy["ratio"] <= 1
    assert main([*COST, "--arrivals", "mmpp", "--seed", "3", "--policy", "all", "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == figures


def test_late_wait_and_admission_reach_our_scheduler(capsys):
    def ours(*args):
        assert main([*COST, "--load", "1.2", "--policy", "ours", "--json", "-", *args]) == 0
        return json.loads(capsys.readouterr().out)["runs"][0]["policies"]["ours"]

    assert ours("--admission", "on")["rejected_at_enqueue"] > 0 == ours("--admission", "on")["late"]
    assert ours("--admission", "off")["rejected_at_dispatch"] > 0 == ours("--admission", "off")["rejected_at_enqueue"]
    assert ours("--late", "serve")["late"] > 0 == ours("--late", "serve")["rejected_at_dispatch"]
    assert ours("--wait", "until_deadline", "--load", "0.3")["mean_latency_ms"] > 1.3 * ours("--load", "0.3")["mean_latency_ms"]
    capped = ours("--wait", "until_deadline", "--load", "0.3", "--max-wait-ms", "1")
    assert capped["mean_latency_ms"] < ours("--wait", "until_deadline", "--load", "0.3")["mean_latency_ms"]


def test_a_trace_with_lengths_and_buckets(capsys, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("time_ms,length\n" + "".join(f"{i},{10 + i * 37 % 90}\n" for i in range(400)))
    assert main(["simulate", "--cost", "1+0.01t", "--trace", str(trace), "--length-buckets", "25,50,100", "--policy", "ours", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    (run,) = figures["runs"]
    assert run["rate_per_s"] == pytest.approx(400 / 0.399)
    assert run["optimum"] is None is run["policies"]["ours"]["ratio"]
    assert 1 < run["policies"]["ours"]["padding"] < 2
    assert main(["simulate", "--cost", "1+0.01t", "--trace", str(trace), "--requests", "100", "--load", "0.5"]) == 0
    assert "load 0.50" in (out := capsys.readouterr().out)
    assert "100 requests" in out


def lengths_trace(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("time_ms,length\n" + "".join(f"{i},{10 + i * 37 % 90}\n" for i in range(400)))
    return ("simulate", "--cost", "1+0.01t", "--trace", str(trace), "--policy", "ours,eager")


@pytest.mark.parametrize("limit", [("--length-buckets", "25,50"), ("--max-batch-tokens", "50")])
def test_requests_longer_than_the_worker_takes_are_counted_as_refused(capsys, tmp_path, limit):
    too_long = sum(10 + i * 37 % 90 > 50 for i in range(400))
    command = (*lengths_trace(tmp_path), *limit, "--json")
    assert main([*command, str(tmp_path / "out.json")]) == 0
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    for policy in run["policies"].values():
        assert policy["rejected_at_enqueue"] >= too_long
        assert policy["requests"] == 400 == policy["on_time"] + policy["late"] + policy["rejected_at_enqueue"] + policy["rejected_at_dispatch"]
    assert run["policies"]["eager"]["rejected_at_enqueue"] == too_long
    assert f"{too_long} of them are longer than 50: refused at enqueue" in capsys.readouterr().out


def test_load_is_of_what_full_batches_can_serve_of_the_requests_that_are_taken(capsys, tmp_path):
    def rate_per_s(*args):
        assert main([*lengths_trace(tmp_path), "--load", "1", "--json", "-", *args]) == 0
        return json.loads(capsys.readouterr().out)["runs"][0]["rate_per_s"]

    lengths = [10 + i * 37 % 90 for i in range(400)]
    mean, of_short = (round(sum(some) / len(some)) for some in (lengths, [length for length in lengths if length <= 50]))
    assert rate_per_s() == pytest.approx(32e3 / (1 + 0.01 * 32 * mean))
    assert rate_per_s("--length-buckets", "25,50") == pytest.approx(32e3 / (1 + 0.01 * 32 * of_short))
    assert rate_per_s("--max-batch-tokens", "200") == pytest.approx(200 // mean * 1e3 / (1 + 0.01 * (200 // mean) * mean))


def test_a_trace_of_which_nothing_would_be_taken_is_a_mistake(capsys, tmp_path):
    assert main([*lengths_trace(tmp_path), "--length-buckets", "4,9"]) == 1
    assert "all requests are longer than 9" in capsys.readouterr().err


def test_a_token_budget_bounds_batches(capsys, tmp_path):
    def ours(*args):
        assert main([*lengths_trace(tmp_path), "--latency-budget-ms", "200", "--load", "0.9", "--json", "-", *args]) == 0
        return json.loads(capsys.readouterr().out)["runs"][0]["policies"]["ours"]

    few, many = ours("--max-batch-tokens", "200"), ours("--max-batch-tokens", "2000")
    assert 1 < few["mean_batch_size"] < many["mean_batch_size"] / 2
    assert few["requests"] == 400 == few["on_time"] + few["late"] + few["rejected_at_enqueue"] + few["rejected_at_dispatch"]


def test_a_profile_is_a_cost(capsys, tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({f"{size}x0": 5 + size / 4 for size in (1, 2, 4, 8, 16, 32)}))
    assert main(["simulate", "--profile", str(profile), "--requests", "500", "--policy", "ours"]) == 0
    assert "a full batch runs 13 ms" in capsys.readouterr().out
    cost_ns = costs.profile(profile, 32)
    assert [cost_ns(size, 0) / MS for size in (1, 16, 32)] == pytest.approx([5.25, 9, 13])
    assert cost_ns(16, 0) <= cost_ns(20, 0) <= cost_ns(32, 0)


def test_a_profile_with_lengths(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({f"{size}x{length}": 5 + size * length / 100 for size in (1, 8, 32) for length in (16, 64, 256)}))
    cost_ns = costs.profile(profile, 32)
    assert cost_ns(8, 64) == pytest.approx(10.12 * MS)
    assert cost_ns(8, 64) < cost_ns(8, 128) < cost_ns(8, 256) < cost_ns(20, 256) < cost_ns(32, 256)


def test_png(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main([*COST, "--load", "0.9,0.5", "--png", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib_names_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*COST, "--png", str(tmp_path / "out.png")]) == 1
    assert "pip install 'gpuworker[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size", "length", "ms"),
    [("5+0.25b", 32, 0, 13), ("5 + 0.25*b + .002t", 4, 100, 6.8), ("3", 7, 0, 3), ("1b", 7, 0, 7), ("0.25b+5", 4, 9, 6)],
)
def test_formulas(text, size, length, ms):
    assert costs.formula(text)(size, length) == round(ms * MS)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cost", "5-b"], "write it like"),
        (["--cost", "0"], "a batch cannot take no time"),
        (["--cost", "5+1t"], "give a --trace that has"),
        (["--cost", "5", "--trace", "/nonexistent.csv"], "No such file"),
        (["--profile", __file__], "not a profile"),
        (["--cost", "5", "--max-batch-tokens", "100"], "give a --trace that has"),
        (["--cost", "5", "--json", "/nonexistent/out.json"], "--json: "),
        (["--cost", "9" * 400], "at most a day"),
        (["--cost", "99999999999999999b"], "at most a day"),
        (["--cost", "5000000b"], "a full batch would run 1 d 20 h"),
        (["--cost", "5b", "--max-batch-size", "10000000"], "max_batch_size=10000000: give an integer from 1 to 4,096"),
        (["--cost", "5", "--allowed-batch-sizes", "1,8", "--max-batch-size", "16"], "it is not the last of allowed_batch_sizes, 8"),
        (["--cost", "80000000", "--requests", "10000"], "give fewer --requests, or a lower cost"),
        (["--cost", "5", "--load", "1e9"], "a second can be simulated"),
        (["--cost", "5", "--rate", "0.000001", "--requests", "5000"], "a second can be simulated"),
        (["--cost", "5", "--rate", "0.00001", "--arrivals", "mmpp"], "a second can be simulated"),
        (["--cost", "5", "--rate", "1e8", "--arrivals", "mmpp"], "a second can be simulated"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_mistake_is_one_clear_line(args, message, capsys):
    assert main(["simulate", "--requests", "50", *args]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "one of the arguments --cost --profile is required"),
        (["--cost", "5", "--policy", "mine"], "mine: choose from ours, eager"),
        (["--cost", "5", "--load", "0"], "0: give numbers above 0"),
        (["--cost", "5", "--load", "1", "--rate", "1"], "not allowed with argument"),
        (["--cost", "5", "--polcy", "ours"], "did you mean --policy?"),
        (["--cost", "5", "--load", "abc"], "--load: abc: give numbers above 0"),
        (["--cost", "5", "--rate", "1,2e9"], "--rate: 2e9: give numbers above 0, from 0.000001 to 1e9"),
        (["--cost", "5", "--latency-budget-ms", "soon"], "soon: give a number above 0"),
        (["--cost", "5", "--noise", "nan"], "nan: give a number from 0 to 1"),
        (["--cost", "5", "--length-buckets", "8,x"], "x: give an integer from 1 to 10,000,000"),
        (["--cost", "5", "--requests", "9" * 5000], "99...99"),
        (["--cost", "5", "--seed", "-1"], "--seed: -1: give an integer from 0"),
    ],
)
def test_wrong_usage_is_explained(args, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", *args])
    err = capsys.readouterr().err
    assert message in err
    assert len(err) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "1 to 256 shapes"),
        (json.dumps({f"1x{length}": 5 for length in range(257)}), "1 to 256 shapes"),
        ("[]", "not a profile"),
        ("", "not a profile"),
        ("[" * 100_000, "not a profile"),
        *((f'{{"8x1": {value}}}', "'8x1' takes ") for value in ("Infinity", "NaN", "-5", "0", "86400001", "9" * 400, '"5"', "true")),
        *((f'{{"{shape}": 5}}', "is no shape") for shape in ("-8x-1", "8x128x3", "9999999999999999999x1", "5000x1", "0x1", "1x99999999", "x", "")),
    ],
    ids=lambda value: str(value)[:40],
)
def test_files_that_are_no_profiles_are_refused(tmp_path, capsys, text, message):
    (tmp_path / "profile.json").write_text(text)
    assert main(["simulate", "--profile", str(tmp_path / "profile.json")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "profile.json: " in err
    assert message in err


@pytest.mark.parametrize("rate", [(), ("--rate", "5")])
def test_one_request_of_a_trace_has_no_rate(tmp_path, capsys, rate):
    assert main([*lengths_trace(tmp_path), "--requests", "1", *rate]) == 1
    assert "--requests 1: all of its first 1 requests have the same time" in capsys.readouterr().err


def test_the_largest_batch_follows_from_allowed_sizes_as_in_the_worker(capsys):
    assert main(["simulate", "--cost", "1b", "--allowed-batch-sizes", "2,8", "--requests", "200"]) == 0
    assert "a full batch runs 8 ms" in capsys.readouterr().out


def test_an_optimum_that_would_not_fit_into_memory_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr("gpuworker.testing.comparison.MOST_CELLS", 32 * 99)
    for total, is_known in ((99, True), (100, False)):
        assert main(["simulate", "--cost", "5", "--requests", str(total), "--json", "-"]) == 0
        assert (json.loads(capsys.readouterr().out)["runs"][0]["optimum"] is not None) == is_known


@pytest.mark.parametrize("how", [(), ("--json", "-")])
def test_a_full_disk_is_one_line(how):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "gpuworker.cli", *COST, *how], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "gpuworker: stdout cannot be written: No space left on device\n"
