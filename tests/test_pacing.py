"""How much of a prompt is computed beside sequences that decode."""

import pytest

from gpuworker.generation.pacing import LEAST_TOKENS, PrefillPace


def settle(pace, token_ns, decode_ns=100, steps=200):
    """Steps of a device where a prompt's token takes so long. -> what the later steps took."""
    took = []
    for k in range(steps):
        pace.observe(decode_ns, 16, 0) if k % 20 == 0 else None
        took.append(decode_ns + pace.tokens * token_ns)
        pace.observe(took[-1], 16, pace.tokens)
    return took[steps // 2 :]


@pytest.mark.parametrize("token_ns", [0.1, 1, 5, 20])
def test_steps_take_at_most_about_twice_as_long(token_ns):
    took = settle(PrefillPace(2.0, 512), token_ns)
    assert sorted(took)[len(took) // 2] <= 200
    assert max(took) <= 200 * 1.3


def test_a_device_that_does_not_notice_a_prompt_computes_as_much_as_it_may():
    pace = PrefillPace(2.0, 512)
    settle(pace, 0.01)
    assert pace.tokens == 512


def test_it_never_stops():
    pace = PrefillPace(2.0, 512)
    settle(pace, 10_000)
    assert pace.tokens == LEAST_TOKENS


def test_it_grows_again_when_prompts_become_cheaper():
    pace = PrefillPace(2.0, 512)
    settle(pace, 20)
    few = pace.tokens
    settle(pace, 1)
    assert pace.tokens > 4 * few


def test_without_sequences_that_decode_nothing_is_learned():
    pace = PrefillPace(2.0, 512)
    for _ in range(50):
        pace.observe(10**9, 0, 512)
    assert pace.tokens == 512


def test_before_a_step_without_a_prompt_there_is_nothing_to_compare_with():
    pace = PrefillPace(2.0, 512)
    pace.observe(10**9, 3, 512)
    assert pace.tokens == 512
