"""What a worker knows about run times and lengths before its first request: what it knew last time, else what a profile tells."""

from __future__ import annotations

import logging
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


class WarmStart:
    """Seeds a cost model, and keeps what it has learned for the next start."""

    def __init__(self, handler: Handler, options: WorkerOptions, costs: CostModel) -> None:
        self._handler, self._options, self._costs = handler, options, costs
        self._file = CostFile(options.cost_file, handler.name)

    def seed(self, boundaries: Sequence[int]) -> tuple[int, ...]:
        """-> the length buckets that were learned last time, or none."""
        saved = self._file.load()
        if saved is not None:
            try:
                self._costs.restore(saved["model"])
                return tuple(map(int, saved["boundaries"]))
            except (KeyError, TypeError, ValueError) as error:
                log.warning("the saved run times are not used: %r", error)
        try:
            examples = by_length(self._handler.examples, self._handler.length, boundaries)
        except Exception:
            log.warning("profiling is left out: length() failed on an example of warmup()", exc_info=True)
            return ()
        sizes = sizes_to_profile(self._options.max_batch_size, tuple(map(int, self._options.allowed_batch_sizes or ())))
        for (size, length), runs_ns in profile(self._handler.run_batch, examples, sizes, PROFILE_LIMIT_S, time.monotonic_ns).items():
            self._costs.seed(size, length, runs_ns)
        return ()

    def snapshot(self, boundaries: Sequence[int]) -> dict[str, Any]:
        """What is worth keeping. For the thread that observes."""
        return {"model": self._costs.to_dict(), "boundaries": list(boundaries)}

    def save(self, snapshot: dict[str, Any]) -> None:
        """Writes it. Never raises."""
        self._file.save(snapshot)
