"""POST /v1/embeddings. A model for it answers each text (or its token ids) with one vector: an encoder of `gpuworker serve --hf-encoder`, or a handler of texts.

usage counts the tokens where they are made of the texts here; a handler that takes texts itself tells nobody of them, and 0 stands there.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from gpuworker import Declaration, UnsupportedPayload

from ..replies import encode
from .exchange import LONG_TEXT, Exchange
from .openai import BadField, OpenAI

MOST_INPUTS = 2048  # as OpenAI has it
_REFUSED: dict[str, tuple[Any, ...]] = {"dimensions": ()}
_IDS = "input_ids"
_TYPES = "token_type_ids"


class _Request(msgspec.Struct):
    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"


class Embeddings:
    """The endpoint. timeout_s: the longest that a request may take."""

    def __init__(self, openai: OpenAI, timeout_s: float) -> None:
        self._openai, self._timeout_s = openai, timeout_s

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/embeddings"""
        asked = await self._openai.parsed(exchange, _Request, _REFUSED)
        model = self._openai.model(asked.model)
        declaration = model.declaration()
        if declaration.kind == "generation":
            raise BadField("model", f"model {asked.model!r} generates text; it makes no embeddings")
        inputs = _inputs(asked.input)
        if sum(len(one) for one in inputs if isinstance(one, str)) > LONG_TEXT:
            requests = await asyncio.to_thread(_requests, inputs, declaration)
        else:
            requests = _requests(inputs, declaration)
        timeout_s = exchange.timeout_s(self._timeout_s)
        with exchange:
            answers = await model.answers(requests, timeout_s)
        tokens = sum(len(one[_IDS]) for one in requests if isinstance(one, dict))
        vectors = [_vector(answer, asked.encoding_format) for answer in answers]
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        await exchange.reply(200, encode({"object": "list", "data": data, "model": asked.model, "usage": usage}))


def _inputs(given: str | list[Any]) -> Sequence[str | list[int]]:
    """One for each vector."""
    if isinstance(given, str):
        return [given]
    kinds = {type(one) for one in given}
    if len(kinds) != 1:
        raise BadField("input", "give a text, token ids, or a list of either that is not empty")
    if kinds == {int}:
        return [given]
    if len(given) > MOST_INPUTS:
        raise BadField("input", f"{len(given):,} inputs; give at most {MOST_INPUTS:,} at a time")
    return given


def _requests(inputs: Sequence[str | list[int]], declaration: Declaration) -> list[Any]:
    return [_request(one, declaration) for one in inputs]


def _request(one: str | list[int], declaration: Declaration) -> Any:
    if isinstance(one, str):
        if not one:
            raise BadField("input", "an empty text")
        return declaration.tokens_of(one) if declaration.takes_text else one
    if _IDS not in declaration.inputs:
        raise BadField("input", "this model takes texts, and no token ids")
    if not one or min(one) < 0 or max(one) >= 1 << 31:
        raise BadField("input", "token ids are a list of integers that is not empty")
    ids = np.array(one, np.int64)
    return {_IDS: ids, _TYPES: np.zeros_like(ids)} if _TYPES in declaration.inputs else {_IDS: ids}


def _vector(answer: Any, encoding: str) -> Any:
    if isinstance(answer, dict) and len(answer) == 1:
        (answer,) = answer.values()
    try:
        vector = np.asarray(answer, np.float32)
    except (TypeError, ValueError):
        vector = np.empty((), np.float32)
    if vector.ndim != 1:
        raise UnsupportedPayload("the handler's answer is no vector")
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()
