"""A handler that takes as long as the cost says, and computes nothing. The owner process imports it."""

from __future__ import annotations

import time
from bisect import bisect_left

from serving.workload import Cost

_SPIN_NS = 1_000_000  # a sleep may end so much too late


def packed(length: int) -> bytes:
    """A request of this length; it is nothing else."""
    return length.to_bytes(8, "little")


def length_of(request: bytes) -> int:
    return int.from_bytes(request, "little")


class FakeGpu:
    """Answers each request with when its batch has ended, on CLOCK_MONOTONIC in ns."""

    def __init__(self, cost: Cost, lengths: tuple[int, ...]) -> None:
        self._cost, self._lengths = cost, lengths

    def warmup(self) -> list[bytes]:
        return [packed(length) for length in self._lengths or (0,)]

    def run_batch(self, requests: list[bytes]) -> list[bytes]:
        began_ns = time.monotonic_ns()
        longest = max(map(length_of, requests))
        padded = self._lengths[bisect_left(self._lengths, longest)] if self._lengths else 0
        end_ns = began_ns + self._cost(len(requests), padded)
        if (left_ns := end_ns - time.monotonic_ns() - _SPIN_NS) > 0:
            time.sleep(left_ns / 1e9)
        while (now_ns := time.monotonic_ns()) < end_ns:
            pass
        return [packed(now_ns)] * len(requests)

    length = staticmethod(length_of)
