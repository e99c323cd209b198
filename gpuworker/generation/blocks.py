"""Whose the blocks of the KV cache are. Numbers only: the cache itself is the runner's.

Memory for keys and values is handed out in blocks of 16 tokens, on demand, so that a sequence wastes less than one block however long it may get
(PagedAttention: Kwon et al., SOSP 2023, arXiv 2309.06180; they found 16 best). A sequence's position p is in slot p % 16 of its block p // 16.

A full block may have a name, which stands for what is in it (see prefix.py). A named block that nobody holds is free like any other, but keeps its contents
until it is taken, so that whoever needs the same contents can have it back. Named blocks are taken last, the least recently used first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

TRASH_BLOCK = 0
"""Never handed out: where the padding of a captured batch writes to."""


class BlockPool:
    """`blocks` blocks of `block_tokens` tokens each; `usable` is one less, because of TRASH_BLOCK. ValueError if that leaves none."""

    def __init__(self, blocks: int, block_tokens: int = 16) -> None:
        if blocks < 2 or block_tokens < 1:
            raise ValueError(f"blocks={blocks}, block_tokens={block_tokens}: give at least 2 blocks (one is set aside) of at least 1 token")
        self.usable, self.block_tokens = blocks - 1, block_tokens
        self._holders = [0] * blocks
        self._unnamed = list(range(self.usable, 0, -1))  # free; a stack: the block released last is the likeliest to be in some processor's cache
        self._idle: dict[int, None] = {}  # free and named, the least recently used first
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._unnamed) + len(self._idle)

    @property
    def used(self) -> int:
        """How many somebody holds; one that is shared counts once."""
        return self.usable - self.free

    @property
    def cached(self) -> int:
        """How many of the free ones still have a name."""
        return len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """How many it takes to hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def holders(self, block: int) -> int:
        """How many hold it; 0: it is free."""
        return self._holders[block]

    def take(self, count: int) -> list[int]:
        """Free blocks, which the caller then holds and may write to. RuntimeError, and nothing is taken, if there are fewer: ask `free` first."""
        if count > self.free:
            raise RuntimeError(f"{count} blocks were asked for and {self.free} are free")
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._unnamed:
            block = self._unnamed.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self.forget(block)
        self._holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """The caller holds these too from now on, to read them. RuntimeError for one that is neither held nor named."""
        for block in blocks:
            if not self._holders[block]:
                if block not in self._idle:
                    raise RuntimeError(f"block {block} holds nothing that could be shared")
                del self._idle[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """The caller holds these no longer. In the order of the sequence: the last goes first, so that of a named prefix its beginning is kept longest, being
        of use to the most. RuntimeError for a block that nobody holds."""
        for block in reversed(blocks):
            if block <= TRASH_BLOCK or not self._holders[block]:
                raise RuntimeError(f"block {block} is released, and nobody holds it")
            self._holders[block] -= 1
            if not self._holders[block]:
                if block in self._name_of:
                    self._idle[block] = None
                else:
                    self._unnamed.append(block)

    def name(self, block: int, name: bytes) -> None:
        """From now on nobody writes to this block, and `find` finds it. Nothing happens if another block has that name: the one is as good as the other."""
        if not self._holders[block] or self._name_of.get(block, name) != name:
            raise RuntimeError(f"block {block} is free, or has another name")
        if self._block_of.setdefault(name, block) == block:
            self._name_of[block] = name

    def find(self, name: bytes) -> int | None:
        """The block of that name, whether somebody holds it or not."""
        return self._block_of.get(name)

    def forget(self, block: int) -> None:
        """Takes the block's name away, if it has one; who holds it goes on doing so."""
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]
            if block in self._idle:
                del self._idle[block]
                self._unnamed.append(block)

    def check(self) -> None:
        """RuntimeError unless every block is either free or held, each free one once, and names are one to one. Some 100 ns a block: for when there is nothing to
        do, and for tests."""
        free = {*self._unnamed, *self._idle}
        if len(free) != self.free or (free and not TRASH_BLOCK < min(free) <= max(free) <= self.usable):
            raise RuntimeError("a block is free twice, or is none of ours")
        if (
            any(map(self._holders.__getitem__, free))
            or self._holders.count(0) != len(free) + 1
            or self._holders[TRASH_BLOCK]
            or min(self._holders) < 0
        ):
            raise RuntimeError("a block is both free and held, or neither")
        if self._block_of != {name: block for block, name in self._name_of.items()} or not self._idle.keys() <= self._name_of.keys():
            raise RuntimeError("names and blocks do not agree")
        if not self._name_of.keys().isdisjoint(self._unnamed):
            raise RuntimeError("a named block is to be taken before its time")
