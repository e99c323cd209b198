"""One step of the model for all sequences that take part: plan, compute, sample."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any, NamedTuple, Protocol

from gpuworker.generation.scheduler import Scheduler
from gpuworker.generation.sequence import Chunk, Sequence


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

    def __init__(self, scheduler: Scheduler, model: Model, sampler: Sampler, row: type[Any]) -> None:
        """row: what the sampler takes for each row: row(params, position, prompt ids, generated ids)."""
        self.scheduler, self._model, self._sampler, self._row = scheduler, model, sampler, row
        self.planned: list[Chunk] = []
        """Of the step that is being computed, or was last."""

    @property
    def is_busy(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> tuple[list[Emitted], list[Sequence]]:
        """-> what was sampled, and the sequences that have finished by it. Raises what the model raises; then nothing has happened."""
        scheduler = self.scheduler
        self.planned = chunks = scheduler.plan()
        logits = self._model.forward(chunks)
        last = [chunk.sequence for chunk in chunks if chunk.is_last]
        emitted: list[Emitted] = []
        if last:
            rows = [self._row(one.sampling, len(one.tokens), one.prompt, one.generated) for one in last]
            for sequence, found in zip(last, self._sampler.sample(logits, rows), strict=True):
                emitted.append(Emitted(sequence, found.token, found.logprob, found.top, found.error))
                if found.error is not None:
                    scheduler.fail(sequence, found.error)
        tokens = {one.sequence: one.token for one in emitted if one.error is None}
        return emitted, scheduler.done(chunks, tokens)

    def fail_planned(self, error: object) -> list[Sequence]:
        """After a step that cannot be made. -> the sequences that took part in it; they have failed."""
        failed = []
        for chunk in self.planned:
            if self.scheduler.fail(chunk.sequence, error):
                failed.append(chunk.sequence)
        return failed
