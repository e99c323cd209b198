"""What became of the requests, in memory that outlives the frontends: one row per place, written by the one process that has the place."""

import mmap

import numpy as np

ERRORS = (
    "DeadlineExceeded", "QueueFull", "RequestCancelled", "WorkerDied", "WorkerNotFound", "WorkerDraining", "SegmentError", "RemoteError", "other",
)  # fmt: skip
COUNTS = ("sent", "right", "wrong", "dropped", *ERRORS)
"""sent = right + wrong + dropped (nobody asked for the answer any more) + errors + what was on its way when its frontend was killed."""
ENDED = slice(1, len(COUNTS))
EXPECTED = ("DeadlineExceeded", "QueueFull", "RequestCancelled", "RemoteError")
"""What the frontends provoke (RemoteError: a batch with so many that raise that it was not taken apart to the end).
Of the other errors there may be none as long as a supervisor lives and attempts are unlimited."""
LATENCIES = 8192
NOTE_BYTES = 4096


class Records:
    """Shared by fork."""

    def __init__(self, places):
        words = len(COUNTS) + 3 + LATENCIES + NOTE_BYTES // 8
        self._map = mmap.mmap(-1, 8 * (2 + places * words))
        whole = np.frombuffer(self._map, np.int64)
        self._shared, table = whole[:2], whole[2:].reshape(places, words)
        self.counts = table[:, : len(COUNTS)]
        self._since_ns, self._paused_ns, self._n_latencies = (table[:, len(COUNTS) + i] for i in range(3))
        self._latencies = table[:, len(COUNTS) + 3 : len(COUNTS) + 3 + LATENCIES]
        self._notes = table[:, len(COUNTS) + 3 + LATENCIES :].view(np.uint8)

    def total(self, what):
        """Over all places."""
        return int(self.counts[:, COUNTS.index(what)].sum())

    def on_their_way(self, place):
        """Requests that were sent and have not ended."""
        row = self.counts[place]
        return int(row[0] - row[ENDED].sum())

    def add(self, place, what, n=1):
        self.counts[place, COUNTS.index(what if what in COUNTS else "other")] += n

    def note(self, place, text):
        """Keeps the first note of a place, for the report."""
        if not self._notes[place, 0]:
            blob = text.encode()[: NOTE_BYTES - 1]
            self._notes[place, : len(blob)] = np.frombuffer(blob, np.uint8)

    def notes(self):
        return [text for text in (bytes(row).rstrip(b"\0").decode(errors="replace") for row in self._notes) if text]

    # How long a frontend has been in one call, but for the time that the driver had it stopped.

    def begin(self, place, now_ns):
        self._since_ns[place] = now_ns

    def since_ns(self, place):
        return max(int(self._since_ns[place]), int(self._paused_ns[place])) if self._since_ns[place] else 0

    def paused(self, place, now_ns):
        """The driver stops this frontend, or lets it go on."""
        self._paused_ns[place] = now_ns

    # Owner deaths, as the driver saw them, and how long after one a request that was on its way then ended.

    def owner_died(self, now_ns):
        self._shared[0] = now_ns

    def end(self, place, now_ns):
        began_ns, died_ns = self._since_ns[place], self._shared[0]
        n = self._n_latencies[place]
        if began_ns < died_ns < now_ns and self._paused_ns[place] < began_ns and n < LATENCIES:
            self._latencies[place, n] = now_ns - died_ns
            self._n_latencies[place] = n + 1
        self._since_ns[place] = 0

    def latencies_ms(self):
        rows = zip(self._latencies, self._n_latencies, strict=True)
        return np.sort(np.concatenate([row[:n] for row, n in rows])) / 1e6

    @property
    def is_over(self):
        return bool(self._shared[1])

    def finish(self):
        """Every frontend ends after the call it is in."""
        self._shared[1] = 1
