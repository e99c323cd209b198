"""A request for generated tokens, and the entries that its answer is made of, as they cross between client and owner. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np

from gpuworker.errors import InvalidRequest
from gpuworker.sampling import SamplingParams

NO_TOKEN = -1
"""In an entry's top_ids: there are no more that are possible."""
FINISH = ("", "stop", "length", "error")
"""gw_stream.finish: why a sequence has ended. Whoever cancels a request does not wait for that."""


class GenerationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is generated from `ids`, and how. stop_ids: end it, beside the model's own, which ignore_eos takes out of effect."""

    ids: Any
    """int32 [tokens]"""
    max_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    sampling: SamplingParams = SamplingParams()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0

    def to_payload(self) -> dict[str, Any]:
        """What crosses."""
        return {**msgspec.to_builtins(self, builtin_types=(np.ndarray,), str_keys=False), "ids": np.asarray(self.ids, np.int32)}

    @classmethod
    def from_payload(cls, payload: Any, most_tokens: int = 1 << 31, vocabulary: int = 1 << 31) -> GenerationRequest:
        """Checked: any client may have written it. most_tokens: that the worker takes, so that nobody is held up by one that is absurdly large. Raises
        InvalidRequest."""
        if not isinstance(payload, dict):
            raise InvalidRequest(f"this worker generates: call client.generate or client.stream; it got a {type(payload).__name__}")
        ids = payload.get("ids")
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype != np.int32:
            raise InvalidRequest("ids: give token ids as an int32 array of one dimension")
        if ids.size > most_tokens:
            raise InvalidRequest(f"a prompt of {ids.size:,} tokens, and this worker takes {most_tokens:,} with the answer")
        sampling = payload.get("sampling")
        biases = sampling.get("logit_bias") if isinstance(sampling, dict) else None
        for name, found in (("stop_ids", payload.get("stop_ids")), ("logit_bias", biases)):
            if isinstance(found, (list, tuple, dict)) and len(found) > vocabulary:
                raise InvalidRequest(f"{name}: {len(found):,} of them, and the model has {vocabulary:,} tokens")
        try:
            return msgspec.convert({**payload, "ids": ids.tolist()}, cls)
        except (msgspec.ValidationError, ValueError, TypeError, LookupError) as error:
            raise InvalidRequest(f"this is no request to generate: {error}") from None

    @property
    def entry(self) -> np.dtype[Any]:
        """Of the answer's entries."""
        return entry_dtype(self.sampling.logprobs)


@lru_cache(64)
def entry_dtype(logprobs: int) -> np.dtype[Any]:
    """One token of an answer: with logprobs >= 0 its own logarithmic probability, and the `logprobs` likeliest tokens with theirs."""
    fields: list[Any] = [("token", "<i4")]
    if logprobs >= 0:
        fields += [("logprob", "<f4")]
    if logprobs > 0:
        fields += [("top_ids", "<i4", (logprobs,)), ("top_logprobs", "<f4", (logprobs,))]
    return np.dtype(fields)


def entry_bytes(dtype: np.dtype[Any], token: int, logprob: float | None, top: Sequence[tuple[int, float]] | None) -> bytes:
    """One entry."""
    made = np.zeros((), dtype)
    if "top_ids" in (dtype.names or ()):
        made["top_ids"] = NO_TOKEN
    made["token"] = token
    if logprob is not None and "logprob" in (dtype.names or ()):
        made["logprob"] = logprob
    if top and "top_ids" in (dtype.names or ()):
        made["top_ids"][: len(top)] = [one for one, _ in top]
        made["top_logprobs"][: len(top)] = [value for _, value in top]
    return made.tobytes()
