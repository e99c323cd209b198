"""Sizes and lengths: how large they may be, and steps that they are rounded up to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MAX_BATCH_SIZE = 4096
MAX_LENGTH = (1 << 24) - 1
"""As in native/layout.h: GW_MAX_CAPACITY, GW_MAX_LENGTH."""


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most`: sizes from which the others can be told."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def at_least(value: int, steps: Sequence[int]) -> int:
    """The first of the ascending `steps` that is no less than `value`; itself where there is none."""
    at = bisect_left(steps, value)
    return steps[at] if at < len(steps) else value
