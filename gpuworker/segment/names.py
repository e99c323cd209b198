"""What the files in /dev/shm are called: one segment per worker, spill files beside it, temporaries while one is made."""

from __future__ import annotations

import os
import re

import posix_ipc

from gpuworker.errors import SegmentError

SHM_DIR = "/dev/shm"  # where glibc's shm_open, and so posix_ipc, keeps its objects on Linux
PREFIX = "gpuworker-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_FILE = re.compile(rf"{PREFIX}([A-Za-z0-9][A-Za-z0-9_-]{{0,99}})")
BESIDE = re.compile(rf"{PREFIX}([A-Za-z0-9][A-Za-z0-9_-]{{0,99}})\.(?:spill-.*|chime-.*|new-(\d+)-[0-9a-f]+)")
"""A file beside a segment: the worker's name, and for a half-made segment the pid of its maker."""
OURS = re.compile(rf"{_FILE.pattern}(?:\.(?:spill|chime|new)-.*)?")
"""Any of our files: the worker's name."""
_SPILL = re.compile(r"\.spill-([0-9a-f]{1,16})-(\d{1,4})-(\d{1,15})-[qr]")  # no more digits than ours have: others' names are not ours to read

_CHIME = re.compile(r"\.chime-([0-9a-f]{1,16})-(\d{1,4})-(\d{1,19})")


def shm_name(name: str) -> str:
    """The POSIX name of a worker's segment. Raises ValueError for a name that is not letters, digits, `-` and `_` (at most 100)."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"worker name {name!r}: use 1 to 100 letters, digits, '-' and '_', starting with a letter or digit")
    return f"/{PREFIX}{name}"


def shm_path(posix_name: str) -> str:
    """The file behind a POSIX shared-memory name."""
    return SHM_DIR + posix_name


def spill_name(name: str, nonce: int, slot: int, generation: int, kind: str) -> str:
    """The POSIX name of the file that carries what does not fit slot `slot` of the segment with this nonce in its life `generation`.

    kind: "q" request, "r" response.
    """
    return f"{shm_name(name)}.spill-{nonce:x}-{slot}-{generation}-{kind}"


def spill_files(name: str) -> list[tuple[str, int, int, int]]:
    """(POSIX name, nonce, slot, generation) of every spill file of this worker."""
    prefix = shm_name(name)[1:]
    found = []
    for file in listing():
        match = _SPILL.fullmatch(file, len(prefix)) if file.startswith(prefix) else None
        if match:
            found.append((f"/{file}", int(match[1], 16), int(match[2]), int(match[3])))
    return found


def chime_prefix(name: str, nonce: int) -> str:
    """What the POSIX names of all FIFOs beside the segment with this nonce begin with; place and incarnation of a participant follow, as PLACE-INCARNATION."""
    return f"{shm_name(name)}.chime-{nonce:x}-"


def chime_files(name: str) -> list[tuple[str, int, int, int]]:
    """(POSIX name, nonce, place, incarnation) of every FIFO of this worker."""
    prefix = shm_name(name)[1:]
    found = []
    for file in listing():
        match = _CHIME.fullmatch(file, len(prefix)) if file.startswith(prefix) else None
        if match:
            found.append((f"/{file}", int(match[1], 16), int(match[2]), int(match[3])))
    return found


def worker_names() -> list[str]:
    """Names of all segments on this machine, dead or alive, of any user."""
    return sorted(match[1] for match in map(_FILE.fullmatch, listing()) if match)


def temporary_name(name: str) -> str:
    """A new POSIX name for a segment that this process is making."""
    return f"{shm_name(name)}.new-{os.getpid()}-{os.urandom(4).hex()}"


def leftover_temporaries(name: str) -> list[str]:
    """POSIX names of half-made segments of this worker."""
    prefix = shm_name(name)[1:] + ".new-"
    return [f"/{file}" for file in listing() if file.startswith(prefix)]


def maker(temporary: str) -> str:
    """The pid of who makes, or made, a half-made segment; empty for a name that is none."""
    match = BESIDE.fullmatch(temporary[1:])
    return match[2] or "" if match else ""


def unlink(posix_name: str) -> bool:
    """Removes the object, if it is there and ours to remove. Whether it did: somebody else's file under one of our names is no reason to fail."""
    try:
        posix_ipc.unlink_shared_memory(posix_name)
    except (posix_ipc.Error, OSError):
        return False
    return True


def listing() -> list[str]:
    """All files in /dev/shm. Raises SegmentError."""
    try:
        return os.listdir(SHM_DIR)
    except OSError as error:
        raise SegmentError(f"{SHM_DIR} cannot be listed ({error.strerror}); gpuworker needs POSIX shared memory there: mount a tmpfs") from error
