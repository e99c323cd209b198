"""When the next batch may begin while another one still runs: a pipeline without frozen batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

WEIGHT = 4
"""The newest run counts for one in so many."""
MOST_KEYS = 4096
OUTLIER = 4
NEVER_NS = 1 << 62


class Pace:
    """Predicts when the batches that are on their way will have ended, from what batches like them took.

    A batch that is not full is left open until the one before it is about to end, just long enough before for it to be prepared (gathered, and copied to the
    device): so it takes in whoever comes meanwhile, and the device never waits for it. Times are integers in ns; a key is what batches of equal cost share.
    """

    def __init__(self) -> None:
        self._run_ns: dict[Hashable, int] = {}
        self._prepare_ns = 0
        self._running: deque[tuple[Hashable, int]] = deque()
        self._ended_ns = 0

    def began(self, key: Hashable, began_ns: int, launched_ns: int) -> None:
        """A batch was begun, and was on its way to the device from launched_ns on."""
        prepared_ns = launched_ns - began_ns
        if self._prepare_ns:
            prepared_ns = min(prepared_ns, OUTLIER * self._prepare_ns)  # it may have captured a graph, or allocated
        self._prepare_ns += (prepared_ns - self._prepare_ns) // (WEIGHT if self._prepare_ns else 1)
        self._running.append((key, began_ns))

    def ended(self, ended_ns: int, is_typical: bool = True) -> None:
        """The oldest batch has ended. Not typical: what it took is not to be expected of others."""
        key, _ = self._running[0]
        if not is_typical:
            self._running.popleft()
            self._ended_ns = ended_ns
            return
        run_ns = max(ended_ns - self.since_ns, 1)
        known_ns = self._run_ns.get(key, 0)
        if not known_ns and len(self._run_ns) >= MOST_KEYS:
            self._run_ns.clear()
        self._run_ns[key] = known_ns + (run_ns - known_ns) // (WEIGHT if known_ns else 1)
        self._running.popleft()
        self._ended_ns = ended_ns

    @property
    def since_ns(self) -> int:
        """Since when the oldest batch has had the device to itself."""
        return max(self._running[0][1], self._ended_ns)

    def free_ns(self) -> int:
        """When the device will have run all of them; 0 if there is none, or one whose run time is unknown."""
        if not self._running:
            return 0
        end_ns = self.since_ns
        for key, _ in self._running:
            run_ns = self._run_ns.get(key)
            if run_ns is None:
                return 0
            end_ns += run_ns
        return end_ns

    def opens_ns(self) -> int:
        """From when on another batch may begin that is not full. Where nothing is known of what runs, not before it has ended."""
        return (self.free_ns() or NEVER_NS) - self._prepare_ns if self._running else 0
