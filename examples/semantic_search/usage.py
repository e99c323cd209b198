"""What processes take: memory, and CPU time, their own and that of everybody else on the machine."""

from __future__ import annotations

import contextlib
import os
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


def cpu_s(pids: Iterable[int]) -> float:
    """CPU time that these processes have had so far, without their children's."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(time.user + time.system for time in times)


def machine_cpu_s() -> float:
    """CPU time that all processes of the machine together have had so far."""
    time = psutil.cpu_times()
    return sum(time) - time.idle - time.iowait - time.guest - time.guest_nice


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def end_all(pids: Iterable[int], timeout_s: float) -> None:
    """Waits until these processes have ended, and kills those that have not after `timeout_s`."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    for process in psutil.wait_procs(processes, timeout_s)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
