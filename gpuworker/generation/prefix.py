"""Prefix caching: what two sequences have in common at their beginning is computed once.

Only full blocks are shared. A block's name is a hash of the name of the block before it and of its own token ids; the first starts from a hash of `key`. So a
name stands for all tokens up to the block's end, which is all that its keys and values depend on besides the model. That is exact as long as no two different
beginnings have the same name. Names are 16 bytes of BLAKE2b over a fixed-size input: by chance two of n blocks agree with a probability of n² / 2^129, which is
1e-21 for the n = 1e9 of 16 thousand million tokens, and to bring it about on purpose takes some 2^64 hashes. Nothing else is compared.
(As vLLM does it; a radix tree as in SGLang, Zheng et al. 2024, finds the same full blocks.)
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from gpuworker.generation.blocks import BlockPool
from gpuworker.generation.sequence import Sequence

NAME_BYTES = 16


class PrefixCache:
    """Finds and names blocks of `pool`. key: what keys and values depend on besides the tokens, e.g. the model's name and an adapter's."""

    def __init__(self, pool: BlockPool, key: bytes = b"") -> None:
        self._pool = pool
        self._root = blake2b(key, digest_size=NAME_BYTES).digest()

    def find(self, sequence: Sequence) -> list[int]:
        """The blocks that hold the longest known beginning of its tokens, for `BlockPool.share`. At least one token is left to be computed, or there would be
        nothing to sample from; as it is in a later block, these are never written to."""
        found: list[int] = []
        for i in range((len(sequence.tokens) - 1) // self._pool.block_tokens):
            block = self._pool.find(self._name(sequence, i))
            if block is None:
                break
            found.append(block)
        return found

    def keep(self, sequence: Sequence, start: int, end: int) -> None:
        """Its tokens from `start` to `end` have just been computed: names the blocks which are full now."""
        size = self._pool.block_tokens
        for i in range(start // size, end // size):
            self._pool.name(sequence.blocks[i], self._name(sequence, i))

    def _name(self, sequence: Sequence, i: int) -> bytes:
        names, size = sequence.names, self._pool.block_tokens
        while len(names) <= i:
            at = len(names) * size
            ids = array("q", sequence.tokens[at : at + size]).tobytes()
            names.append(blake2b((names[-1] if names else self._root) + ids, digest_size=NAME_BYTES).digest())
        return names[i]
