"""Stop strings: no letter of one gets out, wherever tokens begin and end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuworker.client.text import StopStrings


def shown(stops, pieces):
    """-> (what was shown, piece by piece, and whether it was stopped)."""
    matcher, out = StopStrings(stops), []
    for piece in pieces:
        text, is_over = matcher.add(piece)
        out.append(text)
        if is_over:
            return out, True
    return [*out, matcher.end()], False


def test_case_4_no_letter_of_a_stop_string_gets_out():
    """vllm 3574, 2577."""
    out, is_over = shown(["DEFGHIJ"], ["ABC", "D", "EF", "GHI", "J", "KL"])
    assert (out, is_over) == (["ABC", "", "", "", ""], True)


def test_case_5_a_stop_string_across_tokens_is_found():
    """mzau/mlx-knife 68: the end of one token and the beginning of the next."""
    assert shown(["ab\n"], ["xxa", "b\nyy"]) == (["xx", ""], True)
    assert shown(["ab\n"], ["xxa", "bc", "d"]) == (["xx", "abc", "d", ""], False)


def test_what_only_began_like_one_comes_out():
    assert shown(["abc"], ["a", "b", "d", "ab"]) == (["", "", "abd", "", "ab"], False)
    assert shown(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], True)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["world", "lo"], "hello world", "hel"),
        (["lo w", "o"], "hello world", "hell"),  # the second is complete first
        (["llo", "o"], "hello", "he"),  # together: the longer
        (["o", "llo"], "hello", "he"),
        (["\n\n"], "a\n\n\nb", "a"),
        (["\U0001f600"], "a\U0001f600b", "a"),
        (["x"], "x", ""),
    ],
)
def test_the_earliest_wins_however_the_text_is_cut(stops, text, expected):
    for pieces in ([text], list(text), [text[:2], text[2:]]):
        out, is_over = shown(stops, pieces)
        assert ("".join(out), is_over) == (expected, True)


def test_without_any_all_goes_through():
    assert shown([], ["a", "", "b"]) == (["a", "", "b", ""], False)


def letter_by_letter(stops, text):
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.lists(st.text("abc", max_size=4), max_size=12))
def test_any_cut_of_any_text_gives_the_same(stops, pieces):
    out, is_over = shown(stops, pieces)
    text, expected_over = letter_by_letter(stops, "".join(pieces))
    assert ("".join(out), is_over) == (text, expected_over)
    if not is_over:
        for k in range(len(pieces)):
            held = "".join(pieces[: k + 1]).removeprefix("".join(out[: k + 1]))
            assert not held or any(stop != held and stop.startswith(held) for stop in stops), "held back for nothing"
