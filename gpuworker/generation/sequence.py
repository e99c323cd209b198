"""A request that is being generated, and what a step does for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Sequence:
    """A prompt and what has been generated from it so far.

    Two numbers say how far it is, and there are no phases (the idea of vLLM's num_computed_tokens): `len(tokens)` is what is known, `computed` is how many of them
    have their keys and values in `blocks`. A step lets `computed` catch up; when it has, there is one more token. The first chunk of a prompt, its last, a decode
    step, a prefix that was found in the cache and a start from the beginning after a preemption are all the same thing.

    ticket: the request's. prompt, generated: token ids; `generated` is what an owner before this one has sampled already. max_tokens: how many it may have generated
    in all. stop_ids: end it, beside the model's own, which `ignore_eos` takes out of effect. priority: higher goes first. arrival_ns: CLOCK_MONOTONIC. sampling: the
    sampler's, not looked at here.
    """

    __slots__ = (
        "arrival_ns",
        "blocks",
        "computed",
        "error",
        "finish_reason",
        "ignore_eos",
        "max_tokens",
        "names",
        "overtaken",
        "priority",
        "prompt_tokens",
        "sampling",
        "stop_ids",
        "ticket",
        "tokens",
    )

    def __init__(
        self,
        ticket: int,
        prompt: Iterable[int],
        *,
        max_tokens: int,
        generated: Iterable[int] = (),
        stop_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        priority: int = 0,
        arrival_ns: int = 0,
        sampling: Any = None,
    ) -> None:
        self.ticket, self.max_tokens, self.priority, self.arrival_ns = ticket, max_tokens, priority, arrival_ns
        self.stop_ids, self.ignore_eos, self.sampling = frozenset(stop_ids), ignore_eos, sampling
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.tokens += generated
        self.computed = 0
        self.blocks: list[int] = []
        self.names: list[bytes] = []
        """Of its first full blocks, as far as somebody has asked (see prefix.py)."""
        self.overtaken = 0
        """How many that came later were let in before it (see waiting.py)."""
        self.finish_reason: FinishReason | None = None
        self.error: object = None
        """With finish_reason "error": what it was."""

    def again(self) -> Sequence:
        """The same as far as it has come, to be computed from the beginning."""
        return Sequence(
            self.ticket, self.prompt, max_tokens=self.max_tokens, generated=self.generated, stop_ids=self.stop_ids, ignore_eos=self.ignore_eos,
            priority=self.priority, arrival_ns=self.arrival_ns, sampling=self.sampling,
        )  # fmt: skip

    @property
    def key(self) -> tuple[int, int, int]:
        """Who goes first: the higher priority, then the earlier."""
        return -self.priority, self.arrival_ns, self.ticket

    @property
    def prompt(self) -> list[int]:
        """The ids it began with."""
        return self.tokens[: self.prompt_tokens]

    @property
    def generated(self) -> list[int]:
        """The ids sampled so far; with finish_reason "stop" the last one is the id that ended it."""
        return self.tokens[self.prompt_tokens :]

    @property
    def missing(self) -> int:
        """How many known tokens have not been computed."""
        return len(self.tokens) - self.computed

    @property
    def is_running(self) -> bool:
        """It takes part in steps; else it waits, or has finished."""
        return bool(self.blocks)

    @property
    def is_finished(self) -> bool:
        """Nothing more will come."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        state = self.finish_reason or ("running" if self.is_running else "waiting")
        return f"<Sequence {self.ticket}: {state}, {self.prompt_tokens} + {len(self.tokens) - self.prompt_tokens} of {self.max_tokens}, {self.computed} computed>"


@dataclass(eq=False, slots=True)
class Chunk:
    """In this step the tokens of `sequence` from position `start` on, `count` of them, are computed, and their keys and values written to its blocks."""

    sequence: Sequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """After it everything known has been computed, so a token is sampled. Holds from `Scheduler.plan` to `done`, which appends the token."""
        return self.start + self.count == len(self.sequence.tokens)
