"""What a worker knows about run times and lengths before its first request: what it knew last time, else what a profile tells."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from gpuworker.scheduling.cost_model import CostModel
from gpuworker.worker.cost_file import CostFile
from gpuworker.worker.handler import Handler
from gpuworker.worker.options import WorkerOptions
from gpuworker.worker.profile import by_length, profile, sizes_to_profile

log = logging.getLogger("gpuworker")

PROFILE_LIMIT_S = 5.0
KEEP_TICKS = 300
"""Between two savings of what was learned: 30 s."""
CLOSE_LIMIT_S = 2.0
"""Longest that the last saving may hold up the worker's end."""


class WarmStart:
    """Seeds a cost model, and keeps what it has learned for the next start.

    The keeper's ticks say when, the owner's thread (the one that observes) takes a snapshot, and a thread of its own writes that: a home directory on a
    disk that hangs must stop neither.
    """

    def __init__(self, handler: Handler, options: WorkerOptions, costs: CostModel, elapsed_s: float = 0.0) -> None:
        """elapsed_s: of the start-up, so far: there is no time for a profile where half of startup_timeout_s has passed."""
        self._handler, self._options, self._costs = handler, options, costs
        self._file = CostFile(options.cost_file, handler.name, handler.source)
        self._elapsed_s = elapsed_s
        self._ticks = 0
        self._is_due = False
        self._snapshot: dict[str, Any] | None = None
        self._taken_at: object = None
        self._writer: threading.Thread | None = None

    def seed(self, boundaries: Sequence[int]) -> tuple[int, ...]:
        """-> the length buckets that were learned last time, or none."""
        learned = self._restore()
        if self._costs.is_empty and self._options.latency_budget_ms is not None:
            self._profile(learned or boundaries)
        return learned

    def on_decide(self, boundaries: Sequence[int]) -> None:
        """Takes a snapshot when one is due. From the owner's thread, as often as it likes."""
        if self._is_due:
            self._is_due = False
            state = (self._costs.version, boundaries)
            if state != self._taken_at:
                self._taken_at = state
                self._snapshot = self._worth_keeping(boundaries)

    def on_tick(self) -> None:
        """From the keeper's thread: has the last snapshot written, and a new one taken when it is time."""
        self._ticks += 1
        if self._ticks % KEEP_TICKS == 0:
            self._is_due = True
        if self._snapshot is not None and not (self._writer and self._writer.is_alive()):
            snapshot, self._snapshot = self._snapshot, None
            self._write(snapshot)

    def close(self, boundaries: Sequence[int]) -> None:
        """Writes what is known now; waits CLOSE_LIMIT_S for that at most. When the keeper has ended."""
        end_s = time.monotonic() + CLOSE_LIMIT_S
        snapshot = self._worth_keeping(boundaries)
        if self._writer is not None:
            self._writer.join(CLOSE_LIMIT_S)
        if snapshot is not None and not (self._writer and self._writer.is_alive()):
            self._write(snapshot)
        if self._writer is not None:
            self._writer.join(max(end_s - time.monotonic(), 0))
            if self._writer.is_alive():
                log.warning("the run times of %s are still not written after %g s, which is not waited for", self._handler.name, CLOSE_LIMIT_S)

    def _restore(self) -> tuple[int, ...]:
        saved = self._file.load()
        if saved is None:
            return ()
        try:
            self._costs.restore(saved["model"])
            return self._usable(saved["boundaries"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            log.warning("the saved run times are not used: %r", error)
            return ()

    def _usable(self, boundaries: Any) -> tuple[int, ...]:
        """Boundaries of the last time, if they are what could be learned now."""
        options, found = self._options, tuple(map(int, boundaries))
        if options.length_buckets != "learn" or not found:
            return ()
        if found[0] < 1 or list(found) != sorted(set(found)):
            raise ValueError(f"length buckets {found} do not ascend from 1")
        if len(found) > options.max_length_buckets or (options.longest and found[-1] > options.longest):
            log.info("the length buckets of the last time, %s, do not suit the options, and are learned anew", ", ".join(map(str, found)))
            return ()
        return found

    def _profile(self, boundaries: Sequence[int]) -> None:
        options, length = self._options, self._handler.length if self._options.uses_lengths else None
        try:
            examples = by_length(self._handler.examples, length, boundaries, options.longest)
        except Exception:
            log.warning("profiling is left out: length() failed on an example of warmup()", exc_info=True)
            return
        sizes = sizes_to_profile(options.max_batch_size, options.sizes)
        limit_s = min(PROFILE_LIMIT_S, options.startup_timeout_s / 2 - self._elapsed_s)
        runs = profile(self._handler.run_batch, examples, sizes, limit_s, time.monotonic_ns, options.max_batch_tokens)
        for (size, padded), runs_ns in runs.items():
            self._costs.seed(size, padded, runs_ns)

    def _worth_keeping(self, boundaries: Sequence[int]) -> dict[str, Any] | None:
        """What is worth keeping: nothing, while nothing is known. Else the next start would take that for knowledge, and not profile."""
        model = self._costs.to_dict()
        return {"model": model, "boundaries": list(boundaries)} if model["shapes"] else None

    def _write(self, snapshot: dict[str, Any]) -> None:
        self._writer = threading.Thread(target=self._file.save, args=(snapshot,), name="gpuworker-costs", daemon=True)
        try:
            self._writer.start()
        except RuntimeError as error:  # no more threads
            self._writer = None
            log.warning("the run times of %s cannot be saved: %s", self._handler.name, error)
