"""What gpuworker replaces: every process owns a model of its own and runs one text at a time."""

from __future__ import annotations

from .fleet import Embed, Way
from .handler import MiniLM
from .usage import cores


def own_model(processes: int) -> Way:
    """Each process gets its fair share of the cores as torch threads, at least one."""
    threads = max(1, cores() // processes)

    def load() -> Embed:
        model = MiniLM(threads)
        model.load()
        model.run_batch(model.warmup())
        return lambda texts: (model.run_batch([text])[0] for text in texts)

    return Way(f"{processes} with own models", processes, load)
