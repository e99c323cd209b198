"""The bucket of a worker that knows lengths and has no boundaries: a batch is padded to its longest request, and that times its size may be bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuworker.scheduling.bucket import Bucket
from gpuworker.scheduling.decision import Queued, RunTimes
from gpuworker.scheduling.lane import Lane


class TokenBucket(Bucket):
    """Requests in the order in which they are due, whatever their lengths. What a batch takes depends on who is in it."""

    def __init__(self, cap: int, run_times: RunTimes, firm: bool, max_tokens: int | None) -> None:
        super().__init__(0, cap, run_times, firm)
        self._max_tokens = max_tokens

    def refresh(self) -> None:
        """Tables are looked up as they are needed."""

    def padded(self, longest: int) -> int:
        """See Bucket."""
        return longest

    def shape(self, longest: int) -> int:
        """See Bucket. Rounded up to a power of two, so that few shapes are to be learned."""
        return coarse(longest)

    def table(self, longest: int) -> Sequence[int]:
        """See Bucket."""
        return self._run_times.table(coarse(longest))

    def fits(self, count: int, longest: int) -> bool:
        """See Bucket. One request may run alone whatever its length."""
        return count <= self.cap and (count == 1 or self._max_tokens is None or count * longest <= self._max_tokens)

    def pop_hopeless(self, now_ns: int) -> list[Queued]:
        """See Bucket. A long one may be hopeless before a shorter one that is due earlier."""
        hopeless = []
        for lane in self._lanes.values() if self.firm else ():
            late = [request for request, due_ns in zip(lane.requests, lane.due_ns, strict=True) if due_ns < now_ns + self.table(request.length)[1]]
            lane.remove(late)
            hopeless += late
        return hopeless

    def _cap(self, lanes: Sequence[Lane]) -> int:
        """How many of the first requests fit; sets what batches as long as these take."""
        count = longest = 0
        for request in (request for lane in lanes for request in lane):
            if not self.fits(count + 1, max(longest, request.length)):
                break
            count, longest = count + 1, max(longest, request.length)
        self.run_ns = self.table(longest)
        return max(count, 1)

    def _plan_full(self, lane: Lane, now_ns: int, starts_ns: int) -> bool:
        return False

    def trim(self, batch: list[Queued], now_ns: int, due_ns: Callable[[Queued], int]) -> None:
        """See Bucket. Those that were counted may have been in others' way, and longer ones have come in their place."""
        while len(batch) > 1:
            longest = longest_of(batch)
            end_ns = now_ns + self.table(longest)[len(batch)]
            if self.fits(len(batch), longest) and (not self.firm or end_ns <= min(map(due_ns, batch))):
                break
            last = max(batch, key=lambda one: (one.length, due_ns(one)))
            batch.remove(last)
            self.add(last, due_ns(last))
        self.planned_ns = self.table(longest_of(batch))[len(batch)]


def longest_of(batch: Sequence[Queued]) -> int:
    """Of the requests' lengths."""
    return max([request.length for request in batch])


def coarse(length: int) -> int:
    """Rounded up to a power of two."""
    return 1 << (length - 1).bit_length() if length > 0 else 0
