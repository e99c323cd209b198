"""What the operating system knows: CPU time of processes and of everybody, cores, descendants."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import time
from pathlib import Path

import psutil

from ipc.cells import FREE, ONE_CORE

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_MOMENT_S = 0.06
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
CORES = tuple(sorted(os.sched_getaffinity(0)))


def die_with_parent() -> None:
    """The kernel kills this process when the one that forked it ends: a spinning server must not outlive a killed run."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends, so that it can find and end them."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def pin(placement: str, is_server: bool) -> None:
    """Pin this process, and what it starts later, as `placement` says. Raises RuntimeError where there is no second core."""
    if placement == FREE:
        os.sched_setaffinity(0, CORES)
    elif placement == ONE_CORE:
        os.sched_setaffinity(0, CORES[:1])
    elif len(CORES) < 2:
        raise RuntimeError("this machine has one core")
    else:
        os.sched_setaffinity(0, CORES[1:2] if is_server else CORES[:1])


def descendants() -> list[psutil.Process]:
    """Every process under this one."""
    return psutil.Process().children(recursive=True)


def end_descendants() -> None:
    """SIGKILL and reap every process under this one, until there is none."""
    while processes := descendants():
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=1)


def cpu_s(pid: int) -> float:
    """CPU seconds a process has used, all its threads together, to the nanosecond; 0 when it is gone."""
    process_clock = (~pid << 3) | 2  # CPUCLOCK_SCHED of a process: what clock_getcpuclockid() returns
    try:
        return time.clock_gettime(process_clock)
    except OSError:
        return 0.0


def idle_s() -> float:
    """Seconds all cores together have been idle since boot.

    The kernel measures idle time by its clock but samples busy time at ticks, which misses much of what runs in short bursts:
    the cores' wall time less this is what everybody used.
    """
    words = Path("/proc/stat").read_text().split(maxsplit=6)
    return (int(words[4]) + int(words[5])) * _TICK_S


def wait_for_quiet(limit_s: float) -> float:
    """Return when others have left the cores alone for a moment, or after `limit_s`. Returns the seconds that took."""
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < limit_s:
        idle_begin_s = idle_s()
        time.sleep(_MOMENT_S)
        # Idle time comes in ticks: one tick short of all of it is quiet.
        if idle_s() - idle_begin_s >= (os.cpu_count() or 1) * (_MOMENT_S - _TICK_S):
            break
    return waited_s


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def description() -> dict[str, object]:
    """The machine as a reader of the figures needs to know it."""
    return {
        "cpu": _cpu_model(),
        "cores": len(CORES),
        "kernel": platform.release(),
        "libc": "-".join(platform.libc_ver()),
        "python": platform.python_version(),
    }
