"""How much of a prompt is computed in a step in which others get their next token: so that these do not have to wait for it."""

from __future__ import annotations

LEAST_TOKENS = 4
FIRST_TOKENS = 64
"""While nothing is known of what a prompt's token costs."""
WEIGHT = 8
"""The newest step counts for one in so many."""
WEIGHT_TOKENS = 32
"""A step with so many prompt tokens counts as much as all that was known of their cost before."""


class PrefillPace:
    """Limits the prompt's share of a step so that the step takes no more than `slowdown` times as long as one without it.

    What a prompt's token costs depends on the model, the device, and how far the prompt has come: it is what the last steps took longer than one without. What a
    step takes without is known only of those there were. When more sequences decode by now than did then, it is taken to be as many times longer: too much, so that
    slots that are free fill fast; once they are full there are such steps again. (The other way, few sequences would let few others in, for ever.)
    A step without sequences that decode has no limit.
    """

    def __init__(self, slowdown: float, most_tokens: int) -> None:
        self._slowdown, self._most = slowdown, most_tokens
        self._decode_ns = self._token_ns = 0.0
        self._decoding = 0.0

    def tokens(self, decoding: int) -> int:
        """Most prompt tokens in a step in which so many others get their next token."""
        if not self._decode_ns or not decoding:
            return self._most
        if not self._token_ns:
            return min(self._most, FIRST_TOKENS)
        spare_ns = (self._slowdown - 1) * self._decode_ns * max(1.0, decoding / self._decoding)
        return int(max(LEAST_TOKENS, min(self._most, spare_ns / self._token_ns)))

    def observe(self, step_ns: int, decoding: int, prompt_tokens: int) -> None:
        """A step took that long: `decoding` sequences got a token each, and so many tokens of prompts were computed beside them."""
        if not decoding:
            return
        if not prompt_tokens:
            weight = WEIGHT if self._decode_ns and decoding <= 2 * self._decoding else 1
            self._decode_ns += (step_ns - self._decode_ns) / weight
            self._decoding += (decoding - self._decoding) / weight
        elif self._decode_ns:
            found_ns = max(step_ns - self._decode_ns, 0) / prompt_tokens
            share = prompt_tokens / (prompt_tokens + WEIGHT_TOKENS) if self._token_ns else 1.0
            self._token_ns += (found_ns - self._token_ns) * share
