"""How much of a prompt is computed in a step in which others get their next token: so that these do not have to wait for it."""

from __future__ import annotations

from gpuworker.generation.costs import StepCost, Work

LEAST_TOKENS = 4
"""Of a chunk, whatever it costs."""
FIRST_TOKENS = 16
"""The first chunk beside others is no longer, whatever seems to be known."""
GROWTH = 2
"""No chunk is more than so many times longer than the one before it, so that a wrong idea of its cost does harm only once."""
MOST_MIXED_STEPS = 8
"""Then there is one without prompts, to see what such a step takes by now: steps with prompts do not tell."""
CAUTIOUS_GROWTH = 1.25
"""The same where chunks grow although they are too expensive."""


class PrefillPace:
    """Limits the prompt's share of a step so that the step takes no more than `slowdown` times as long as it would without.

    What tokens cost depends on the model, the device, and how far the prompt has come, as each looks at all before it: see costs.py. Where that cannot be kept, as
    the chunk takes too long however short it is (it has to read the keys of all tokens before it; a GPU makes such steps without CUDA graphs), chunks become as long
    as it takes for half of their cost to be for their tokens, as far as the two are told apart; LEAST_TOKENS at least, so that a prompt always gets on.
    A step without sequences that decode has no limit.
    """

    def __init__(self, slowdown: float, most_tokens: int) -> None:
        self._slowdown, self._most = slowdown, most_tokens
        self._cost = StepCost()
        self._last_tokens, self._mixed_steps = 0, MOST_MIXED_STEPS

    def tokens(self, others: Work, start: int) -> int:
        """Most tokens of prompts in a step that computes `others` beside; 0: none in this one. start: where the first prompt's next chunk begins."""
        if not others.rows or not self._cost.is_known:
            return self._most
        if self._mixed_steps >= MOST_MIXED_STEPS:
            return 0
        fitting, worthwhile = self._cost.chunk(start, (self._slowdown - 1) * self._cost.ns(others))
        if fitting >= LEAST_TOKENS:
            return int(min(self._most, fitting, max(FIRST_TOKENS, GROWTH * self._last_tokens)))
        wanted = 0.0 if fitting else min(worthwhile, CAUTIOUS_GROWTH * self._last_tokens + 1)
        return int(min(self._most, max(LEAST_TOKENS, wanted)))

    def observe(self, step_ns: int, work: Work) -> None:
        """A step took that long."""
        self._cost.observe(step_ns, work)
        if work.rows and work.tokens:
            self._last_tokens = work.tokens
            self._mixed_steps += 1
        elif work.rows:
            self._mixed_steps = 0
