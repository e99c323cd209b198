"""Arrival processes and traces."""

import json

import numpy as np
import pytest

from gpuworker.testing import mmpp, poisson, uniform
from gpuworker.testing.traces import Trace, read_trace, scaled

S = 1_000_000_000


def dispersion(times_ns, window_ns=20_000_000):
    """Variance over mean of the arrivals in each window: 1 for Poisson."""
    counts = np.bincount(times_ns // window_ns)
    return counts.var() / counts.mean()


@pytest.mark.parametrize("process", [poisson, mmpp, uniform])
def test_times_ascend_in_integer_ns_at_the_rate_asked_for(process):
    times_ns = process(2000.0, 20_000)
    assert times_ns.dtype == np.int64
    assert len(times_ns) == 20_000
    assert (np.diff(times_ns) >= 0).all()
    assert 0 <= times_ns[0] < S // 10
    assert len(times_ns) / (times_ns[-1] / 1e9) == pytest.approx(2000, rel=0.1)


@pytest.mark.parametrize("process", [poisson, mmpp])
def test_the_seed_decides(process):
    assert (process(500, 1000, seed=3) == process(500, 1000, seed=3)).all()
    assert (process(500, 1000, seed=3) != process(500, 1000, seed=4)).any()


def test_poisson_is_poisson_and_mmpp_comes_in_bursts():
    assert dispersion(poisson(2000, 20_000)) == pytest.approx(1, abs=0.2)
    assert dispersion(mmpp(2000, 20_000)) > 10
    assert dispersion(mmpp(2000, 20_000, burst=1.0)) == pytest.approx(1, abs=0.2)
    assert (np.diff(uniform(2000, 100)) == 500_000).all()


def test_bursts_cannot_exceed_the_mean():
    with pytest.raises(ValueError, match="bursts alone would exceed the mean rate"):
        mmpp(100, 10, burst=11, burst_share=0.1)


@pytest.fixture
def trace_of(tmp_path):
    def write(text, name="trace.csv"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_trace(tmp_path / name)

    return write


def test_azure_csv_is_read_to_100_ns_and_needs_no_last_newline(trace_of):
    trace = trace_of(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319607,3180,8\n2023-11-16 18:17:04.0781490,110,27"
    )
    assert trace.arrivals_ns.tolist() == [0, 52_000_700, 98_189_000]
    assert trace.lengths.tolist() == [4808, 3180, 110]
    assert [(r.ticket, r.enqueue_ns, r.length) for r in trace.requests(2)] == [(0, 0, 4808), (1, 52_000_700, 3180)]


@pytest.mark.parametrize(
    ("header", "times", "unit_ns"),
    [
        ("time_ms,length", ("1.5", "3", "2"), 1_000_000),
        ("arrival time [us],Request tokens", ("1.5", "3", "2"), 1_000),
        ("Timestamp [s],Request tokens", ("1.5", "3", "2"), S),
        ("arrived_at,num_prefill_tokens", ("1.5", "3", "2"), S),
        ("timestamp (ns),prompt_tokens", ("15", "30", "20"), 10),
    ],
)
def test_numbers_are_of_the_unit_that_the_header_names(trace_of, header, times, unit_ns):
    trace = trace_of(header + "".join(f"\n{time},{i + 1}" for i, time in enumerate(times)))
    assert trace.arrivals_ns.tolist() == [0, 0.5 * unit_ns, 1.5 * unit_ns]  # in order
    assert trace.lengths.tolist() == [1, 3, 2]  # each with its own


def test_a_trace_may_have_no_lengths(trace_of):
    assert trace_of("time\n1\n2\n").lengths.tolist() == [0, 0]


def test_date_with_a_zone(trace_of):
    assert trace_of("TIMESTAMP,ContextTokens\n2024-05-10 00:00:00.009930+00:00,1\n2024-05-10T00:01:00Z,1\n").arrivals_ns[1] == 60 * S - 9_930_000


def test_mooncake_times_are_spread_over_their_step_always_alike(trace_of):
    lines = [json.dumps({"timestamp": 3000 * (i // 10), "input_length": i + 1, "hash_ids": [i]}) for i in range(100)]
    trace, again = trace_of("\n".join(lines), "trace.jsonl"), trace_of("\n".join(lines) + "\n", "again.jsonl")
    assert (trace.arrivals_ns == again.arrivals_ns).all()
    assert len(set(trace.arrivals_ns.tolist())) == 100
    for step in range(10):  # none leaves its step
        inside = trace.lengths[10 * step : 10 * step + 10]
        assert sorted(inside) == list(range(10 * step + 1, 10 * step + 11))
    assert np.diff(trace.arrivals_ns).max() < 3 * S  # they do not come in lumps any more


def test_scaling_keeps_the_proportions():
    trace = scaled(Trace(np.array([5, 6, 9, 15]) * S, np.array([1, 2, 3, 4])), 1000)
    assert trace.arrivals_ns.tolist() == [0, 400_000, 1_600_000, 4_000_000]
    assert trace.lengths.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3,4\n", "no column with a time among"),
        *((f"time,length\n1,2\n{time},3\n", "trace.csv, line 3: .* is no time") for time in ("soon", "inf", "nan", "1e30", "1e999999999", "-1e30")),
        *((f"time,length\n1,2\n2,{length}\n", "trace.csv, line 3: .* is no length") for length in ("long", "-1", "9" * 20, "1.5", "nan", "1e999999")),
        ("time,length\n1,2\n2\n", "trace.csv, line 3: it has no 'length'"),
        (f"time,length\n1,2\n{'x' * 200_000},3\n", "trace.csv, line 3: field larger than"),
        (b"time\n1\n\xff\n", "trace.csv, line 3: it is not UTF-8"),
        (b"\xff\xfe", "trace.csv, line 1: it is not UTF-8"),
        ("x" * 20_000_000, "trace.csv, line 1: it is longer than 16 MiB"),
        ("\n\n", "the file is empty"),
        *((f'{{"timestamp":1}}\n{line}', "trace.csv, line 2: not a JSON object") for line in ("[1,2]", "5", '{"timest', '{"a":' + "[" * 100_000)),
        ('{"timestamp":1,"input_length":3}\n{"timestamp":2}', "trace.csv, line 2: it has no 'input_length'"),
        ('{"timest', "trace.csv, line 1: not a JSON object"),
        ("time\n1\n", "fewer than two requests"),
        ("time\n1\n1\n", "have the same time"),
        ("", "trace.csv: the file is empty"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_files_that_are_no_traces_are_refused(trace_of, text, message):
    with pytest.raises(ValueError, match=message):
        trace_of(text)


def test_a_byte_order_mark_is_no_part_of_the_file(trace_of):
    assert trace_of('\ufeff{"timestamp":1}\n{"timestamp":2}\n', "trace.jsonl").arrivals_ns.tolist() == [0, 1_000_000]


def test_a_rate_takes_two_times():
    trace = Trace(np.array([0, 0, 5]), np.array([1, 2, 3]))
    assert trace.first(3).rate_per_s == pytest.approx(6e8)
    with pytest.raises(ValueError, match="first 2 requests have the same time"):
        trace.first(2)


@pytest.mark.parametrize("rate_per_s", [1e-12, 1e18])
def test_rates_that_no_clock_can_tell_are_refused(rate_per_s):
    with pytest.raises(ValueError, match="a second can be simulated"):
        scaled(Trace(np.array([0, 5]), np.array([0, 0])), rate_per_s)
