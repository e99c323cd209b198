"""Which sequences the next step of the model works on, and on how many tokens of each.

Batches are formed for one step at a time, so that sequences join and leave between steps (iteration-level scheduling: Orca, Yu et al., OSDI 2022). Each step hands
tokens out so that every sequence's `computed` catches up with what is known of it, as in vLLM: see sequence.py. Blocks are taken when they are needed; when there
are none, the youngest sequence of the lowest priority gives its own back and later starts from the beginning (from all its tokens, not just its prompt).

Why it always goes on: the first of the running can take blocks from all others, and whatever was accepted fits alone; so the first gets at least one token
in every step until it has finished. Why decoding never stalls behind a long prompt: sequences that lack one token are served before those that lack more,
and max_batch_tokens >= max_running.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping

from gpuworker.errors import InvalidRequest
from gpuworker.generation.blocks import BlockPool
from gpuworker.generation.prefix import PrefixCache
from gpuworker.generation.sequence import Chunk, FinishReason, Sequence
from gpuworker.generation.stats import SchedulerStats
from gpuworker.generation.waiting import Waiting, by_key


class Scheduler:
    """Call `plan`, compute its chunks, call `done`, and again. All else may be called in between at any time, also while a step is being computed.

    max_batch_tokens: of one step. max_running: sequences that take part in steps. max_model_tokens: prompt and answer of one sequence. watermark_blocks: left
    free when a sequence is let in while others run, for these to grow into (None: one for each of them; with less, more is let in only to be preempted, and
    computed again). max_overtakes: see waiting.py. eos_ids: the model's own ends. prefix_caching, prefix_key: see prefix.py. ValueError if max_batch_tokens <
    max_running, or anything is less than it can be.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_model_tokens: int,
        watermark_blocks: int | None = None,
        max_overtakes: int = 8,
        eos_ids: Collection[int] = (),
        prefix_caching: bool = True,
        prefix_key: bytes = b"",
    ) -> None:
        if max_running < 1 or max_model_tokens < 1:
            raise ValueError(f"max_running={max_running}, max_model_tokens={max_model_tokens}: give at least 1")
        if max_overtakes < 0 or (watermark_blocks or 0) < 0:
            raise ValueError(f"max_overtakes={max_overtakes}, watermark_blocks={watermark_blocks}: give at least 0")
        if max_batch_tokens < max_running:
            raise ValueError(
                f"max_batch_tokens={max_batch_tokens} must be at least max_running={max_running}: every running sequence gets a token in every step"
            )
        self.pool, self.max_batch_tokens, self.max_running, self.max_model_tokens = pool, max_batch_tokens, max_running, max_model_tokens
        self.watermark_blocks = watermark_blocks
        self.waiting = Waiting(max_overtakes)
        self.running: list[Sequence] = []
        """In the order of their keys; the last is the first to be preempted."""
        self.long_tokens = max_batch_tokens
        """Most tokens of chunks longer than one, in a step that has others: see pacing.py. May be set between steps."""
        self._eos_ids = frozenset(eos_ids)
        self._prefix = PrefixCache(pool, prefix_key) if prefix_caching else None
        self._steps = self._batch_tokens = self._preemptions = self._prefix_hit_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """It waits from now on; or, if it may have no (more) tokens, it is finished at once, without any block.

        InvalidRequest for what could never be finished: an empty prompt, or more tokens than the model or the whole cache can hold.
        """
        if not sequence.prompt_tokens:
            raise InvalidRequest("the prompt is empty; give at least one token, e.g. the model's begin-of-text token")
        if sequence.max_tokens < 0:
            raise InvalidRequest(f"max_tokens={sequence.max_tokens}: give 0 or more")
        most = sequence.prompt_tokens + sequence.max_tokens
        asked = f"a prompt of {sequence.prompt_tokens:,} tokens with max_tokens={sequence.max_tokens:,} may need {most:,} tokens"
        if most > self.max_model_tokens:
            raise InvalidRequest(f"{asked}, and the model takes {self.max_model_tokens:,}; shorten the prompt or lower max_tokens")
        if self.pool.blocks_for(most) > self.pool.usable:
            capacity = self.pool.usable * self.pool.block_tokens
            raise InvalidRequest(
                f"{asked}, and the whole cache holds {capacity:,}; shorten the prompt, lower max_tokens, or give the worker a larger cache"
            )
        sequence.finish_reason = self._reason_to_finish(sequence)
        if not sequence.is_finished:
            self.waiting.add(sequence)

    def plan(self) -> list[Chunk]:
        """What the next step computes, chunks of one token first; nothing only if there is no sequence at all. Their blocks are taken. Nothing has been computed
        before `done` says so: a plan whose step failed is made again by calling this again."""
        before = self._preemptions
        chunks, left = self._go_on()
        if self._preemptions == before:
            self._let_in(chunks, left)
        chunks.sort(key=_is_long)
        return chunks

    def _go_on(self) -> tuple[list[Chunk], int]:
        """Chunks of those that run already, and how many tokens are left for others."""
        pool, size, left = self.pool, self.pool.block_tokens, self.max_batch_tokens
        one = [sequence for sequence in self.running if len(sequence.tokens) - sequence.computed == 1]
        more = [sequence for sequence in self.running if len(sequence.tokens) - sequence.computed > 1] if len(one) < len(self.running) else []
        chunks: list[Chunk] = []
        is_limited = False
        for sequence in one + more:
            if not sequence.blocks:
                continue  # preempted a moment ago
            start = sequence.computed
            if len(sequence.tokens) - start > 1 and one and not is_limited:
                left, is_limited = min(left, self.long_tokens), True
            count = min(len(sequence.tokens) - start, left)
            if not count:
                break
            if start + count > len(sequence.blocks) * size:
                needed = pool.blocks_for(start + count) - len(sequence.blocks)
                left += self._make_room(needed, sequence, chunks)
                if not sequence.blocks:
                    continue
                sequence.blocks += pool.take(needed)
            chunks.append(Chunk(sequence, start, count))
            left -= count
        if one and not is_limited:
            left = min(left, self.long_tokens)
        return chunks, left

    def _make_room(self, needed: int, sequence: Sequence, chunks: list[Chunk]) -> int:
        """Preempts, the youngest first, until so many blocks are free, or the sequence that needs them was the youngest itself. -> the tokens that
        were meant for those."""
        returned = 0
        while needed > self.pool.free and sequence.blocks:
            victim = self.running.pop()
            self._let_go(victim)
            self.waiting.add_preempted(victim)
            self._preemptions += 1
            returned += sum(chunk.count for chunk in chunks if chunk.sequence is victim)
            chunks[:] = [chunk for chunk in chunks if chunk.sequence is not victim]
        return returned

    def _let_in(self, chunks: list[Chunk], left: int) -> None:
        """Adds chunks of those that have waited, as far as there are tokens, and blocks for all that is known of them. (As tokens are left, those that run have
        the blocks for all that is known of them already.)"""
        if not self.waiting or not left or len(self.running) >= self.max_running:
            return
        pool = self.pool
        for sequence in self.waiting.candidates():
            found = self._prefix.find(sequence) if self._prefix else []
            needed = pool.blocks_for(len(sequence.tokens)) - sum([pool.holders(block) > 0 for block in found])
            if needed + self._spare() > pool.free:
                continue
            pool.share(found)
            sequence.computed = start = len(found) * pool.block_tokens
            count = min(len(sequence.tokens) - start, left)
            sequence.blocks = found + pool.take(pool.blocks_for(start + count) - len(found))
            self.waiting.let_in(sequence)
            insort(self.running, sequence, key=by_key)
            self._prefix_hit_tokens += start
            chunks.append(Chunk(sequence, start, count))
            left -= count
            if not left or len(self.running) == self.max_running:
                return

    def _spare(self) -> int:
        if not self.running:
            return 0
        return len(self.running) if self.watermark_blocks is None else self.watermark_blocks

    def done(self, chunks: Iterable[Chunk], sampled: Mapping[Sequence, int]) -> list[Sequence]:
        """These chunks of the last plan have been computed, and for each that `is_last` a token was sampled. -> the sequences that have finished by it, which hold
        no blocks any more. Chunks of sequences that were cancelled or failed in the meantime are passed over, whether they have a token or not. KeyError for a token
        that is lacking, RuntimeError for a chunk that is not of the last plan."""
        finished: list[Sequence] = []
        size, keep = self.pool.block_tokens, self._prefix and self._prefix.keep
        self._steps += 1
        for chunk in chunks:
            sequence, start, count = chunk.sequence, chunk.start, chunk.count
            if not sequence.blocks:
                continue
            if start != sequence.computed:
                raise RuntimeError(f"a chunk from {start} on, of {sequence}: not of the last plan")
            tokens, end = sequence.tokens, start + count
            is_last = end == len(tokens)
            token = sampled[sequence] if is_last else 0
            sequence.computed = end
            self._batch_tokens += count
            if keep and end // size > start // size:
                keep(sequence, start, end)
            if is_last:
                tokens.append(token)
                reason = self._reason_to_finish(sequence)
                if reason:
                    self._finish(sequence, reason)
                    finished.append(sequence)
        return finished

    def _reason_to_finish(self, sequence: Sequence) -> FinishReason | None:
        generated = len(sequence.tokens) - sequence.prompt_tokens
        if generated:
            last = sequence.tokens[-1]
            if last in sequence.stop_ids or (last in self._eos_ids and not sequence.ignore_eos):
                return "stop"
        return "length" if generated >= sequence.max_tokens else None

    def cancel(self, sequence: Sequence) -> bool:
        """Whoever asked for it is gone: its blocks are free at once. False if it had finished before.

        A step that is being computed may still write to them. That harms nobody: a later step, which may be another's, comes after that.
        """
        return self._finish(sequence, "cancelled")

    def fail(self, sequence: Sequence, error: object) -> bool:
        """As `cancel`, because of `error`, e.g. logits that are no numbers. What it has computed is not used again for others."""
        for block in sequence.blocks:
            self.pool.forget(block)
        if not self._finish(sequence, "error"):
            return False
        sequence.error = error
        return True

    def _finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        if sequence.is_finished:
            return False
        if sequence.blocks:
            self.running.remove(sequence)
            self._let_go(sequence)
        else:
            self.waiting.discard(sequence)
        sequence.finish_reason = reason
        return True

    def _let_go(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0

    def stats(self) -> SchedulerStats:
        """As of now."""
        pool = self.pool
        empty = sum([max(0, len(sequence.blocks) * pool.block_tokens - len(sequence.tokens)) for sequence in self.running])
        return SchedulerStats(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_used=pool.used,
            blocks_free=pool.free,
            blocks_cached=pool.cached,
            waste=empty / (pool.used * pool.block_tokens) if pool.used else 0.0,
            steps=self._steps,
            batch_tokens=self._batch_tokens,
            preemptions=self._preemptions,
            prefix_hit_tokens=self._prefix_hit_tokens,
        )

    def check(self) -> None:
        """RuntimeError unless the pool is whole and its blocks are held by those that run, and by nobody else. For when there is nothing to do, and for tests."""
        self.pool.check()
        held: dict[int, int] = {}
        for sequence in self.running:
            for block in sequence.blocks:
                held[block] = held.get(block, 0) + 1
            if not sequence.blocks or sequence.is_finished or not 0 <= sequence.computed <= len(sequence.blocks) * self.pool.block_tokens:
                raise RuntimeError(f"{sequence} runs, and should not")
        if len(held) != self.pool.used or any(self.pool.holders(block) != count for block, count in held.items()):
            raise RuntimeError("the pool and the running sequences do not agree on who holds what")
        for line in (self.running, list(self.waiting)):
            if [sequence.key for sequence in line] != sorted({sequence.key for sequence in line}):
                raise RuntimeError("sequences are not in order, or one is there twice")
        if any(sequence.blocks or sequence.computed or sequence.is_finished for sequence in self.waiting):
            raise RuntimeError("a sequence waits and should not")


def _is_long(chunk: Chunk) -> bool:
    return chunk.count > 1
