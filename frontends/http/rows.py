"""Between the tensors of one HTTP request and the requests to a worker: the first dimension counts these. Their answers are put together again likewise.

What becomes of inputs:
- a worker that has declared its arrays gets them by name; one that has declared a single bare array gets that, called "input";
- a worker that takes text (an encoder) gets a str for each element of a single input of BYTES [n], whatever its name;
- a worker that has declared nothing gets a bare value for an input called "input", and a dict of them for other names. Rows of BYTES are str from JSON, bytes
  from binary data, or str from there too with the input's parameter "content_type": "str".

An answer is the output "output", or several of them where it is a dict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuworker import Declaration, InvalidRequest

from .exchange import LONG_TEXT

MOST_ROWS = 4096
BARE, ANSWER = "input", "output"


def requests_of(declaration: Declaration, inputs: Mapping[str, Any]) -> list[Any]:
    """What to submit, one for each row. inputs: arrays or lists by name. Raises InvalidRequest; what of a request does not fit the declaration, the client says."""
    if declaration.kind == "generation":
        raise InvalidRequest("this model generates text: use /v1/completions or /v1/chat/completions")
    if not inputs:
        raise InvalidRequest("there are no inputs")
    count = len(next(iter(inputs.values())))
    if len(inputs) > 1 and any(len(one) != count for one in inputs.values()):
        raise InvalidRequest(f"the inputs differ in their first extent: {', '.join(f'{name!r:.100} has {len(one)}' for name, one in inputs.items())}")
    if not 1 <= count <= MOST_ROWS:
        raise InvalidRequest(f"a batch of {count:,}: send from 1 to {MOST_ROWS:,} at a time")
    if len(inputs) == 1:
        ((name, column),) = inputs.items()
        if declaration.takes_text and isinstance(column, list):
            return [_as_text(one) for one in column]
        if declaration.single_input or (declaration.kind == "values" and name == BARE):
            if name != BARE:
                raise InvalidRequest(f"this model has one input, {BARE!r}, and not {name!r:.100}")
            return list(column)
    elif declaration.single_input:
        raise InvalidRequest(f"this model has one input, {BARE!r}")
    return [dict(zip(inputs, row, strict=True)) for row in zip(*inputs.values(), strict=True)]


async def tokenised(declaration: Declaration, requests: list[Any]) -> list[Any]:
    """The same; long texts to an encoder as tokens, which are made in a thread."""
    if not declaration.takes_text or sum(len(one) for one in requests if isinstance(one, str)) <= LONG_TEXT:
        return requests
    return await asyncio.to_thread(lambda: [declaration.tokens_of(one) if isinstance(one, str) else one for one in requests])


def outputs_of(answers: Sequence[Any], wanted: Sequence[str] | None) -> dict[str, Any]:
    """Arrays, or lists of str or bytes, by name. wanted: which, in what order; None for all. Raises InvalidRequest for an output that there is not, and where
    answers cannot be put together; ValueError for answers that are no tensors."""
    first = answers[0]
    if isinstance(first, dict):
        if not all(isinstance(one, dict) and one.keys() == first.keys() for one in answers):
            raise ValueError("answers that have other outputs than one another")
        columns = {str(name): [one[name] for one in answers] for name in first}
    else:
        columns = {ANSWER: list(answers)}
    names = list(columns) if wanted is None else wanted
    for name in names:
        if name not in columns:
            raise InvalidRequest(f"there is no output {name!r:.100}; there are {', '.join(map(repr, columns))}")
    return {name: _together(name, columns[name]) for name in names}


def _together(name: str, rows: list[Any]) -> Any:
    if isinstance(rows[0], (str, bytes)):
        if not all(isinstance(one, (str, bytes)) for one in rows):
            raise ValueError(f"output {name!r}: answers of different kinds")
        return rows
    if len(rows) == 1:
        array = _array(rows[0])[None]
    else:
        arrays = [_array(one) for one in rows]
        if any(one.shape != arrays[0].shape for one in arrays):
            raise InvalidRequest(f"output {name!r}: the answers differ in shape, so they are no tensor together; send these requests one by one")
        array = np.stack(arrays)
    if array.dtype.kind not in "biufSU":
        raise ValueError(f"output {name!r}: an answer of {type(rows[0]).__name__} is no tensor")
    return array


def _array(row: Any) -> Any:
    array = np.asarray(row)
    if array.dtype.kind in "SU" and isinstance(row, (list, tuple)) and not all(isinstance(one, (str, bytes)) for one in row):
        raise ValueError("a list of texts and other things")
    return array


def _as_text(item: Any) -> str:
    if isinstance(item, str):
        return item
    try:
        if isinstance(item, bytes):
            return item.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("a text that is no UTF-8") from None
    raise InvalidRequest("texts are BYTES of shape [n]")
