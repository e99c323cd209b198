"""What `gpuworker doctor --clean` does: removes what is proved to belong to nobody that lives, of this user's, and leaves the rest alone.

A segment: when the locks of both its owner and its supervisor can be had, which the kernel gives away only once their holders are dead, in whatever pid
namespace. Payload files: when they are not of the segment that bears the name now (a live owner sweeps its own), and no process has another one mapped.
FIFOs of event loops: when they are not of that segment; who has one open is only woken later. A half-made segment: when nobody holds its lock, and its
maker's pid is no process's.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable
from typing import NamedTuple

from gpuworker._native import lib
from gpuworker.cli.text import count, size
from gpuworker.errors import GpuWorkerError, WorkerNotFound
from gpuworker.segment import Segment, files, names


class Removed(NamedTuple):
    """What was removed of one worker."""

    name: str
    what: str
    files: int
    bytes: int

    def __str__(self) -> str:
        return f"{count(self.files, 'file')} of {size(self.bytes)}: {self.what} of worker {self.name!r}"


def clean() -> tuple[list[Removed], list[str]]:
    """-> what was removed, and what could not be looked into, in words."""
    removed: list[Removed] = []
    unknown: list[str] = []
    for name in sorted({match[1] for match in map(names.OURS.fullmatch, names.listing()) if match}):
        try:
            parts = [
                ("a dead segment", _segment(name)),
                ("large payloads", _payloads(name)),
                ("FIFOs", _chimes(name)),
                ("a half-made segment", _temporaries(name)),
            ]
        except (GpuWorkerError, OSError) as error:
            unknown.append(f"worker {name!r}: {error}")
            continue
        removed += [Removed(name, what, len(sizes), sum(sizes)) for what, sizes in parts if sizes]
    return removed, unknown


def _segment(name: str) -> list[int]:
    file = names.shm_path(names.shm_name(name))
    taken = [os.lstat(file).st_blocks * 512] if os.path.lexists(file) else []
    return taken if taken and Segment.discard(name) else []


def _payloads(name: str) -> list[int]:
    try:
        current = Segment.attach(name, read_only=True)
        nonce, inode = current.nonce, os.fstat(current.fd).st_ino
    except WorkerNotFound:
        nonce, inode = -1, -1
    found = [posix_name for posix_name, of_nonce, _, _ in names.spill_files(name) if of_nonce != nonce]
    return _remove(found, lambda fd: True) if found and not _is_mapped(name, inode) else []


def _chimes(name: str) -> list[int]:
    try:
        nonce = Segment.attach(name, read_only=True).nonce
    except WorkerNotFound:
        nonce = -1
    found = [posix_name for posix_name, of_nonce, _, _ in names.chime_files(name) if of_nonce != nonce]
    return [0 for posix_name in found if _is_own_fifo(posix_name) and names.unlink(posix_name)]


def _is_own_fifo(posix_name: str) -> bool:
    with contextlib.suppress(OSError):
        status = os.lstat(names.shm_path(posix_name))
        return stat.S_ISFIFO(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _temporaries(name: str) -> list[int]:
    gone = [file for file in names.leftover_temporaries(name) if (maker := names.maker(file)) and not os.path.exists(f"/proc/{maker}")]
    return _remove(gone, lambda fd: lib.gw_is_locked(fd, lib.GW_SUPERVISOR_LOCK) == 0)


def _remove(posix_names: list[str], may_go: Callable[[int], bool]) -> list[int]:
    """Removes those that are files of this user's. -> the memory that each took."""
    sizes = []
    for posix_name in posix_names:
        with contextlib.suppress(OSError):
            fd = files.open_(posix_name, read_only=False)
            try:
                status = os.fstat(fd)
                if status.st_uid == os.geteuid() and may_go(fd) and names.unlink(posix_name):
                    sizes.append(status.st_blocks * 512)
            finally:
                os.close(fd)
    return sizes


def _is_mapped(name: str, current_inode: int) -> bool:
    """Whether a process that we may look into has a segment mapped that once bore the name."""
    path = re.compile(rf"{names.SHM_DIR}/{names.PREFIX}{name}(?:\.new-[^ ]*)?(?: \(deleted\))?\n".encode())  # a segment is made under another name
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            for line in maps:
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and path.fullmatch(fields[5]) and int(fields[4]) != current_inode:
                    return True
    return False
