"""How much of a prompt is computed in a step in which others get their next token: so that these do not have to wait for it."""

from __future__ import annotations

LEAST_TOKENS = 4
WEIGHT = 8
"""The newest step counts for one in so many."""
GROWTH = 1.25


class PrefillPace:
    """Limits the prompt's share of a step so that the step takes no more than `slowdown` times as long as one without it.

    What a prompt's token costs depends on the model, the device, and how far the prompt has come: so the limit follows what steps take. It halves when one took
    too long, and grows by a quarter when it took clearly less (as TCP's window does: Chiu and Jain, 1989). A step without sequences that decode has no limit.
    """

    def __init__(self, slowdown: float, most_tokens: int) -> None:
        self._slowdown, self._most = slowdown, most_tokens
        self._decode_ns = 0
        self.tokens = most_tokens
        """Most prompt tokens in a step with others."""

    def observe(self, step_ns: int, decoding: int, prompt_tokens: int) -> None:
        """A step took that long: `decoding` sequences got a token each, and so many tokens of prompts were computed beside them."""
        if not decoding:
            return
        if not prompt_tokens:
            self._decode_ns += (step_ns - self._decode_ns) // (WEIGHT if self._decode_ns else 1)
        elif self._decode_ns:
            allowed_ns = self._slowdown * self._decode_ns
            if step_ns > allowed_ns:
                self.tokens = max(LEAST_TOKENS, min(self.tokens, prompt_tokens) // 2)
            elif step_ns * GROWTH < allowed_ns and prompt_tokens >= self.tokens:
                self.tokens = min(self._most, int(self.tokens * GROWTH) + 1)
