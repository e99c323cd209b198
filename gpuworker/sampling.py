"""How a request wants its tokens chosen, and the random number that chooses each. No torch: clients build and send these.

The chance in a sequence is a function of its seed and of the token's position and of nothing else, so a request gets the same tokens alone, among others, after a
preemption and from a restarted owner.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

GREEDY_BELOW = 1e-5
"""A lower temperature is 0: it leaves nothing to chance that float32 could tell."""

BANNED, FORCED = -100.0, 100.0
"""What a logit_bias can say at the most: never this token; none but such tokens."""

MAX_LOGPROBS = 20  # as OpenAI's API and vLLM have it

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the tokens of one sequence are chosen; the default is greedily: always the likeliest.

    First the logits are changed. repetition_penalty: those of tokens in the prompt or generated before are divided by it if positive, else multiplied (above 0;
    1: off). presence_penalty, frequency_penalty: subtracted from those of tokens generated before, once, and once for each time (-2 to 2). logit_bias: token id ->
    what is added to its logit, -100 to 100; -100 bans a token and 100 bans all that have no 100, whatever the logits and the temperature.

    Then they are divided by `temperature` (0 to 100; 0: greedy, and the rest has no effect), and the tokens to draw from are cut down to the top_k likeliest
    (0: off), of these to the fewest likeliest that have together at least the share top_p of their probability (above 0, to 1: off), and of these to those at least
    min_p times as likely as the likeliest (0: off, to 1). Tokens that are equally likely stay or go together.

    seed: see `uniform`; whoever makes a request without one draws it, once. logprobs: -1: none; 0: the chosen token's; n, up to 20: also the n likeliest tokens'.

    Raises ValueError that says what to give.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    logprobs: int = -1

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0 <= _real(self.temperature) <= 100, "a number from 0 (greedy) to 100")
        _integer("top_k", self.top_k, 0, 1 << 31, "how many tokens to keep, or 0 for all")
        _number("top_p", self.top_p, 0 < _real(self.top_p) <= 1, "a share above 0, up to 1 (off)")
        _number("min_p", self.min_p, 0 <= _real(self.min_p) <= 1, "a share from 0 (off) to 1")
        _number("repetition_penalty", self.repetition_penalty, 0 < _real(self.repetition_penalty) < math.inf, "a number above 0; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _number(name, value, -2 <= _real(value) <= 2, "a number from -2 to 2; 0 is off")
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), _MASK, "an integer from -2**63 to 2**64 - 1, or None")
        _integer("logprobs", self.logprobs, -1, MAX_LOGPROBS, f"-1 (none), 0 (the chosen token's) or up to {MAX_LOGPROBS} of the likeliest tokens'")

    @property
    def is_greedy(self) -> bool:
        """Nothing is left to chance: no seed is needed."""
        return self.temperature < GREEDY_BELOW

    @property
    def edits(self) -> bool:
        """The logits are changed before anything is chosen."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)

    @property
    def is_plain(self) -> bool:
        """The token with the largest logit is all that is asked for."""
        return self.is_greedy and self.logprobs < 0 and not self.edits


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that chooses the token at `position` of its sequence; the same on every machine and in every version.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, https://doi.org/10.1145/2660193.2660195), whose n-th output can be computed without those before it; the seed
    goes through its mixer first, so that near seeds start far apart. seed: of 64 bits, signed or not. 53 bits of the output make the number.
    """
    z = (_mixed(seed & _MASK) + (position + 1) * _GAMMA) & _MASK
    return (_mixed(z) >> 11) * 2.0**-53


def _mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def shown(value: Any) -> str:
    """How a value is named in an error: as it is written in Python, and not more of it than anybody reads."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or a class whose repr fails
        return f"something of type {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}..."


def _real(value: Any) -> float:
    """`value` if it is a number, else one that no range has."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _number(name: str, value: Any, fits: bool, wanted: str) -> None:
    if not fits:
        raise ValueError(f"{name}={shown(value)}: give {wanted}")


def _integer(name: str, value: Any, least: int, most: int, wanted: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}={shown(value)}: give {wanted}")


def _check_bias(bias: Any) -> None:
    if not isinstance(bias, dict):
        raise ValueError(f"logit_bias={shown(bias)}: give a dict from token ids to what is added to their logits, or None")
    for token, value in bias.items():
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 1 << 31:
            raise ValueError(f"logit_bias: {shown(token)} is no token id; give integers from 0, as in {{50256: -100}}")
        _number(f"logit_bias[{token}]", value, BANNED <= _real(value) <= FORCED, "a number from -100 (never) to 100 (nothing else)")
