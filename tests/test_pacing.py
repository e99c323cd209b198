"""How much of a prompt is computed beside sequences that decode."""

import pytest

from gpuworker.generation.pacing import FIRST_TOKENS, LEAST_TOKENS, PrefillPace


def settle(pace, token_ns, decode_ns=1000, decoding=16, steps=300):
    """Steps of a device where a prompt's token takes so long. -> what the later steps took."""
    took = []
    for k in range(steps):
        if k % 20 == 0:
            pace.observe(decode_ns, decoding, 0)
        tokens = pace.tokens(decoding)
        took.append(decode_ns + tokens * token_ns)
        pace.observe(took[-1], decoding, tokens)
    return took[steps // 2 :]


@pytest.mark.parametrize("token_ns", [1, 5, 20, 100])
def test_steps_take_at_most_about_twice_as_long(token_ns):
    assert max(settle(PrefillPace(2.0, 512), token_ns)) <= 2000 * 1.1


def test_a_device_that_does_not_notice_a_prompt_computes_as_much_as_it_may():
    pace = PrefillPace(2.0, 512)
    settle(pace, 0.1)
    assert pace.tokens(16) == 512


def test_it_never_stops():
    pace = PrefillPace(2.0, 512)
    settle(pace, 100_000)
    assert pace.tokens(16) == LEAST_TOKENS


def test_it_follows_when_prompts_become_cheaper():
    pace = PrefillPace(2.0, 512)
    settle(pace, 100)
    few = pace.tokens(16)
    settle(pace, 5)
    assert pace.tokens(16) > 4 * few


def test_when_many_more_decode_than_before_the_others_are_not_kept_out():
    pace = PrefillPace(2.0, 512)
    settle(pace, 20, decoding=1)
    alone = pace.tokens(1)
    assert pace.tokens(16) >= 4 * alone


def test_without_sequences_that_decode_there_is_no_limit_and_nothing_is_learned():
    pace = PrefillPace(2.0, 512)
    for _ in range(50):
        pace.observe(10**9, 0, 512)
    assert pace.tokens(0) == pace.tokens(16) == 512


def test_before_anything_is_known_of_prompts_a_few_tokens_tell():
    pace = PrefillPace(2.0, 512)
    pace.observe(1000, 3, 0)
    assert pace.tokens(3) == FIRST_TOKENS
