"""Warm-up profiles on a clock that only batches move."""

import logging

import pytest

from gpuworker.scheduling.cost_model import CostModel
from gpuworker.worker.profile import REPETITIONS, by_length, profile, sizes_to_profile

MS = 1_000_000


class Device:
    """Takes cost_ns(batch) on its own clock, and three times that for what it has not run before."""

    def __init__(self, cost_ns, fails_at=None):
        self.now_ns = 1_000
        self.batches = []
        self._cost_ns, self._fails_at = cost_ns, fails_at

    def clock_ns(self):
        return self.now_ns

    def run_batch(self, requests):
        assert isinstance(requests, list)
        shape = len(requests), max(requests)
        if len(self.batches) == self._fails_at:
            raise ValueError("the model has no such layer")
        self.now_ns += self._cost_ns(*shape) * (1 if shape in self.batches else 3)
        self.batches.append(shape)
        requests.clear()  # what it does with its list is its own affair


def affine(size, length):
    return 5 * MS + size * length * 1000


def test_every_shape_is_timed_warm_and_the_largest_goes_first():
    device = Device(affine)
    examples = {64: [64], 128: [128, 100]}
    found = profile(device.run_batch, examples, [1, 4, 8], 60, device.clock_ns)
    assert found == {(size, length): [affine(size, length)] * REPETITIONS for size in (1, 4, 8) for length in (64, 128)}
    assert device.batches[0] == (8, 128)
    assert len(device.batches) == 6 * (REPETITIONS + 1)
    first_seen = list(dict.fromkeys(device.batches))
    assert [size * length for size, length in first_seen] == sorted((size * length for size, length in first_seen), reverse=True)


@pytest.mark.parametrize("limit_ms", [0, 1, 12, 40, 100, 333, 600])
def test_the_limit_holds_but_for_one_run_of_unknown_length(limit_ms):
    device = Device(lambda size, length: size * MS)
    found = profile(device.run_batch, {0: [0]}, [1, 2, 4, 8, 16], limit_ms / 1000, device.clock_ns)
    overrun_ns = device.now_ns - 1_000 - limit_ms * MS
    assert overrun_ns < 48 * MS  # the first run of the largest
    if found:
        assert overrun_ns <= 16 * MS
    assert all(runs == [size * MS] * len(runs) for (size, _), runs in found.items())
    assert limit_ms > 0 or device.batches == []


def test_short_of_time_all_shapes_are_timed_before_any_is_timed_again():
    device = Device(lambda size, length: size * MS)
    found = profile(device.run_batch, {0: [0]}, [1, 2, 4, 8], 0.0651, device.clock_ns)  # 4 * (1 + 2 + 4 + 8) ms, and 5
    assert {size: len(runs) for (size, _), runs in found.items()} == {8: 1, 4: 2, 2: 1, 1: 2}


def test_a_batch_that_raises_ends_the_profile_with_a_line_and_what_was_measured(caplog):
    device = Device(affine, fails_at=3)
    with caplog.at_level(logging.WARNING, logger="gpuworker"):
        found = profile(device.run_batch, {64: [64]}, [1, 4, 8], 60, device.clock_ns)
    assert found == {(8, 64): [affine(8, 64)]}
    assert len(device.batches) == 3
    (record,) = caplog.records
    assert "4 examples of length 64" in record.getMessage()


def test_no_examples_no_profile():
    device = Device(affine)
    assert profile(device.run_batch, {}, [1, 2], 60, device.clock_ns) == {}
    assert profile(device.run_batch, {64: []}, [1, 2], 60, device.clock_ns) == {}


def test_sizes_are_doubled_or_the_allowed_ones():
    assert sizes_to_profile(32) == [1, 2, 4, 8, 16, 32]
    assert sizes_to_profile(20) == [1, 2, 4, 8, 16, 20]
    assert sizes_to_profile(1) == [1]
    assert sizes_to_profile(20, (6, 6, 20)) == [6, 20]
    assert sizes_to_profile(20, (24, 6)) == [6, 20], "none that no batch can have, and the largest that one can"


def test_examples_are_sorted_into_their_buckets_longest_first():
    assert by_length(["a", "bbb", "cc", "dddd", "eeeee"], len, (2, 4)) == {2: ["cc", "a"], 4: ["dddd", "bbb"]}
    assert by_length(["a", "bbb"], None, (2, 4)) == {0: ["a", "bbb"]}
    assert by_length(["a", "bbb"], len, (2, 4), longest=2) == {2: ["a"]}
    assert by_length([], None, ()) == {}


def test_without_boundaries_examples_are_sorted_by_powers_of_two():
    assert by_length(["a" * n for n in (0, 1, 3, 5, 8, 4, 9)], len, ()) == {1: ["", "a"], 4: ["aaaa", "aaa"], 8: ["a" * 8, "a" * 5], 16: ["a" * 9]}
    assert by_length(["a" * n for n in (1, 5, 6)], len, (), longest=5) == {1: ["a"], 8: ["a" * 5]}
    assert by_length([], len, ()) == {}


def test_no_batch_holds_more_tokens_than_allowed_but_for_single_requests():
    device = Device(affine)
    found = profile(device.run_batch, {16: [16], 128: [128], 300: [300]}, [1, 8, 16, 17], 60, device.clock_ns, max_tokens=256)
    assert set(found) == {(1, 16), (8, 16), (16, 16), (1, 128), (1, 300)}
    assert set(device.batches) == set(found)


def test_a_profile_seeds_a_model_that_predicts_the_device():
    device, model = Device(affine), CostModel(32)
    for (size, length), run_ns in profile(device.run_batch, {64: [64], 128: [128]}, sizes_to_profile(32), 60, device.clock_ns).items():
        model.seed(size, length, run_ns)
    for length in (64, 100, 128):
        assert model.table(length) == [0, *(affine(size, length) for size in range(1, 33))]
