"""From token ids to text, as they come, and the strings that end it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

REPLACEMENT = "\ufffd"
_PATIENCE = 64
"""So many ids without text are looked at each time; after that, one time in _SELDOM: or a long run of bytes that are no character would take quadratic time."""
_SELDOM = 16


class Detokenizer:
    """All that `add` and `end` return is, joined, what the tokenizer makes of all ids at once, special tokens skipped.

    Held back is what the next id may change: a character that is not whole, and with tokenizers that spell rare characters as bytes (<0xE4>) the whole run of
    bytes, as one that fits no character undoes those before it. So an emoji may come one token late. Only the ids of the last two pieces are decoded each time: a
    token costs 2 us, however long the text is. Nothing of the prompt is looked at: it may end inside a character, and the text would begin with it.

    tokenizer: a tokenizers.Tokenizer. silent: ids of special tokens. spelt: those of bytes.
    """

    def __init__(self, tokenizer: Any, silent: frozenset[int], spelt: frozenset[int]) -> None:
        self._decode, self._name_of, self._size = tokenizer.decode, tokenizer.id_to_token, tokenizer.get_vocab_size()
        self._silent, self._spelt = silent, spelt
        self._ids: list[int] = []
        self._length = 0  # of the text that is out
        # Decoders look to the left (for a space to drop, say): so the ids of the last piece are decoded again together with what follows.
        self._from = self._to = 0  # the last piece's ids
        self._last = ""  # and its text, decoded by itself

    def add(self, token: int) -> str:
        """The text that is final with this token; often none."""
        if token in self._silent or (token >= self._size and self._name_of(token) is None):  # models have more ids than their tokenizers, for padding
            return ""
        self._ids.append(token)
        waiting = len(self._ids) - self._to
        if token in self._spelt or (waiting > _PATIENCE and waiting % _SELDOM):
            return ""
        text: str = self._decode(self._ids[self._from :])
        return "" if text.endswith(REPLACEMENT) else self._out(text)

    def end(self) -> str:
        """What is left when no more will come: an unfinished character is U+FFFD."""
        return self._out(self._decode(self._ids[self._from :])) if len(self._ids) > self._to else ""

    def _out(self, text: str) -> str:
        """text: of the last piece's ids and all after it."""
        # What is out stays, also where a decoder changes its mind about it (one that puts "n't" and a word together, say).
        piece = text[len(self._last) :] if text.startswith(self._last) else self._decode(self._ids)[self._length :]
        if piece:
            self._from, self._to = self._to, len(self._ids)
            self._last = self._decode(self._ids[self._from :])
            self._length += len(piece)
        return piece


class StopStrings:
    """Lets text through up to the first of `stops`, and holds back an end that may be the beginning of one.

    First is which is complete first, as if the text came letter by letter; of two that end together, the longer. So how the text was cut into pieces makes no
    difference. No letter of it gets out.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """-> (what may be shown now, whether it ends here)."""
        if not self._stops or not text:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        cut = self._beginning(text)
        self._held = text[cut:]
        return text[:cut], False

    def end(self) -> str:
        """What was held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Where the longest end of `text` begins with which a stop begins."""
        for at in range(max(len(text) - self._longest + 1, 0), len(text)):
            end = text[at:]
            if any(stop.startswith(end) for stop in self._stops):
                return at
        return len(text)
