"""What a worker has declared of its requests, as frontends see it: a request is made ready and checked before it takes a slot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpuworker.client.tokenizer import Tokenizer
from gpuworker.errors import InvalidRequest
from gpuworker.tensors import Signature


class GenerationContract:
    """Of a worker that generates: from the part "generation" of its contract.

    directory: of the model, where its tokenizer is. eos_ids: tokens that end an answer. vocabulary: how many tokens there are. max_model_tokens: of one prompt and
    its answer. priorities: whether requests may have some; None where it does not say. Raises TypeError, ValueError or KeyError for nonsense.
    """

    uses_lengths = takes_text = False

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.directory: str = entry["directory"]
        self.eos_ids: list[int] = entry["eos_ids"]
        self.vocabulary: int = entry["vocabulary"]
        self.max_model_tokens: int = entry["max_model_tokens"]
        self.priorities: bool | None = entry.get("priorities")
        if (
            type(self.directory) is not str
            or type(self.eos_ids) is not list
            or type(self.priorities) not in (bool, type(None))
            or "\0" in self.directory
        ):
            raise TypeError("a generation's directory is a path, its eos_ids a list, and its priorities a bool")
        numbers = (self.vocabulary, self.max_model_tokens, *self.eos_ids)
        if not all(type(number) is int and 0 <= number < 1 << 31 for number in numbers):
            raise TypeError("a generation's vocabulary, max_model_tokens and eos_ids are counts and token ids")

    def prepare(self, request: Any) -> tuple[Any, int]:
        """Raises InvalidRequest: requests of this kind are made by `Client.generate` and `Client.stream`."""
        raise InvalidRequest(
            "this worker generates: call client.generate(prompt, ...) or client.stream(prompt, ...) in place of submit, enqueue and map"
        )


class Contract:
    """From the part "contract" of a worker's info: a signature, and optionally "tokenizer" (what `Tokenizer` takes) and "uses_lengths".

    `uses_lengths`: whether the worker batches by length; None where it does not say. Raises TypeError, ValueError or KeyError for nonsense."""

    def __init__(self, info_contract: Mapping[str, Any]) -> None:
        self.signature = Signature.from_dict(info_contract)
        entry, uses_lengths = info_contract.get("tokenizer"), info_contract.get("uses_lengths")
        if not isinstance(entry, (dict, type(None))) or not isinstance(uses_lengths, (bool, type(None))):
            raise TypeError("a contract's tokenizer is a dict, and uses_lengths a bool")
        self.uses_lengths: bool | None = uses_lengths
        self._tokenize = None if entry is None else Tokenizer(entry)
        self.takes_text = entry is not None
        self._has_length = bool(self.signature.dims)
        self._check = self.signature.check

    @classmethod
    def parse(cls, info: bytes) -> Contract | GenerationContract | None:
        """From a worker's info. None where that has no contract, or is nonsense: any frontend can write there, and we may read while the owner writes. Then
        requests go as they are, and the owner judges them."""
        try:
            found = json.loads(info or b"{}")["contract"]
            return GenerationContract(found["generation"]) if "generation" in found else cls(found)
        except (ValueError, RecursionError, TypeError, KeyError):
            return None

    def prepare(self, request: Any) -> tuple[Any, int]:
        """-> (what to send, its length: the extent of the first named dimension, 0 where there is none). Raises InvalidRequest, and what Tokenizer does."""
        if self._tokenize is not None and isinstance(request, str):
            request = self._tokenize(request)
        payload, extents = self._check(request)
        return payload, extents[0] if self._has_length else 0
