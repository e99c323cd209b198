"""What a step of the model takes, by what is computed in it: learned from the steps themselves. Times are arguments, so no model is needed to test it."""

from __future__ import annotations

from math import log, sqrt
from typing import NamedTuple

import numpy as np

PRIOR = np.array([1.0, 1 / 32, 1 / 4096, 0.1, 1 / 4096, 1 / 16, 1 / 32768])
"""While nothing is known: what one of each of Work's terms costs, the step itself being 1. A prompt's tokens are taken to be expensive."""
PRIOR_VARIANCE, NOISE_VARIANCE = 2.0**2, 0.25**2
"""Of the costs' logarithms at first, and of a step's: how much others on the machine disturb it."""
DRIFT_VARIANCE, SCALE_VARIANCE = 0.03**2, 0.02**2
"""By how much a cost's logarithm changes from step to step: by itself, and with all others, as when the machine slows down."""
MOST_SURPRISE = 0.7
"""Of a step's logarithm. One that took three times as long, because of another process, does not count for more than this."""


PROMPTS, LEAST_SHARE = 3, 0.1
"""What a chunk costs however short it is, is never taken to be less of a step: from nothing, a cost in logarithms does not come back."""


class Work(NamedTuple):
    """What a step computes. rows: sequences that get their next token; row_keys: tokens that these look at, all together; prompts: 1 if there are chunks of prompts,
    else 0; keys: tokens that the chunks look at, their own included; tokens: of the chunks; pairs: of one of these and one that it looks at."""

    rows: int = 0
    row_keys: int = 0
    prompts: int = 0
    keys: int = 0
    tokens: int = 0
    pairs: float = 0.0

    def with_chunk(self, start: int, count: int) -> Work:
        """This, and `count` tokens of a prompt from its position `start` on."""
        end = start + count
        return Work(self.rows, self.row_keys, 1, self.keys + end, self.tokens + count, self.pairs + count * (start + end) / 2)


class StepCost:
    """A step takes a + b rows + c row_keys + d prompts + e keys + f tokens + g pairs, in ns; all of them positive.

    Learned by an extended Kalman filter (e.g. Simon: Optimal State Estimation, 2006, section 13.2) whose state are the logarithms of a to g, and which measures
    the logarithm of a step's time. So a cost never becomes negative, an error counts for what it is relative to the step, and no unit of time is built in. Costs
    that steps do not tell apart, as when a prompt goes on in chunks of the same size, change together, the uncertain and the large ones more.
    """

    def __init__(self) -> None:
        self._costs, self._variance = np.zeros(len(PRIOR)), np.eye(len(PRIOR)) * PRIOR_VARIANCE
        self.is_known = False
        """Whether there has been a step."""

    def observe(self, step_ns: int, work: Work) -> None:
        """A step took that long."""
        terms, step_ns = np.array((1.0, *work)), max(step_ns, 1)
        if not self.is_known:
            self._costs, self.is_known = PRIOR * (step_ns / (PRIOR @ terms)), True
            return
        parts = self._costs * terms
        expected_ns = float(parts.sum())
        shares = parts / expected_ns  # the derivatives of a sum's logarithm by its terms' logarithms
        self._variance += SCALE_VARIANCE
        self._variance.flat[:: len(PRIOR) + 1] += DRIFT_VARIANCE
        spread = self._variance @ shares
        gain = spread / (shares @ spread + NOISE_VARIANCE)
        surprise = min(max(log(step_ns / expected_ns), -MOST_SURPRISE), MOST_SURPRISE)
        self._costs = self._costs * np.exp(gain * surprise)
        self._costs[PROMPTS] = max(self._costs[PROMPTS], LEAST_SHARE * self._costs[0])
        self._variance -= np.outer(gain, spread)

    def ns(self, work: Work) -> float:
        """What such a step takes."""
        return float(self._costs @ (1.0, *work))

    def chunk(self, start: int, spare_ns: float) -> tuple[float, float]:
        """Of a prompt from position `start` on: how many tokens take spare_ns, 0 if not even one is to be had for it; and how many would take as long as what the
        chunk costs however short it is."""
        _, _, _, prompt_ns, key_ns, token_ns, pair_ns = self._costs.tolist()
        fixed_ns, each_ns = prompt_ns + key_ns * start, key_ns + token_ns + pair_ns * start
        left_ns = spare_ns - fixed_ns
        # left = each n + pair n^2 / 2, as a chunk's tokens look at each other, too
        fitting = 2 * left_ns / (each_ns + sqrt(each_ns**2 + 2 * pair_ns * left_ns)) if left_ns > 0 else 0.0
        return fitting, fixed_ns / each_ns
