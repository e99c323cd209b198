"""Flush on size or on age, whichever comes first."""

from __future__ import annotations

from collections.abc import Sequence

from gpuworker.scheduling.decision import Decision, Queued, Reason, Run, Wait


class SizeOrTimeout:
    """A batch leaves when `max_batch_size` requests are there, or when the oldest has waited `max_wait_ms` since its own enqueue time.

    The clock is never restarted: a request that waited behind a running batch does not wait again. With max_wait_ms=0 whatever is there leaves as soon
    as the device is free; batches then form by themselves while it is busy.
    """

    def __init__(self, max_batch_size: int, max_wait_ms: float) -> None:
        self.max_batch_size = max_batch_size
        self.max_wait_ns = round(max_wait_ms * 1e6)
        self._by_age = [Run(count, Reason.AGE) for count in range(max_batch_size)]  # made once: this is asked for every batch
        self._full = Run(max_batch_size, Reason.FULL)

    def decide(self, queue: Sequence[Queued], now_ns: int) -> Decision:
        """See Policy.decide."""
        count = len(queue)
        if not count:
            return Wait(None)
        if count >= self.max_batch_size:
            return self._full
        if not self.max_wait_ns:
            return self._by_age[count]
        due_ns = queue[0].enqueue_ns + self.max_wait_ns
        return self._by_age[count] if now_ns >= due_ns else Wait(due_ns)
