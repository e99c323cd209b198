"""A clock and a GPU under the test's control."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np


class FakeClock:
    """Nanoseconds that pass only when told to. Call it for the time."""

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        """The time in ns."""
        return self.now_ns

    def advance(self, ns: int) -> int:
        """Lets `ns` pass. Returns the new time."""
        if ns < 0:
            raise ValueError(f"time does not go back: {ns} ns")
        self.now_ns += ns
        return self.now_ns


class FakeGpu:
    """Runs a batch in `cost_ns(size, length)` of a clock's time; length: what its requests are padded to, 0 where lengths are not used.

    With `noise` each run takes that times a lognormal factor of mean 1 whose logarithm has this standard deviation; the same `seed`, the same factors.
    """

    def __init__(self, clock: FakeClock, cost_ns: Callable[[int, int], int], noise: float = 0.0, seed: int = 0) -> None:
        self._clock, self._cost_ns, self._noise = clock, cost_ns, noise
        self._random = np.random.default_rng(seed)

    def run(self, size: int, length: int = 0) -> int:
        """Runs a batch. Returns when it ended."""
        run_ns = self._cost_ns(size, length)
        if self._noise:
            run_ns = round(run_ns * math.exp(self._noise * self._random.standard_normal() - self._noise**2 / 2))
        return self._clock.advance(run_ns)
