"""One step of the model for all sequences that take part: plan, compute, sample."""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from typing import Any, NamedTuple, Protocol

from gpuworker.generation.pacing import PrefillPace
from gpuworker.generation.scheduler import Scheduler
from gpuworker.generation.sequence import Chunk, Sequence

SLOWDOWN = 2.0
"""Times by which a prompt that is computed may hold up those who decode, see pacing.py."""


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
    error: str | None


class Engine:
    """Call `step` while `is_busy`. For one thread."""

    def __init__(self, scheduler: Scheduler, model: Model, sampler: Sampler, row: type[Any], slowdown: float = SLOWDOWN) -> None:
        """row: what the sampler takes for each row: row(params, position, prompt ids, generated ids). slowdown: see pacing.py."""
        self.scheduler, self._model, self._sampler, self._row = scheduler, model, sampler, row
        self._pace = PrefillPace(slowdown, scheduler.max_batch_tokens)
        self.planned: list[Chunk] = []
        """Of the step that is being computed, or was last."""

    @property
    def is_busy(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> tuple[list[Emitted], list[Sequence]]:
        """-> what was sampled, and the sequences that have finished by it. Raises what the model raises; then nothing has happened."""
        scheduler, began_ns = self.scheduler, time.monotonic_ns()
        self.planned = chunks = scheduler.plan()
        logits = self._model.forward(chunks)
        last = [chunk.sequence for chunk in chunks if chunk.is_last]
        emitted: list[Emitted] = []
        if last:
            rows = [self._row_of(one) for one in last]
            for sequence, found in zip(last, self._sampler.sample(logits, rows), strict=True):
                emitted.append(Emitted(sequence, found.token, found.logprob, found.top, found.error))
                if found.error is not None:
                    scheduler.fail(sequence, found.error)
        tokens = {one.sequence: one.token for one in emitted if one.error is None}
        decoding = sum([chunk.count == 1 for chunk in chunks])
        self._pace.observe(time.monotonic_ns() - began_ns, decoding, sum([chunk.count for chunk in chunks]) - decoding)
        scheduler.long_tokens = self._pace.tokens
        return emitted, scheduler.done(chunks, tokens)

    def _row_of(self, sequence: Sequence) -> Any:
        sampling = sequence.sampling
        if sampling.repetition_penalty == 1.0 and not sampling.presence_penalty and not sampling.frequency_penalty:
            return self._row(sampling, len(sequence.tokens), (), ())  # nobody looks at them, and copies of long ones take time
        return self._row(sampling, len(sequence.tokens), sequence.prompt, sequence.generated)

    def fail_planned(self, error: object) -> list[Sequence]:
        """After a step that cannot be made. -> the sequences that took part in it; they have failed."""
        failed = []
        for chunk in self.planned:
            if self.scheduler.fail(chunk.sequence, error):
                failed.append(chunk.sequence)
        return failed
