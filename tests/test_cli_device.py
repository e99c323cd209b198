"""What the statistics' screen says of tensors and their device."""

from gpuworker.cli.device import execution
from gpuworker.segment.execution import COUNTERS, Execution


def words(**counts):
    return [counts.get(name, 0) for name in COUNTERS]


def test_nothing_is_said_of_a_worker_without_tensors():
    assert Execution.of(words()) is None
    assert execution(None) == []


def test_on_the_cpu():
    found = Execution.of(
        words(
            batches=10, rows=30, padded_rows=40, cells=100, padded_cells=150, gather_ns=10**6, device_ns=10**8, wall_ns=11 * 10**7, scatter_ns=10**5
        )
    )
    assert execution(found) == [
        "tensors, since the owner's start: 10 batches",
        "  a batch  gather 100 us, device 10 ms of 11 ms, scatter 10 us",
        "  padding  1.33 rows and 1.5 elements for each real one",
        "",
    ]


def test_everything_at_once_stays_within_the_screen():
    few = {"graphs": 250, "odd_requests": 10**6, "out_of_memory": 1000}
    found = Execution.of(words(**dict.fromkeys(COUNTERS, 10**9) | few))
    lines = execution(found)
    assert len(lines) == 10
    assert max(map(len, lines)) <= 80


def test_rates_are_of_the_time_that_copies_took():
    found = Execution.of(
        words(batches=1, to_device_bytes=3000, to_device_ns=1000, from_device_bytes=5, from_device_ns=0, graph_hits=3, graph_misses=1, graphs=1)
    )
    assert (found.to_device_gbps, found.from_device_gbps) == (3, 0)
    assert any("75.0% of batches were replays; 1 graph of 0 bytes" in line for line in execution(found))
