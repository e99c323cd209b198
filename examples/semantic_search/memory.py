"""What a set of processes holds in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Memory:
    pss_bytes: int  # proportional set size: a page that n processes share counts 1/n in each of them
    models: int  # processes that hold a model, told by torch being mapped in them

    @classmethod
    def of(cls, pids: Iterable[int]) -> Memory:
        processes = [psutil.Process(pid) for pid in pids]
        return cls(
            pss_bytes=sum(process.memory_full_info().pss for process in processes),
            models=sum(any("libtorch_cpu" in mapped.path for mapped in process.memory_maps()) for process in processes),
        )
