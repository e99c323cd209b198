"""The arguments of `Client.generate`, one kind at a time: as they are needed, or an InvalidRequest that names the argument, its value and what to give."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuworker.client.tokenizer import lone_surrogate
from gpuworker.errors import InvalidRequest
from gpuworker.sampling import shown

PROMPT = 'give a str, token ids as a list or an array of one dimension, or messages like [{"role": "user", "content": "Hello"}]'


def integer(name: str, value: Any, least: int, most: int, or_else: str = "") -> int:
    """An int of Python's own, whoever's it was. or_else: what else may be given, for the message."""
    number = _index(value)
    if number is None or not least <= number <= most:
        raise InvalidRequest(f"{name}={shown(value)}: give an integer from {least} to {most:,}{or_else}")
    return number


def plain(value: Any) -> Any:
    """Numbers of numpy's as Python's, also in a mapping; anything else as it is."""
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def token_ids(name: str, values: Any) -> tuple[int, ...]:
    """Of a list or another collection of them. Whether the model has such tokens is not looked at."""
    found = []
    for value in _several(name, values, "token ids in a list, as in [2, 50256]"):
        number = _index(value)
        if number is None or not 0 <= number < 1 << 31:
            raise InvalidRequest(f"{name}: {shown(value)} is no token id; give integers from 0")
        found.append(number)
    return tuple(found)


def strings(name: str, values: Any) -> tuple[str, ...]:
    """Of one, of several, or of None, which is none."""
    if values is None:
        return ()
    wanted = "a str of at least one character, or several in a list"
    found = (values,) if isinstance(values, str) else tuple(_several(name, values, wanted))
    for one in found:
        if not isinstance(one, str) or not one:
            raise InvalidRequest(f"{name}: {shown(one)} is not what an answer could contain; give {wanted}")
        if any("\ud800" <= character <= "\udfff" for character in one):
            raise InvalidRequest(f"{name}: {shown(one)} holds a lone surrogate, {lone_surrogate(one)}, which no answer could contain; give {wanted}")
    return found


def prompt_ids(prompt: Any, vocabulary: int) -> Any:
    """A prompt's token ids, int32 [tokens]. vocabulary: how many tokens the model has."""
    if isinstance(prompt, (list, tuple)):
        is_plain = set(map(type, prompt)) <= {int}  # mostly, and of many it is told at once
        for at, one in enumerate(() if is_plain else prompt):
            if _index(one) is None:
                raise InvalidRequest(f"prompt[{at}]={shown(one)}: it is no token id; {PROMPT}")
    elif isinstance(prompt, (bytes, Mapping)) or not hasattr(prompt, "__len__"):
        raise InvalidRequest(f"prompt={shown(prompt)}: {PROMPT}")
    try:
        ids = np.asarray(prompt)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidRequest(f"prompt={shown(prompt)}: {PROMPT} ({error})") from None
    if ids.ndim == 1 and not len(ids):
        raise InvalidRequest("prompt: it is empty; give at least one token, e.g. the one that the model's texts begin with")
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and not isinstance(prompt, (list, tuple))):
        raise InvalidRequest(f"prompt: {PROMPT}, not an array of {ids.ndim} dimensions of {ids.dtype}")
    least, most = ids.min(), ids.max()
    if not 0 <= least <= most < vocabulary:
        raise InvalidRequest(
            f"prompt: this model's tokens go from 0 to {vocabulary - 1:,}, and these from {shown(plain(least))} to {shown(plain(most))}"
        )
    return ids.astype(np.int32)


def _index(value: Any) -> int | None:
    """The integer that a value is; None for what is none, and for a bool, which is mostly a slip."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return None


def _several(name: str, values: Any, wanted: str) -> list[Any]:
    try:
        if isinstance(values, (str, bytes, bytearray, Mapping)):
            raise TypeError
        return list(values)
    except TypeError:
        raise InvalidRequest(f"{name}={shown(values)}: give {wanted}") from None
