"""Tokens become text as they come: joined, what the tokenizer makes of all of them at once; never half a character, never an error."""

import random

import pytest

from gpuworker.client.text import REPLACEMENT, Detokenizer
from gpuworker.client.vocabulary import Vocabulary, load
from gpuworker.errors import InvalidRequest
from tests.byte_tokenizer import END, TEXTS, byte_fallback, byte_level, word_pieces

BYTES, PIECES = byte_level(), byte_fallback()
FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"


def pieces_of(tokenizer, ids):
    detokenizer = Vocabulary(tokenizer).detokenizer()
    return [*(detokenizer.add(token) for token in ids), detokenizer.end()]


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_case_8_joined_deltas_are_the_whole_text(tokenizer, text):
    """sglang 31598, dynamo 12630: CJK, emoji and ZWJ sequences were doubled or lost."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert pieces[-1] == "" or tokenizer is PIECES


def test_characters_of_several_tokens_come_whole_and_at_once():
    ids = BYTES.encode(FAMILY).ids
    assert len(ids) > len(FAMILY)  # or this would test nothing
    assert [piece for piece in pieces_of(BYTES, ids) if piece] == list(FAMILY)


def test_bytes_spelt_out_come_one_token_late():
    """They might yet turn out not to be a character."""
    ids = PIECES.encode("\U0001f389 a", add_special_tokens=False).ids
    pieces = pieces_of(PIECES, ids)
    assert "".join(pieces) == "\U0001f389 a"
    assert pieces[: ids.index(PIECES.token_to_id("<0x89>")) + 1] == [""] * 5


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "fallback"])
def test_case_7_random_ids_never_raise_and_are_decoded_exactly(tokenizer):
    """vllm 17448: "Invalid prefix" killed the request."""
    rng = random.Random(7)
    for length in (1, 2, 3, 5, 8, 40, 150):
        for _ in range(60):
            ids = [rng.randrange(tokenizer.get_vocab_size() + 5) for _ in range(length)]  # also some that there are not
            assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def counting(tokenizer):
    """-> (a detokenizer, how many ids it has decoded each time)."""
    decoded = []

    class Counting:
        id_to_token, get_vocab_size = tokenizer.id_to_token, tokenizer.get_vocab_size

        def decode(self, ids):
            decoded.append(len(ids))
            return tokenizer.decode(ids)

    return Detokenizer(Counting(), frozenset(), frozenset()), decoded


def test_a_long_run_of_nonsense_is_decoded_exactly_and_seldom():
    ids = [BYTES.encode("中").ids[0]] * 500 + BYTES.encode("!").ids
    detokenizer, decoded = counting(BYTES)
    text = "".join([detokenizer.add(token) for token in ids]) + detokenizer.end()
    assert text == BYTES.decode(ids) == REPLACEMENT * 500 + "!"
    assert sum(decoded) < 20_000  # of 125,000 if each token were tried


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "fallback"])
def test_a_long_text_is_not_decoded_again_and_again(tokenizer):
    ids = tokenizer.encode("the quick brown fox " * 100, add_special_tokens=False).ids
    detokenizer, decoded = counting(tokenizer)
    assert "".join(detokenizer.add(token) for token in ids) == "the quick brown fox " * 100
    assert sum(decoded) <= 4 * len(ids)


def test_an_unfinished_character_is_flushed_at_the_end():
    ids = BYTES.encode("a中").ids[:-1]
    assert pieces_of(BYTES, ids) == ["a", *[""] * (len(ids) - 1), REPLACEMENT]


def test_a_real_replacement_character_is_kept():
    ids = BYTES.encode(f"{REPLACEMENT}a{REPLACEMENT}").ids
    assert "".join(pieces_of(BYTES, ids)) == f"{REPLACEMENT}a{REPLACEMENT}"


def test_special_tokens_have_no_text_and_break_nothing():
    ids = BYTES.encode("中").ids
    mixed = [END, ids[0], END, *ids[1:], END]
    assert [piece for piece in pieces_of(BYTES, mixed) if piece] == ["中"]


def test_nothing_of_the_prompt_is_in_the_text():
    """vllm 48853: a prompt that ends inside a character came back as the beginning of the answer. Ours are never told of the prompt."""
    ids = BYTES.encode("Hello中!").ids
    cut = len(BYTES.encode("Hello").ids) + 1
    assert "".join(pieces_of(BYTES, ids[cut:])).endswith("!")
    assert "Hello" not in "".join(pieces_of(BYTES, ids[cut:]))


def test_a_decoder_that_changes_its_mind_raises_nothing():
    """BERT's puts "don't" together; what is out stays, and the rest is as long as it is in the whole."""
    tokenizer = word_pieces()
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(1, 12))]
        text = "".join(pieces_of(tokenizer, ids))
        assert text.replace(" ", "") == tokenizer.decode(ids).replace(" ", "") or len(text) >= len(tokenizer.decode(ids))


def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path):
    BYTES.save(str(tmp_path / "tokenizer.json"))
    first = load(str(tmp_path))
    assert load(str(tmp_path)) is first
    PIECES.save(str(tmp_path / "tokenizer.json"))
    assert load(str(tmp_path)) is not first
    assert load(str(tmp_path)).encode("hello")[0] == 1  # <s>
    assert load(str(tmp_path)).encode("hello", add_special_tokens=False)[0] != 1


def test_what_the_file_says_of_padding_and_truncation_is_not_used(tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load(str(tmp_path)).encode("a b c d e f") == BYTES.encode("a b c d e f").ids


def test_a_file_that_cannot_be_used_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="clients read its tokenizer from there"):
        load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer that the package tokenizers"):
        load(str(tmp_path))


def test_a_lone_surrogate_is_refused():
    with pytest.raises(InvalidRequest, match=r"lone surrogate, U\+D83D at 1"):
        Vocabulary(byte_level()).encode("a\ud83d")
