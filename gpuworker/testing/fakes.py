"""A clock and a GPU under the test's control."""

from __future__ import annotations

from collections.abc import Callable


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
    """Runs a batch of n in `cost_ns(n)` of a clock's time."""

    def __init__(self, clock: FakeClock, cost_ns: Callable[[int], int]) -> None:
        self._clock, self._cost_ns = clock, cost_ns

    def run(self, count: int) -> int:
        """Runs a batch of `count`. Returns when it ended."""
        return self._clock.advance(self._cost_ns(count))
