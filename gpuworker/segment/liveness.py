"""Is that process dead? Asked of the kernel, never of a clock: a process that is stopped for an hour is alive.

In one pid namespace the proof is a pidfd, checked once against the process's start time so that a reused pid cannot pass for the old process; it
is not misled by a program that closes all its descriptors, nor by a forked child that keeps one. A process that has executed another program lives, but
has neither the lock byte nor the mapping any more, and so cannot touch the segment. Across pid namespaces (two containers sharing /dev/shm, both with
pid 1) it is the lock byte that every participant holds (native/port.c).
"""

from __future__ import annotations

import os
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
        self._who, self._probe_fd, self._lock_index = who, probe_fd, lock_index
        self._pidfd = -1
        self._dead = False
        self._open()

    def _open(self) -> None:
        if self._who.pid_namespace != own_pid_namespace():
            return
        try:
            self._pidfd = os.pidfd_open(self._who.pid)
        except ProcessLookupError:
            self._dead = True
            return
        except (OSError, OverflowError):
            return  # no descriptor to be had, or a pid that is none: the lock byte decides
        try:
            self._dead = start_ticks(self._who.pid) != self._who.start_ticks
        except ProcessLookupError:
            self._dead = self._has_ended()
            if not self._dead:  # /proc hides other users' processes here (hidepid): the lock byte decides
                self.close()
        except OSError:
            self.close()

    def is_dead(self) -> bool:
        """Whether the kernel says that no thread of the process can run any more."""
        if self._dead:
            return True
        if self._pidfd < 0:
            self._dead = lib.gw_is_locked(self._probe_fd, self._lock_index) == 0
            return self._dead
        if not self._has_ended():
            self._dead = not lib.gw_is_locked(self._probe_fd, self._lock_index) and not has_mapped(self._who.pid, self._probe_fd)
            return self._dead
        if _is_pidfd_of(self._pidfd, self._who.pid):
            self._dead = True
        else:  # this program closed all its descriptors, and the number may be somebody else's now: it is not ours to close
            self._pidfd = -1
            self._open()
        return self._dead

    def _has_ended(self) -> bool:
        return bool(lib.gw_has_ended(self._pidfd))

    def close(self) -> None:
        """Gives the descriptor back."""
        if self._pidfd >= 0 and _is_pidfd_of(self._pidfd, self._who.pid):
            os.close(self._pidfd)
        self._pidfd = -1

    def __del__(self) -> None:
        try:  # noqa: SIM105 (at the interpreter's end even contextlib may be gone; the descriptor goes with the process)
            self.close()
        except Exception:
            pass


def has_mapped(pid: int, fd: int) -> bool:
    """Whether the process has the file mapped; also said of one that we may not look into."""
    inode = b" %d " % os.fstat(fd).st_ino
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return any(inode in line for line in file)
    except OSError:
        return True


def _is_pidfd_of(fd: int, pid: int) -> bool:
    """Whether the descriptor is a pidfd of this process, alive or dead (then its Pid line says -1)."""
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
            return any(line.split()[1:] in ([b"%d" % pid], [b"-1"]) for line in file if line.startswith(b"Pid:"))
    except OSError:
        return False
