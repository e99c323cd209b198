"""For how long requests hold their slots, as a generating owner estimates it."""

import pytest

from gpuworker.generation.tally import AnswerTimes

S = 1_000_000_000


def test_before_any_has_ended_the_age_of_the_oldest_is_what_is_known():
    times = AnswerTimes()
    assert times.mean_ns(5 * S, None) == 0
    assert times.mean_ns(5 * S, 2 * S) == 3 * S
    times.ended(1 * S)
    assert times.mean_ns(90 * S, 2 * S) == 1 * S


def test_it_follows_what_answers_take():
    times = AnswerTimes()
    for _ in range(3):
        times.ended(1 * S)
    assert times.mean_ns(0, None) == 1 * S
    for _ in range(40):
        times.ended(9 * S)
    assert times.mean_ns(0, None) == pytest.approx(9 * S, rel=0.01)
