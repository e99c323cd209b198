"""One mapped segment: how it is created, owned, attached to and given up.

Ownership is an exclusive lock on byte 0 of the segment's lock range, held by the owner for life and dropped by the kernel at its death, however it
dies. A new owner that gets the lock of an existing segment knows the old one is dead: same geometry, it takes the segment over and attached
frontends go on; another geometry, it marks the old one superseded and puts a new one in its place. A segment is made under a temporary name and
gets its own only when it is complete, by link() (fails if somebody was faster) or, with the old one's lock in hand, by rename().
"""

from __future__ import annotations

import contextlib
import enum
import errno
import mmap
import os
import stat
from typing import Any, NamedTuple

import posix_ipc

from gpuworker._native import ffi, lib
from gpuworker.errors import SegmentError, WorkerAlreadyRunning, WorkerNotFound
from gpuworker.segment import names
from gpuworker.segment.liveness import Identity, Watch, identify

_NOT_OURS = {
    -errno.EBADMSG: "it is not a gpuworker segment, or a half-made one",
    -errno.EPROTONOSUPPORT: "it was made by another version of gpuworker; use the same version on both sides",
    -errno.ELIBACC: "it was made with another C library (semaphores differ); use the same base image on both sides",
    -errno.EILSEQ: "its header contradicts its size; stop its worker and remove it",
}


class State(enum.IntEnum):
    """What the owner says of itself."""

    STARTING = lib.GW_STARTING
    SERVING = lib.GW_SERVING
    DRAINING = lib.GW_DRAINING
    STOPPED = lib.GW_STOPPED
    SUPERSEDED = lib.GW_SUPERSEDED


def state_name(state: int) -> str:
    """In words, also for a number that is none of them (somebody scribbled)."""
    return State(state).name.lower() if 0 <= state <= State.SUPERSEDED else f"in no known state ({state})"


class Geometry(NamedTuple):
    """What fixes the size of a segment."""

    capacity: int = 256
    max_request_bytes: int = 65536
    max_response_bytes: int = 65536
    max_participants: int = 128
    max_payload_bytes: int = 64 << 20

    @property
    def segment_bytes(self) -> int:
        """Bytes of shared memory that a segment of this geometry takes."""
        return int(lib.gw_segment_bytes(self.capacity, self.max_participants, self.max_request_bytes, self.max_response_bytes))


class Segment:
    """A mapping of a worker's segment in this process, and this process's port to it.

    `port` is the C handle that all ring calls take; `requests[i]` and `responses[i]` are memoryviews of slot i's areas; nothing is unmapped while one
    of them lives. `request_buffers` and `response_buffers` show the same areas three times faster to slice into bytes, and are for that only: they
    do not keep the mapping alive.
    """

    def __init__(self, name: str, fd: int, read_only: bool = False) -> None:
        self.name, self.fd = name, fd
        self.port: Any = None
        try:
            size = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE) if size else None
            base = ffi.from_buffer(self._map) if self._map is not None else ffi.NULL
            port = ffi.new("gw_port *")
            problem = (lib.gw_check(base, size) or lib.gw_open(port, base, size)) if size else -errno.EBADMSG
            if problem:
                raise SegmentError(f"the segment of worker {name!r} cannot be used: {_NOT_OURS.get(problem, os.strerror(-problem))}")
        except BaseException:
            self.close()
            raise
        self._base, self.port = base, port
        self.capacity: int = self.port.capacity
        self.nonce: int = self.overview().nonce
        self.request_bytes: int = self.port.request_bytes
        self.response_bytes: int = self.port.response_bytes
        whole = memoryview(self._map)  # type: ignore[arg-type]
        start, stride = int(ffi.cast("char *", self.port.areas) - ffi.cast("char *", base)), self.request_bytes + self.response_bytes
        areas = [whole[start + i * stride : start + (i + 1) * stride] for i in range(self.capacity)]
        self.requests = [area[: self.request_bytes] for area in areas]
        self.responses = [area[self.request_bytes :] for area in areas]
        first = self.port.areas
        self.request_buffers = [ffi.buffer(first + i * stride, self.request_bytes) for i in range(self.capacity)]
        self.response_buffers = [ffi.buffer(first + i * stride + self.request_bytes, self.response_bytes) for i in range(self.capacity)]
        self._owner_watch: tuple[int, Watch] | None = None

    @classmethod
    def attach(cls, name: str, read_only: bool = False) -> Segment:
        """Maps the segment of a worker. Raises WorkerNotFound when there is none, SegmentError when it is not safe to use."""
        posix_name = names.shm_name(name)
        try:
            if not stat.S_ISREG(os.lstat(names.shm_path(posix_name)).st_mode):  # opening a FIFO would wait for its other end
                raise SegmentError(f"the segment of worker {name!r} cannot be used: something else than a file bears its name")
            fd = posix_ipc.SharedMemory(posix_name, read_only=read_only).fd
        except (posix_ipc.ExistentialError, FileNotFoundError):
            raise WorkerNotFound(f"no worker named {name!r} is running; start it, or see `gpuworker list`") from None
        except (posix_ipc.PermissionsError, PermissionError):
            raise SegmentError(f"the segment of worker {name!r} belongs to another user; run both sides as the same user") from None
        except OSError as error:  # e.g. ELOOP: a symlink in the way
            raise SegmentError(f"the segment of worker {name!r} cannot be opened: {error.strerror}") from None
        _require_private(name, fd)
        return cls(name, fd, read_only)

    @classmethod
    def own(cls, name: str, geometry: Geometry) -> Segment:
        """Creates the segment, or takes over a dead owner's; the caller is its exclusive owner until `unlink` or death.

        Raises WorkerAlreadyRunning (with the pid) for a live owner, SegmentError when the memory is not there or the file is not ours.
        """
        while True:
            try:
                old = cls.attach(name)
            except WorkerNotFound:
                old = None
            lock_fd = -1
            if old is not None:
                lock_fd = old._reopen()
                if lib.gw_try_lock(lock_fd, 0):
                    os.close(lock_fd)
                    owner = old.owner()
                    raise WorkerAlreadyRunning(name, owner.pid if owner.pid_namespace == identify().pid_namespace else 0)
                if not old.is_current():  # replaced between open and lock
                    os.close(lock_fd)
                    continue
                if old.geometry() == geometry and old.overview().state != State.SUPERSEDED:
                    return old._become_owner(lock_fd)
            new = cls._create(name, geometry, old)
            if old is not None:
                os.close(lock_fd)
            if new is not None:
                return new

    @classmethod
    def discard(cls, name: str) -> bool:
        """Removes the segment of a dead owner, telling whoever still waits. False when there is none, or when its owner lives. Raises SegmentError."""
        try:
            segment = cls.attach(name)
        except WorkerNotFound:
            return False
        lock_fd = segment._reopen()
        try:
            if lib.gw_try_lock(lock_fd, 0) or not segment.is_current():
                return False
            segment.retire()
            return True
        finally:
            os.close(lock_fd)

    def retire(self) -> None:
        """Tells everybody that this segment is served no more, and removes its file. For its owner."""
        lib.gw_set_state(self.port, State.STOPPED)
        self.unlink()
        lib.gw_wake_all(self.port)

    @classmethod
    def _create(cls, name: str, geometry: Geometry, old: Segment | None) -> Segment | None:
        posix_name = names.shm_name(name)
        cls._remove_leftovers(name)
        temporary = names.temporary_name(name)
        fd = posix_ipc.SharedMemory(temporary, posix_ipc.O_CREX, mode=0o600).fd
        try:
            os.fchmod(fd, 0o600)  # whatever the umask
            reserve(fd, geometry.segment_bytes, "shrink capacity, max_request_bytes or max_response_bytes, or enlarge /dev/shm")
            with mmap.mmap(fd, geometry.segment_bytes) as fresh:
                base = ffi.from_buffer(fresh)
                g = geometry
                nonce = int.from_bytes(os.urandom(8), "little")
                lib.gw_format(base, g.capacity, g.max_participants, g.max_request_bytes, g.max_response_bytes, g.max_payload_bytes, nonce)
                ffi.release(base)
            new = cls(name, os.dup(fd))
            new._become_owner(new._reopen(), locked=False)
            if old is None:
                os.link(names.shm_path(temporary), names.shm_path(posix_name))
            else:
                os.rename(names.shm_path(temporary), names.shm_path(posix_name))
                lib.gw_set_state(old.port, State.SUPERSEDED)
                lib.gw_wake_all(old.port)
        except (FileExistsError, FileNotFoundError):
            new.close()
            return None  # another owner was faster, or took ours for a leftover: look again
        finally:
            os.close(fd)
            names.unlink(temporary)
        return new

    @classmethod
    def _remove_leftovers(cls, name: str) -> None:
        """Half-made segments whose makers are dead: nobody holds their lock."""
        for leftover in names.leftover_temporaries(name):
            with contextlib.suppress(OSError):
                fd = os.open(names.shm_path(leftover), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
                if lib.gw_is_locked(fd, 0) == 0:
                    names.unlink(leftover)
                os.close(fd)

    def _become_owner(self, lock_fd: int, locked: bool = True) -> Segment:
        if not locked and lib.gw_try_lock(lock_fd, 0):
            raise SegmentError(f"cannot lock the new segment of worker {self.name!r}")
        lib.gw_keep_lock(self.port, lock_fd)  # and no forked child of the owner does
        lib.gw_set_state(self.port, State.STARTING)
        lib.gw_set_owner(self.port, *identify())
        return self

    def join(self) -> bool:
        """Makes this process a participant. False when every place is taken; that of a client that left is free again soon after its last request is gone."""
        me = identify()
        lock_fd = self._reopen()
        if lib.gw_join(self.port, lock_fd, *me):
            os.close(lock_fd)
            return False
        return True

    def leave(self) -> None:
        """Gives up this process's place; the owner takes back what it held."""
        lib.gw_leave(self.port)

    def unlink(self) -> None:
        """Removes the segment's file, if it is still this segment's. For its owner."""
        if self.is_current():
            names.unlink(names.shm_name(self.name))

    def is_current(self) -> bool:
        """Whether the worker's name still leads to this segment."""
        try:
            path, mine = os.stat(names.shm_path(names.shm_name(self.name)), follow_symlinks=False), os.fstat(self.fd)
        except FileNotFoundError:
            return False
        return (path.st_dev, path.st_ino) == (mine.st_dev, mine.st_ino)

    def overview(self) -> Any:
        """A snapshot of the header: the C struct gw_overview."""
        out = ffi.new("gw_overview *")
        lib.gw_read_header(self.port, out)
        return out

    def geometry(self) -> Geometry:
        """The geometry this segment was made with (areas rounded up to cache lines)."""
        o = self.overview()
        return Geometry(o.capacity, o.request_bytes, o.response_bytes, o.max_participants, o.max_payload_bytes)

    def info(self) -> bytes:
        """What the owner says of itself, as JSON."""
        size = lib.GW_INFO_BYTES
        out = ffi.new("char[]", size)
        return bytes(ffi.buffer(out, max(lib.gw_read_info(self.port, out, size), 0)))

    def owner(self) -> Identity:
        """Who owns the segment, or did last."""
        return _identity(self.overview())

    def owner_is_dead(self) -> bool:
        """Whether the kernel proves that the owner of the segment is gone."""
        overview = self.overview()
        epoch = overview.epoch
        if epoch & 1:  # a new owner is introducing itself, or died doing so
            return bool(lib.gw_is_locked(self.fd, 0) == 0)
        if self._owner_watch is None or self._owner_watch[0] != epoch:
            self._owner_watch = (epoch, Watch(_identity(overview), self.fd, 0))
        return self._owner_watch[1].is_dead()

    def _reopen(self) -> int:
        """A descriptor with an open file description of its own, which locks need; works also after the name is gone."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Leaves, and closes the descriptors (an owner's lock with them). The mapping goes when the last view of it does.

        The port stays valid memory and refuses calls: a cycle that holds a segment and requests of it may be finalized in any order.
        """
        if self.port is not None:
            lib.gw_leave(self.port)
            lib.gw_close(self.port)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()


def _identity(overview: Any) -> Identity:
    return Identity(overview.owner.pid, overview.owner.start_ticks, overview.owner.pid_namespace)


def reserve(fd: int, size: int, advice: str) -> None:
    """Reserves memory for the file now, so that a full /dev/shm is an error here and never a SIGBUS later. Raises SegmentError."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        disk = os.statvfs(names.SHM_DIR)
        raise SegmentError(f"{size:,} bytes of shared memory needed, {disk.f_bavail * disk.f_frsize:,} free in {names.SHM_DIR}: {advice}") from None


def _require_private(name: str, fd: int) -> None:
    status = os.fstat(fd)
    problem = None
    if status.st_uid != os.geteuid():
        problem = f"it belongs to user id {status.st_uid}, this process runs as {os.geteuid()}"
    elif status.st_mode & 0o077:
        problem = f"its mode is {status.st_mode & 0o777:04o} and must be 0600: others could read or write the requests"
    if problem:
        os.close(fd)
        raise SegmentError(f"the segment of worker {name!r} is refused: {problem}")
