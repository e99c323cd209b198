"""From texts to token ids, in the frontend: only the package `tokenizers` is needed for it, neither torch nor transformers, and it is imported at the first text.

One text at a time; a process may fork before, after and meanwhile. Pairs of texts are not there; many texts go through client.map.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import stat
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpuworker.errors import GpuWorkerError, InvalidRequest

Array = np.ndarray[Any, Any]
MOST_BYTES = 1 << 28
LONG_TEXT = 1 << 12
"""Letters. A longer text is worth a call that lets other threads run meanwhile."""
_loaded: dict[tuple[str, str, int], Any] = {}  # of this process, by file, digest and max_length


class Tokenizer:
    """What turns a worker's texts into its inputs. Thread-safe and fork-safe.

    entry: as `entry_of` makes it in the owner, which publishes it. Nothing is opened before the first text.
    """

    def __init__(self, entry: dict[str, Any]) -> None:
        self._file, self._digest, self._max_length = str(entry["file"]), str(entry["digest"]), int(entry["max_length"])
        self._wants_types, self._lower = bool(entry["types"]), bool(entry["lower"])
        self._tokenizer: Any = None

    def __call__(self, text: str) -> dict[str, Array]:
        """{"input_ids": int64 (tokens,)}, truncated to max_length, and "token_type_ids" of the same shape where the worker wants them: a request as it takes it.

        Raises InvalidRequest for a text that is no valid Unicode, ModuleNotFoundError without `tokenizers`, OSError where this process cannot read the file, and
        GpuWorkerError where the file is not the one that the worker uses.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            tokenizer = self._tokenizer = load(self._file, self._digest, self._max_length)
        try:
            encoding = encoded(tokenizer, text.lower() if self._lower else text)
        except (TypeError, UnicodeError):  # all that it says is that a str is no str
            raise InvalidRequest(
                f"the text holds a lone surrogate, {lone_surrogate(text)}, which is no character; replace it before sending"
            ) from None
        request = {"input_ids": np.array(encoding.ids, np.int64)}
        if self._wants_types:
            request["token_type_ids"] = np.array(encoding.type_ids, np.int64)
        return request


def encoded(tokenizer: Any, text: str, **options: Any) -> Any:
    """The tokenizers.Encoding of one text. `encode` keeps the interpreter's lock to its end, so that a text of megabytes stops all threads of a process for seconds;
    what is made for several texts gives it back."""
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, **options)
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)  # without the offsets, which nobody asks for
    return encode([text], **options)[0]


def entry_of(file: str, max_length: int, lower: bool = False) -> dict[str, Any]:
    """What clients need to tokenise as this process does. file: a tokenizer.json; lower: texts are lower-cased first. Raises as `load` does."""
    file = os.path.abspath(file)
    with open(file, "rb") as opened:
        digest = _digest(opened.read())
    tokenizer = load(file, digest, max_length)
    added = tokenizer.num_special_tokens_to_add(False)
    if max_length <= added:
        raise ValueError(f"max_length={max_length}: {added} tokens of every text are special ones; give at least {added + 1}")
    types = any(tokenizer.encode("a").type_ids)  # all zeros is what models assume by themselves
    return {"file": file, "digest": digest, "max_length": max_length, "types": types, "lower": lower}


def load(file: str, digest: str, max_length: int) -> Any:
    """The tokenizers.Tokenizer of a file, truncating to max_length tokens and padding nothing; once per process."""
    key = (file, digest, max_length)
    if key not in _loaded:
        _loaded[key] = _load(*key)  # two threads may do it both: a lock would be one more thing to think of at a fork
    return _loaded[key]


def _load(file: str, digest: str, max_length: int) -> Any:
    try:
        importlib.import_module("tokenizers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this worker's clients turn texts into tokens themselves, with the package tokenizers: pip install tokenizers (or send token ids)",
            name=error.name,
        ) from None
    with naming(file, " (or they send token ids)"):
        data = content_of(file)
    if _digest(data) != digest:
        raise GpuWorkerError(
            f"{file} is not the tokenizer that the worker uses: it has changed since the worker started (`gpuworker reload` lets it follow), "
            "or this process sees another file at that path"
        )
    tokenizer = parsed(file, data)
    tokenizer.no_padding()  # both may be set in the file, for somebody's training
    tokenizer.enable_truncation(max_length, direction=(tokenizer.truncation or {}).get("direction", "right"))
    return tokenizer


@contextlib.contextmanager
def naming(file: str, otherwise: str = "") -> Iterator[None]:
    """Errors of reading a tokenizer's file say whose it is. otherwise: what can be done without it."""
    try:
        yield
    except ValueError as error:
        raise GpuWorkerError(f"{file!r:.200} is no tokenizer's file: {error}") from None
    except OSError as error:
        raise type(error)(
            error.errno,
            f"{error.strerror}; the worker's clients read its tokenizer from there, so the path must be theirs too{otherwise}",
            file,
        ) from None


def parsed(file: str, data: bytes) -> Any:
    """A tokenizers.Tokenizer from a file's content. Raises ValueError."""
    tokenizers = importlib.import_module("tokenizers")
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the package raises nothing more special
        raise ValueError(f"{file} is not a tokenizer that the package tokenizers {tokenizers.__version__} can read: {error}") from None


def content_of(file: str) -> bytes:
    """Of a file that somebody has named to us: not of a pipe that never ends, nor of a device. Raises OSError and ValueError."""
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as opened:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise ValueError(f"it is not a regular file of at most {MOST_BYTES >> 20} MiB")
        return opened.read()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def lone_surrogate(text: str) -> str:
    """Which one a text holds that cannot be encoded, and where."""
    return next((f"U+{ord(character):04X} at {at}" for at, character in enumerate(text) if "\ud800" <= character <= "\udfff"), "?")
