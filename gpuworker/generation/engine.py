"""One step of the model for all sequences that take part: plan, compute, sample."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any, NamedTuple, Protocol

from gpuworker.generation.costs import Work
from gpuworker.generation.pacing import PrefillPace
from gpuworker.generation.scheduler import Scheduler
from gpuworker.generation.sequence import Chunk, Sequence

log = logging.getLogger("gpuworker")

SLOWDOWN = 1.7
"""Times by which a prompt that is computed may hold up those who decode, see pacing.py. What is wanted is 2 for 99 steps of 100: the rest is for errors."""


class Model(Protocol):
    """What computes chunks: see model.py."""

    def forward(self, chunks: list[Chunk]) -> Any:
        """Writes the keys and values of the chunks' tokens to their blocks. -> logits [rows, vocabulary] of those that are last, in their order."""
        ...


class Sampler(Protocol):
    """What picks tokens: see sampler.py."""

    def sample(self, logits: Any, rows: Rows[Any]) -> Rows[Any]:
        """One Sampled for each row."""
        ...


class Emitted(NamedTuple):
    """A sequence's next token; or that it has failed."""

    sequence: Sequence
    token: int
    logprob: float | None
    top: Rows[tuple[int, float]] | None
    error: object
    """None: it has not."""


class Engine:
    """Call `plan` and `run` while `is_busy`. For one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        model: Model,
        sampler: Sampler,
        row: type[Any],
        is_fatal: Callable[[Exception], bool],
        *,
        isolate_errors: bool = True,
        slowdown: float = SLOWDOWN,
    ) -> None:
        """row: what the sampler takes for each row: row(params, position, prompt ids, generated ids). slowdown: see pacing.py."""
        self._is_fatal, self._isolate_errors, self._began_ns = is_fatal, isolate_errors, 0
        self.prompt_tokens = 0
        """Computed for prompts, and again after preemptions."""
        self.scheduler, self._model, self._sampler, self._row = scheduler, model, sampler, row
        self._pace = PrefillPace(slowdown, scheduler.max_batch_tokens)
        self.planned: list[Chunk] = []
        """Of the step that is being computed, or was last."""

    @property
    def is_busy(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def plan(self) -> list[Chunk]:
        """What the next step computes; it has to be `run`."""
        self.planned = []
        self._began_ns = time.monotonic_ns()
        rows, row_keys, start = 0, 0, None
        for one in self.scheduler.running:
            known = len(one.tokens)
            if known - one.computed == 1:
                rows += 1
                row_keys += known
            elif start is None:
                start = one.computed
        self.scheduler.long_tokens = self._pace.tokens(Work(rows, row_keys), start or 0)
        self.planned = self.scheduler.plan()
        return self.planned

    def run(self) -> tuple[list[Emitted], list[Sequence]]:
        """Computes what was planned. -> what was sampled or has failed, and the sequences that have finished by it.

        Where the model raises, the step is made again in halves, until those at fault fail alone (isolate_errors; else all fail). Raises what `is_fatal` says is
        no sequence's fault.
        """
        scheduler, chunks = self.scheduler, self.planned
        emitted = self._compute(chunks)
        tokens = {one.sequence: one.token for one in emitted if one.error is None}
        decoding = sum([chunk.start >= chunk.sequence.prompt_tokens for chunk in chunks])
        in_all = sum([chunk.count for chunk in chunks])
        self.prompt_tokens += in_all - decoding
        self._pace.observe(time.monotonic_ns() - self._began_ns, _work(chunks))
        return emitted, scheduler.done(chunks, tokens)

    def _compute(self, chunks: list[Chunk]) -> list[Emitted]:
        try:
            logits = self._model.forward(chunks)
            last = [chunk.sequence for chunk in chunks if chunk.is_last]
            sampled = self._sampler.sample(logits, [self._row_of(one) for one in last]) if last else ()
        except Exception as error:
            if self._is_fatal(error):
                raise
            if len(chunks) > 1 and self._isolate_errors:  # keys and values that were written already are written again
                half = len(chunks) // 2
                return self._compute(chunks[:half]) + self._compute(chunks[half:])
            tickets = [chunk.sequence.ticket for chunk in chunks]
            log.error("a step of the model has failed for %d sequences", len(chunks), exc_info=error, extra={"tickets": tickets})
            return [self._failed(chunk.sequence, error) for chunk in chunks]
        emitted = []
        for sequence, found in zip(last, sampled, strict=True):
            if found.error is None:
                emitted.append(Emitted(sequence, found.token, found.logprob, found.top, None))
            else:
                emitted.append(self._failed(sequence, found.error))
        return emitted

    def _failed(self, sequence: Sequence, error: object) -> Emitted:
        self.scheduler.fail(sequence, error)
        return Emitted(sequence, -1, None, None, error)

    def _row_of(self, sequence: Sequence) -> Any:
        sampling = sequence.sampling
        if sampling.repetition_penalty == 1.0 and not sampling.presence_penalty and not sampling.frequency_penalty:
            return self._row(sampling, len(sequence.tokens), (), ())  # nobody looks at them, and copies of long ones take time
        return self._row(sampling, len(sequence.tokens), sequence.prompt, sequence.generated)


def _work(chunks: list[Chunk]) -> Work:
    ends = [chunk.start + 1 for chunk in chunks if chunk.count == 1]
    work = Work(len(ends), sum(ends))
    for chunk in chunks[len(ends) :]:  # those of one token are first
        work = work.with_chunk(chunk.start, chunk.count)
    return work
