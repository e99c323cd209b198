"""What a worker has declared of its requests, as frontends see it: a request is made ready and checked before it takes a slot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpuworker.client.tokenizer import Tokenizer
from gpuworker.tensors import Signature


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
    def parse(cls, info: bytes) -> Contract | None:
        """From a worker's info. None where that has no contract, or is nonsense: any frontend can write there, and we may read while the owner writes. Then
        requests go as they are, and the owner judges them."""
        try:
            return cls(json.loads(info or b"{}")["contract"])
        except (ValueError, RecursionError, TypeError, KeyError):
            return None

    def prepare(self, request: Any) -> tuple[Any, int]:
        """-> (what to send, its length: the extent of the first named dimension, 0 where there is none). Raises InvalidRequest, and what Tokenizer does."""
        if self._tokenize is not None and isinstance(request, str):
            request = self._tokenize(request)
        payload, extents = self._check(request)
        return payload, extents[0] if self._has_length else 0
