"""What is asked of a worker that generates: the user's words, and what they become for one worker."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gpuworker._native import lib
from gpuworker.client import chat, vocabulary
from gpuworker.client.arguments import integer, plain, prompt_ids, strings, token_ids
from gpuworker.client.contract import GenerationContract
from gpuworker.client.terms import MAX_PRIORITY
from gpuworker.client.text import Detokenizer
from gpuworker.errors import InvalidRequest
from gpuworker.generating import GenerationRequest, entry_dtype
from gpuworker.sampling import MAX_LOGPROBS, SamplingParams, shown


class Order(NamedTuple):
    """One request, checked, and what its answer is read with."""

    payload: dict[str, Any]
    prompt_tokens: int
    max_tokens: int
    entry: np.dtype[Any]
    vocabulary: int
    ending_ids: frozenset[int]
    """Tokens that end the answer, and have no text."""
    stops: tuple[str, ...]
    detokenizer: Detokenizer | None
    """None: the model has no tokenizer, so the answer has no text."""


class Wish:
    """The arguments of `Client.generate`, checked as far as no worker is needed for it; see there. Raises InvalidRequest."""

    def __init__(
        self,
        prompt: Any,
        *,
        max_tokens: int | None,
        stop: str | Iterable[str] | None,
        stop_ids: Iterable[int],
        ignore_eos: bool,
        logprobs: int | None,
        seed: int | None,
        priority: int,
        **sampling: Any,
    ) -> None:
        """sampling: the other fields of SamplingParams."""
        self._prompt, self._ignore_eos = prompt, ignore_eos
        self._max_tokens = None if max_tokens is None else integer("max_tokens", max_tokens, 0, 1 << 30)
        self._priority = integer("priority", priority, 0, MAX_PRIORITY)
        self._stop_ids, self._stops = token_ids("stop_ids", stop_ids), strings("stop", stop)
        if not isinstance(ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos={shown(ignore_eos)}: give True or False")
        if logprobs is not None:
            sampling["logprobs"] = integer("logprobs", logprobs, 0, MAX_LOGPROBS, ", or None")
        sampling = {name: plain(value) for name, value in sampling.items()}
        seed = plain(seed)
        try:
            self._sampling = SamplingParams(seed=seed, **sampling)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        if seed is None and not self._sampling.is_greedy:  # drawn here, so that an owner that starts again goes on with the same tokens
            seed = int.from_bytes(os.urandom(7), "little")
        self._seed = seed
        self._read: tuple[GenerationContract, vocabulary.Vocabulary | None, Any] | None = None

    def order(self, contract: GenerationContract, response_bytes: int, sample: int = 0) -> Order:
        """For one worker; sample: which of several. Raises InvalidRequest, and what reading the model's tokenizer or template raises."""
        if self._priority and contract.priorities is False:
            raise InvalidRequest("priority: this worker knows none; start it with the option priorities")
        words, ids = self._ids(contract)
        sampling = self._sampling
        entry = entry_dtype(sampling.logprobs)
        max_tokens = self._max_tokens
        if max_tokens is None:  # a prompt that leaves nothing is refused, by the numbers
            max_tokens = max(min(contract.max_model_tokens - len(ids), _room(response_bytes, entry.itemsize)), 1)
        total = len(ids) + max_tokens
        if total > contract.max_model_tokens:
            raise InvalidRequest(
                f"a prompt of {len(ids):,} tokens and max_tokens={max_tokens:,} are {total:,}, and this worker takes {contract.max_model_tokens:,} together"
            )
        for name, known in (("stop_ids", self._stop_ids), ("logit_bias", sampling.logit_bias or ())):
            if any(token >= contract.vocabulary for token in known):
                raise InvalidRequest(f"{name}: this model's tokens go from 0 to {contract.vocabulary - 1:,}")
        needed = lib.gw_stream_bytes(max_tokens, entry.itemsize)
        if needed > response_bytes:
            raise InvalidRequest(
                f"max_tokens={max_tokens:,}: an answer of so many tokens takes {needed:,} bytes, and this worker has room for {response_bytes:,}; "
                "ask for fewer, or start it with a larger max_response_bytes"
            )
        if self._seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=(self._seed + sample) % (1 << 64) if sample else self._seed)
        request = GenerationRequest(
            ids, max_tokens=max_tokens, sampling=sampling, stop_ids=self._stop_ids, ignore_eos=self._ignore_eos, priority=self._priority
        )
        ending_ids = frozenset(self._stop_ids) | frozenset(() if self._ignore_eos else contract.eos_ids)
        detokenizer = words.detokenizer() if words is not None else None
        return Order(request.to_payload(), len(ids), max_tokens, entry, contract.vocabulary, ending_ids, self._stops, detokenizer)

    def _ids(self, contract: GenerationContract) -> tuple[vocabulary.Vocabulary | None, Any]:
        """-> (what turns tokens into text, the prompt's int32 ids); made once for all samples."""
        if self._read is None or self._read[0] is not contract:
            prompt = self._prompt
            is_chat = isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
            needs_words = isinstance(prompt, str) or is_chat or bool(self._stops)
            has_words = needs_words or os.path.exists(os.path.join(contract.directory, vocabulary.FILE))
            words = vocabulary.load(contract.directory) if has_words else None
            if words is not None and is_chat:
                prompt = words.encode(chat.render(contract.directory, prompt), add_special_tokens=False)  # the template has them
            elif words is not None and isinstance(prompt, str):
                prompt = words.encode(prompt)
            self._read = contract, words, prompt_ids(prompt, contract.vocabulary)
        return self._read[1:]


def _room(response_bytes: int, entry_bytes: int) -> int:
    """The most tokens that an answer has room for."""
    most = max(response_bytes // entry_bytes, 0)
    beyond: int = max(lib.gw_stream_bytes(most, entry_bytes) - response_bytes, 0)
    return max(most - -(-beyond // entry_bytes), 0)
