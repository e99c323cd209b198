"""Files in /dev/shm: made, opened and mapped so that whatever may be wrong with them is one clear SegmentError."""

from __future__ import annotations

import contextlib
import errno
import grp
import mmap
import os
import stat
from collections.abc import Iterator

import posix_ipc

from gpuworker.errors import SegmentError
from gpuworker.segment import names

_NOT_WRITABLE = f"{names.SHM_DIR} is not writable for this user; mount it writable, with mode 1777"
_WHY = {
    errno.EMFILE: "this process has no file descriptor left; raise its limit (ulimit -n)",
    errno.ENFILE: "this machine has no file descriptor left; close some, or raise fs.file-max",
    errno.ENOMEM: "no memory left for this process; raise its limit (ulimit -v) or the container's",
    errno.EFBIG: "it is larger than this process's files may be; raise that limit (ulimit -f)",
    errno.ENOSPC: f"no room for one more file in {names.SHM_DIR}; enlarge it, or remove what is left over (gpuworker doctor --clean)",
    errno.EROFS: _NOT_WRITABLE,
    errno.EACCES: _NOT_WRITABLE,
    errno.ENXIO: "something else than a file bears its name; remove it",
    errno.EISDIR: "something else than a file bears its name; remove it",
    errno.ELOOP: "a symbolic link bears its name; remove it",
}
PRIVATE, SHARED = 0o600, 0o660


def why(error: Exception) -> str:
    """What the operating system refused, in words, and what to do about it."""
    number = getattr(error, "errno", None)
    if number in _WHY:
        return _WHY[number]
    if isinstance(error, posix_ipc.PermissionsError):
        return _NOT_WRITABLE
    if number is not None and number < 0:  # one of the resolver's (socket.gaierror), which no other function knows
        return str(error.strerror).lower()  # type: ignore[attr-defined]
    if number is None and isinstance(error, OSError):  # posix_ipc's way to say so
        return _WHY[errno.EMFILE]
    return (os.strerror(number) if number else str(error)).lower()


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """What the operating system refuses within the block becomes a SegmentError that begins with `what`."""
    try:
        yield
    except (OSError, posix_ipc.Error) as error:
        raise SegmentError(f"{what}: {why(error)}") from None


def create(posix_name: str, size: int, gid: int, advice: str) -> int:
    """A new file of `size` bytes that are really there. -> a descriptor. For this user only, or with `gid` >= 0 also for that group. Raises SegmentError and
    posix_ipc.ExistentialError (one of that name exists, or there is no /dev/shm), and leaves nothing behind then."""
    fd: int = posix_ipc.SharedMemory(posix_name, posix_ipc.O_CREX, mode=PRIVATE).fd
    try:
        if gid >= 0:
            give_to_group(fd, gid)
        os.fchmod(fd, PRIVATE if gid < 0 else SHARED)  # whatever the umask; and the group first
        reserve(fd, size, advice)
    except BaseException:
        os.close(fd)
        names.unlink(posix_name)
        raise
    return fd


def give_to_group(fd: int, gid: int) -> None:
    """Raises SegmentError."""
    try:
        os.fchown(fd, -1, gid)
    except PermissionError:
        raise SegmentError(f"a file cannot be shared with group id {gid}: this process is not a member; add its user to the group") from None


def reserve(fd: int, size: int, advice: str) -> None:
    """Reserves memory for the file now, so that a full /dev/shm is an error here and never a SIGBUS later. Raises SegmentError with `advice`."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise SegmentError(f"{size:,} bytes of shared memory needed: {why(error)}") from None
        disk = os.statvfs(names.SHM_DIR)
        raise SegmentError(f"{size:,} bytes of shared memory needed, {disk.f_bavail * disk.f_frsize:,} free in {names.SHM_DIR}: {advice}") from None


def open_(posix_name: str, read_only: bool) -> int:
    """Opens what is there, if it is a file: never waits (for the other end of a FIFO), never follows a link. Raises OSError."""
    fd = os.open(names.shm_path(posix_name), (os.O_RDONLY if read_only else os.O_RDWR) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, "not a file")
    return fd


def map_(fd: int, size: int, read_only: bool = False) -> mmap.mmap:
    """Maps the file. Raises OSError."""
    return mmap.mmap(fd, size, prot=mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE)


def discard(posix_name: str) -> bool:
    """Removes the file, or where only its maker may (another user's, in a sticky folder) gives its memory back. Whether either was done."""
    if names.unlink(posix_name):
        return True
    with contextlib.suppress(OSError):
        if os.lstat(names.shm_path(posix_name)).st_size:
            fd = open_(posix_name, read_only=False)
            try:
                os.ftruncate(fd, 0)
            finally:
                os.close(fd)
            return True
    return False


def group_id(group: str) -> int:
    """The id of a Unix group: of its name or, where a container's /etc/group has none, its number in digits. Raises ValueError when there is none of that name."""
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, TypeError, ValueError):
        if isinstance(group, str) and group.isascii() and group.isdigit() and len(group) < 10:
            return int(group)
        raise ValueError(f"group={group!r}: no Unix group has this name") from None


def shared_with(status: os.stat_result) -> int:
    """The group that may use the file beside its owner; -1 for none."""
    return status.st_gid if stat.S_IMODE(status.st_mode) == SHARED else -1


def refusal(status: os.stat_result, gid: int) -> str:
    """Why a segment is not safe to use for this process; empty if it is. gid: the group whose members may make segments for us; -1: nobody else."""
    mode, me = stat.S_IMODE(status.st_mode), os.geteuid()
    if status.st_uid != me:
        if gid < 0:
            return (
                f"it belongs to user id {status.st_uid}, this process runs as {me}; run both sides as the same user, or share the worker with a group "
                "(its option `group`, and connect(name, group=...))"
            )
        if status.st_gid != gid:
            return f"it belongs to user id {status.st_uid} and group id {status.st_gid}, and the group to trust is {gid}"
        if mode != SHARED:
            return f"its mode is {mode:04o} and must be {SHARED:04o} for a group to use it"
    elif mode & 0o077 and mode != SHARED:
        return f"its mode is {mode:04o} and must be {PRIVATE:04o}: others could read or write the requests; remove it"
    return ""
