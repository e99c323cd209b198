"""Is that process dead? Asked of the kernel, never of a clock: a process that is stopped for an hour is alive.

In one pid namespace the proof is a pidfd, checked once against the process's start time so that a reused pid cannot pass for the old process; it
is not misled by a program that closes all its descriptors, nor by a forked child that keeps one. Across pid namespaces (two containers sharing
/dev/shm, both with pid 1) it is the lock byte that every participant holds (native/port.c).
"""

from __future__ import annotations

import os
import select
from typing import NamedTuple

from gpuworker._native import lib


class Identity(NamedTuple):
    """Tells one process from every other the kernel ever ran, also when its pid is used again."""

    pid: int
    start_ticks: int
    pid_namespace: int


def identify(pid: int | None = None) -> Identity:
    """The identity of a process of this pid namespace (default: this process). Raises ProcessLookupError when there is none."""
    return Identity(pid or os.getpid(), start_ticks(pid), own_pid_namespace())


def start_ticks(pid: int | None = None) -> int:
    """When the process started, in clock ticks since boot (field 22 of /proc/PID/stat)."""
    try:
        with open(f"/proc/{pid or 'self'}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(pid) from None


def own_pid_namespace() -> int:
    """Inode of this process's pid namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


class Watch:
    """Watches one process until it is dead; keeps its pidfd."""

    def __init__(self, who: Identity, probe_fd: int, lock_index: int) -> None:
        self._probe_fd, self._lock_index = probe_fd, lock_index
        self._pidfd = -1
        self._local = who.pid_namespace == own_pid_namespace()
        self._dead = False
        if self._local:
            self._open(who)

    def _open(self, who: Identity) -> None:
        try:
            self._pidfd = os.pidfd_open(who.pid)
            self._dead = start_ticks(who.pid) != who.start_ticks
        except ProcessLookupError:
            self._dead = True
        except OSError:
            pass  # no descriptor to be had: the lock byte decides

    def is_dead(self) -> bool:
        """Whether the kernel says that no thread of the process can run any more."""
        if not self._dead:
            if self._pidfd >= 0:
                poll = select.poll()
                poll.register(self._pidfd, select.POLLIN)
                self._dead = bool(poll.poll(0))
            else:
                self._dead = lib.gw_is_locked(self._probe_fd, self._lock_index) == 0
        return self._dead

    def close(self) -> None:
        """Gives the descriptor back."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __del__(self) -> None:
        self.close()
