"""What can be set about a worker, by name: what it serves, and every field of WorkerOptions. Each value is checked here for its type, whatever it came from."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable
from typing import Any, NamedTuple

from gpuworker.worker import WorkerOptions

SERVED = ("handler", "hf_encoder", "hf", "gguf")
"""What is served: one of these."""
MODEL: dict[str, type] = {"dtype": str, "kv_cache_bytes": int, "max_model_tokens": int, "prefix_caching": bool}
"""More about what is served, where that is no handler of the user's own."""
_WORDS: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class Setting(NamedTuple):
    """A value, and where it was set: "worker.toml:7", "GPUWORKER_WAKE", "--wake", "default"."""

    value: Any
    origin: str


def kind_of(hint: Any) -> type:
    """The first type of a field's hint that is not None's: what its text is converted to."""
    kind: type = next(kind for kind in (*typing.get_args(hint), hint) if kind is not type(None))
    return kind


OPTIONS: dict[str, type] = {name: kind_of(hint) for name, hint in typing.get_type_hints(WorkerOptions).items()}
"""The type of each field of WorkerOptions. (length_buckets and allowed_batch_sizes: str, but lists of integers too.)"""
LISTS = frozenset(field.name for field in dataclasses.fields(WorkerOptions) if "tuple" in str(field.type))
KEYS: dict[str, type] = {**dict.fromkeys(SERVED, str), **MODEL, **OPTIONS}
"""Everything that can be set, and its type."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name that `name` is most like; empty when it is like none."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")


def of_text(key: str, text: str) -> Any:
    """The value that an environment variable gives. Raises ValueError that says what to give."""
    kind = KEYS[key]
    if kind is bool:
        if text.lower() in _TRUTHS:
            return _TRUTHS[text.lower()]
    else:
        try:
            return kind(text)
        except ValueError:
            pass
    raise ValueError(f"{text!r}: give {_WORDS[kind]}")


def of_toml(key: str, value: Any) -> Any:
    """A value that a TOML file gives, if it is of the right type. Raises ValueError that says what to give."""
    kind = KEYS[key]
    if key in LISTS:
        if isinstance(value, list) and all(type(one) is int for one in value):
            return tuple(value)
        words = "a list of integers" + (' or "learn"' if key == "length_buckets" else "")
    else:
        words = _WORDS[kind]
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{key}={value!r}: give {words}")
