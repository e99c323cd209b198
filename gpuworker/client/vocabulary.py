"""The tokenizer of a model's directory, in the frontend: only the package `tokenizers` is needed, and it is imported at the first text."""

from __future__ import annotations

import importlib
import os
from typing import Any

from gpuworker.client.text import Detokenizer
from gpuworker.client.tokenizer import content_of, encoded, lone_surrogate, naming, parsed
from gpuworker.errors import InvalidRequest

FILE = "tokenizer.json"
_loaded: dict[str, tuple[tuple[int, int, int], Vocabulary]] = {}  # of this process, by path, with what the file looked like


class Vocabulary:
    """Texts to token ids and back. Thread-safe and fork-safe."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a tokenizers.Tokenizer."""
        tokenizer.no_padding()  # both may be set in the file, for somebody's training
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._silent = frozenset(index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        spelt = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._spelt = frozenset(index for index in spelt if index is not None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. add_special_tokens: with what the tokenizer puts around a text, mostly a token for its beginning, or nothing. Raises InvalidRequest."""
        try:
            ids: list[int] = encoded(self._tokenizer, text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError):  # all that it says is that a str is no str
            raise InvalidRequest(
                f"the text holds a lone surrogate, {lone_surrogate(text)}, which is no character; replace it before sending"
            ) from None
        return ids

    def text_of(self, token: int) -> str:
        """One token by itself; U+FFFD is a part of a character."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def detokenizer(self) -> Detokenizer:
        """For one answer."""
        return Detokenizer(self._tokenizer, self._silent, self._spelt)


def load(directory: str) -> Vocabulary:
    """Of the tokenizer.json there; read once per process, and again when it has changed. Raises FileNotFoundError or another OSError where this process cannot
    read it, GpuWorkerError or ValueError where it is nonsense, ModuleNotFoundError without `tokenizers`."""
    file = os.path.join(directory, FILE)
    with naming(file):
        status = os.stat(file)
        version = status.st_ino, status.st_mtime_ns, status.st_size
        known = _loaded.get(file)
        if known is not None and known[0] == version:
            return known[1]
        data = content_of(file)
    try:
        importlib.import_module("tokenizers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the clients of a worker that generates turn tokens into text themselves, with the package tokenizers: pip install tokenizers",
            name=error.name,
        ) from None
    vocabulary = Vocabulary(parsed(file, data))
    _loaded[file] = version, vocabulary  # two threads may do it both: a lock would be one more thing to think of at a fork
    return vocabulary
