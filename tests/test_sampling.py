"""What a request may ask of the sampler, and the random numbers."""

import math
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from gpuworker.sampling import SamplingParams, _mixed, uniform

WRONG = {
    "temperature": ([-0.1, math.nan, math.inf, 101, "1", None, True], "0 \\(greedy\\) to 100"),
    "top_k": ([-1, 1.0, True, None], "how many tokens to keep, or 0 for all"),
    "top_p": ([0, -1, 1.01, math.nan, "0.9"], "a share above 0"),
    "min_p": ([-0.01, 1.01, math.nan], "a share from 0"),
    "repetition_penalty": ([0, -1, math.inf, math.nan], "a number above 0; 1 is off"),
    "presence_penalty": ([-2.1, 2.1, math.nan], "from -2 to 2"),
    "frequency_penalty": ([-2.1, 2.1, math.nan], "from -2 to 2"),
    "logit_bias": ([[1], {"7": 1.0}, {-1: 1.0}, {7: 101}, {7: -math.inf}, {7: math.nan}, {7: None}], "give"),
    "seed": ([1.0, 1 << 64, -(1 << 63) - 1, True], "an integer from -2\\*\\*63 to 2\\*\\*64 - 1, or None"),
    "logprobs": ([-2, 21, 1.0, True], "up to 20"),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (values, _) in WRONG.items() for value in values])
def test_what_makes_no_sense_is_refused_by_saying_what_does(name, value):
    with pytest.raises(ValueError, match=f"{name}.*{WRONG[name][1]}"):
        SamplingParams(**{name: value})


def test_the_ends_of_every_range_are_allowed():
    SamplingParams(
        temperature=100, top_k=1, top_p=1e-9, min_p=1, repetition_penalty=0.01, presence_penalty=-2, frequency_penalty=2, seed=-(1 << 63), logprobs=20
    )
    SamplingParams(temperature=0, top_p=1, min_p=0, logit_bias={0: -100, 7: 100.0}, seed=(1 << 64) - 1, logprobs=0)
    SamplingParams(logit_bias={})


def test_params_travel():
    params = SamplingParams(temperature=0.7, top_k=40, logit_bias={5: -1.5}, seed=-3, logprobs=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.json.decode(b'{"temperature": 1, "logit_bias": {"5": -100}}', type=SamplingParams).logit_bias == {5: -100.0}
    with pytest.raises(msgspec.ValidationError, match=r"top_p=2\.0: give a share above 0"):
        msgspec.json.decode(b'{"top_p": 2.0}', type=SamplingParams)
    with pytest.raises(AttributeError):
        params.seed = 1


@pytest.mark.parametrize(
    ("options", "is_greedy", "edits", "is_plain"),
    [
        ({}, True, False, True),
        ({"top_k": 5, "seed": 1}, True, False, True),
        ({"temperature": 1e-6}, True, False, True),
        ({"temperature": 1e-5}, False, False, False),
        ({"logprobs": 0}, True, False, False),
        ({"repetition_penalty": 1.1}, True, True, False),
        ({"presence_penalty": -1}, True, True, False),
        ({"frequency_penalty": 1}, True, True, False),
        ({"logit_bias": {3: 1.0}}, True, True, False),
        ({"logit_bias": {}}, True, False, True),
    ],
)
def test_what_is_to_be_done(options, is_greedy, edits, is_plain):
    params = SamplingParams(**options)
    assert (params.is_greedy, params.edits, params.is_plain) == (is_greedy, edits, is_plain)


def test_the_generator_is_splitmix64():
    """The first outputs for the state 1234567, as its reference implementation gives them."""
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        outputs.append(_mixed(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def reference(seed, positions):
    """The same in numpy's wrapping arithmetic."""

    def mixed(z):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    start = mixed(np.array([seed % 2**64], np.uint64))
    return (mixed(start + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)).astype(float) * 2.0**-53


@pytest.mark.parametrize("seed", [0, 1, -1, 12345, (1 << 64) - 1, -(1 << 63)])
def test_every_number_is_in_the_unit_interval_and_what_arithmetic_says(seed):
    numbers = [uniform(seed, position) for position in range(1000)]
    assert all(0 <= number < 1 for number in numbers)
    assert numbers == reference(seed, np.arange(1000)).tolist()


PINNED = [0.8833108082136426, 0.43152799704850997, 0.5961188718302076, 0.8440051422667861, 0.7741445495399422]


def test_numbers_never_change():
    """A seed that somebody has written down gives the same text with the next version."""
    assert [uniform(0, 0), uniform(0, 1), uniform(42, 0), uniform(42, 1000), uniform(-1, 7)] == PINNED


def test_a_seed_may_be_signed_or_not():
    assert uniform(-5, 3) == uniform((1 << 64) - 5, 3)


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_numbers_are_spread_evenly_and_independently(along):
    count = 20000
    numbers = np.array([uniform(7, i) if along == "positions" else uniform(i, 7) for i in range(count)])
    steps = np.abs(np.sort(numbers) - (np.arange(count) + 0.5) / count).max()
    assert steps < 1.63 / count**0.5  # Kolmogorov-Smirnov at 1 %
    for lag in (1, 2, 16):
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 4 / count**0.5


def test_seeds_that_are_near_do_not_share_numbers():
    assert len({uniform(seed, position) for seed in range(100) for position in range(100)}) == 10000


def test_it_needs_no_torch():
    code = "import sys, gpuworker.sampling; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
