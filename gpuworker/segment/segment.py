"""One mapped segment: how it is created, owned, attached to and given up.

Two locks, each on a byte of the segment's lock range, held for life and dropped by the kernel at their holder's death, however it dies. Who holds the
supervisor's has the name to itself: it makes the segment, keeps an owner running, and removes the segment in the end. Who holds the owner's serves the
ring. An owner without a supervisor holds both.

A new holder that gets the locks of an existing segment knows the old ones are dead: same geometry, it takes the segment over and attached frontends go
on; another geometry, it marks the old one superseded and puts a new one in its place. A segment is made under a temporary name and gets its own only
when it is complete, by link() (fails if somebody was faster) or, with the old one's lock in hand, by rename().
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from gpuworker._native import ffi, lib
from gpuworker.errors import SegmentError, WorkerAlreadyRunning, WorkerNotFound
from gpuworker.segment import files, names
from gpuworker.segment.liveness import Identity, Watch, identify, own_pid_namespace

ORPHAN_S = 3.0
"""An owner whose supervisor was killed ends within this time (worker/__main__.py)."""

_NOT_OURS = {
    -errno.EBADMSG: "it is not a gpuworker segment; remove it, or use another name",
    -errno.EPROTONOSUPPORT: "it was made by another version of gpuworker; use the same version on both sides",
    -errno.ENODATA: "it was cut short; stop its worker, and remove it",
    -errno.EILSEQ: "its header contradicts its size; stop its worker, and remove it",
}


class State(enum.IntEnum):
    """What the owner says of itself."""

    STARTING = lib.GW_STARTING
    SERVING = lib.GW_SERVING
    RESTARTING = lib.GW_RESTARTING
    DRAINING = lib.GW_DRAINING
    STOPPED = lib.GW_STOPPED
    SUPERSEDED = lib.GW_SUPERSEDED
    FAILED = lib.GW_FAILED


def state_name(state: int) -> str:
    """In words, also for a number that is none of them (somebody scribbled)."""
    return State(state).name.lower() if 0 <= state <= State.FAILED else f"in no known state ({state})"


def printable(text: str, but: str = "") -> str:
    """What is in a segment, for terminals, logs and other programs: control characters (but these) and halves of characters become U+FFFD."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in but else "\ufffd" for c in text)


class Geometry(NamedTuple):
    """What a segment is made with and keeps: what fixes its size, and the group that may use it (-1: only its user)."""

    capacity: int = 256
    max_request_bytes: int = 65536
    max_response_bytes: int = 65536
    max_participants: int = 128
    max_payload_bytes: int = 64 << 20
    gid: int = -1

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
        self._lock_fd = -1
        try:
            status = os.fstat(fd)
            size, self.gid, self.is_own = status.st_size, files.shared_with(status), status.st_uid == os.geteuid()
            with files.explained(f"the segment of worker {name!r} cannot be mapped"):
                self._map = files.map_(fd, size, read_only) if size else None
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
        lib.gw_set_chimes(self.port, names.shm_path(names.chime_prefix(name, self.nonce)).encode(), self.gid)
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
        self._watches: dict[int, tuple[int, Watch]] = {}

    @classmethod
    def attach(cls, name: str, read_only: bool = False, gid: int = -1) -> Segment:
        """Maps the segment of a worker. gid: the group whose members' workers are trusted like our own.

        Raises WorkerNotFound when there is none, SegmentError when it is not safe to use.
        """
        posix_name = names.shm_name(name)
        with files.explained(f"the segment of worker {name!r} cannot be used"):
            try:
                fd = files.open_(posix_name, read_only)
            except FileNotFoundError:
                raise WorkerNotFound(f"no worker named {name!r} is running; start it, or see `gpuworker list`") from None
            except PermissionError:
                whose = "belongs to another user, or to a group that this process is not in"
                raise SegmentError(f"the segment of worker {name!r} {whose}; run both sides as the same user, or in one group") from None
        problem = files.refusal(os.fstat(fd), gid)
        if problem:
            os.close(fd)
            raise SegmentError(f"the segment of worker {name!r} is refused: {problem}")
        return cls(name, fd, read_only)

    @classmethod
    def own(cls, name: str, geometry: Geometry) -> Segment:
        """`hold` and `become_owner`: for an owner without a supervisor."""
        segment = cls.hold(name, geometry)
        segment.become_owner()
        return segment

    @classmethod
    def hold(cls, name: str, geometry: Geometry) -> Segment:
        """Creates the segment, or takes over that of the dead; the caller has its name to itself until `retire` or death.

        Raises WorkerAlreadyRunning (with the pid) for a live holder, SegmentError when the memory is not there or the file is not ours.
        """
        while True:
            try:
                old = cls.attach(name)
            except WorkerNotFound:
                old = None
            lock_fd = -1
            if old is not None:
                lock_fd = old._reopen()
                if not old._lock_as_holder(lock_fd):
                    os.close(lock_fd)
                    raise WorkerAlreadyRunning(name, old._pid_here(old.supervisor()) or old._pid_here(old.owner()))
                if not old.is_current():  # replaced between open and lock
                    os.close(lock_fd)
                    continue
                if old.geometry() == geometry and old.overview().state != State.SUPERSEDED:
                    return old._become_holder(lock_fd)
            try:
                new = cls._create(name, geometry, old)
            finally:
                if old is not None:
                    os.close(lock_fd)
            if new is not None:
                return new

    @classmethod
    def discard(cls, name: str, patience_s: float = 0.0) -> bool:
        """Removes the segment of the dead, telling whoever still waits. False when there is none, or when its owner or supervisor lives. Raises
        SegmentError."""
        try:
            segment = cls.attach(name)
        except WorkerNotFound:
            return False
        lock_fd = segment._reopen()
        try:
            if not segment._lock_as_holder(lock_fd, patience_s) or not segment.is_current():
                return False
            segment.retire()
            return True
        finally:
            os.close(lock_fd)

    def _lock_as_holder(self, lock_fd: int, patience_s: float = ORPHAN_S) -> bool:
        """The supervisor's lock, and proof that there is no owner; an owner whose supervisor has died is about to end and is waited for."""
        if lib.gw_try_lock(lock_fd, lib.GW_SUPERVISOR_LOCK):
            return False
        if not _lock_as_owner(lock_fd, patience_s):
            lib.gw_unlock(lock_fd, lib.GW_SUPERVISOR_LOCK)
            return False
        lib.gw_unlock(lock_fd, lib.GW_OWNER_LOCK)
        return True

    def become_owner(self) -> None:
        """Takes the owner's lock, which must be free but for the last moments of the owner before. Raises WorkerAlreadyRunning."""
        lock_fd = self._lock_fd if self._lock_fd >= 0 else self._reopen()
        if not _lock_as_owner(lock_fd, ORPHAN_S):
            raise WorkerAlreadyRunning(self.name, self._pid_here(self.owner()))
        self._keep_lock(lock_fd)
        self._introduce(lib.gw_set_owner)

    @contextlib.contextmanager
    def in_place_of_owner(self) -> Iterator[None]:
        """For a supervisor whose owner is dead: nobody else owns the segment within the block. Raises SegmentError when somebody else holds its lock."""
        if not _lock_as_owner(self._lock_fd, ORPHAN_S):  # proved dead, so its lock is about to go
            raise SegmentError(f"a process that is not the owner of worker {self.name!r} holds the owner's lock")
        try:
            yield
        finally:
            lib.gw_unlock(self._lock_fd, lib.GW_OWNER_LOCK)

    def is_orphan(self) -> bool:
        """For an owner, or one that would have been: whether nobody else looks after the segment any more. If so the caller holds it now."""
        if self._lock_fd < 0:
            return self._lock_as_holder(self.fd, patience_s=0)
        for _ in range(20):  # the dead supervisor's lock is about to go; or another of its orphans looks at it
            if not lib.gw_try_lock(self._lock_fd, lib.GW_SUPERVISOR_LOCK):
                return True
            overview = self.overview()
            if not self._is_dead(lib.GW_SUPERVISOR_LOCK, overview.supervisor_epoch, overview.supervisor):
                break
            time.sleep(0.001)
        return False

    def retire(self) -> None:
        """Tells everybody that this segment is served no more, and removes its file. For its holder."""
        lib.gw_set_state(self.port, State.STOPPED)
        self.unlink()
        lib.gw_wake_all(self.port)

    @classmethod
    def _create(cls, name: str, geometry: Geometry, old: Segment | None) -> Segment | None:
        temporary, path = names.temporary_name(name), names.shm_path(names.shm_name(name))
        g, new = geometry, None
        with files.explained(f"the segment of worker {name!r} cannot be made"):
            cls._remove_leftovers(name)
            fd = files.create(temporary, g.segment_bytes, g.gid, "shrink capacity, max_request_bytes or max_response_bytes, or enlarge /dev/shm")
            try:
                with files.map_(fd, g.segment_bytes) as fresh:
                    base = ffi.from_buffer(fresh)
                    nonce = int.from_bytes(os.urandom(8), "little")
                    lib.gw_format(base, g.capacity, g.max_participants, g.max_request_bytes, g.max_response_bytes, g.max_payload_bytes, nonce)
                    ffi.release(base)
                new = cls(name, os.dup(fd))
                lock_fd = new._reopen()
                lib.gw_try_lock(lock_fd, lib.GW_SUPERVISOR_LOCK)  # nobody else knows the file
                new._become_holder(lock_fd)
                if old is None:
                    os.link(names.shm_path(temporary), path)
                else:
                    os.rename(names.shm_path(temporary), path)
                    lib.gw_set_state(old.port, State.SUPERSEDED)
                    lib.gw_wake_all(old.port)
                return new
            except BaseException as error:
                if new is not None:
                    new.close()
                if isinstance(error, (FileExistsError, FileNotFoundError)):
                    return None  # another owner was faster, or took ours for a leftover: look again
                raise
            finally:
                os.close(fd)
                names.unlink(temporary)

    @classmethod
    def _remove_leftovers(cls, name: str) -> None:
        """Half-made segments whose makers are dead: nobody holds their lock."""
        for leftover in names.leftover_temporaries(name):
            with contextlib.suppress(OSError):
                fd = os.open(names.shm_path(leftover), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
                if lib.gw_is_locked(fd, lib.GW_SUPERVISOR_LOCK) == 0:
                    names.unlink(leftover)
                os.close(fd)

    def _become_holder(self, lock_fd: int) -> Segment:
        self._keep_lock(lock_fd)
        lib.gw_set_state(self.port, State.STARTING)
        lib.gw_set_note(self.port, b"", 0)
        lib.gw_set_paused(self.port, 0)  # whoever starts a worker wants it to run; an owner that is started again stays paused
        self._introduce(lib.gw_set_supervisor)
        return self

    def _introduce(self, set_identity: Any) -> None:
        with files.explained(f"worker {self.name!r} cannot start"):
            set_identity(self.port, *identify())

    def _keep_lock(self, lock_fd: int) -> None:
        self._lock_fd = lock_fd
        lib.gw_keep_lock(self.port, lock_fd)  # and no forked child of ours does

    def join(self) -> bool:
        """Makes this process a participant. False when every place is taken; that of a client that left is free again soon after its last request is gone."""
        with files.explained(f"worker {self.name!r} cannot be joined"):
            me = identify()
        lock_fd = lib.gw_open_lock(self.port, self.fd)
        if lock_fd < 0:
            raise SegmentError(f"worker {self.name!r} cannot be joined: {os.strerror(-lock_fd)}")
        if lib.gw_join(self.port, lock_fd, *me):
            os.close(lock_fd)
            return False
        return True

    def leave(self) -> None:
        """Gives up this process's place; the owner takes back what it held."""
        lib.gw_leave(self.port)

    def unlink(self) -> None:
        """Removes the segment's file, if it is still this segment's. For its holder."""
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
        return Geometry(o.capacity, o.request_bytes, o.response_bytes, o.max_participants, o.max_payload_bytes, self.gid)

    def info(self) -> bytes:
        """What the owner says of itself, as JSON."""
        size = lib.GW_INFO_BYTES
        out = ffi.new("char[]", size)
        return bytes(ffi.buffer(out, max(lib.gw_read_info(self.port, out, size), 0)))

    def note(self) -> str:
        """Why the last owner died, or why a reload failed; empty when nothing did."""
        out = ffi.new("char[]", lib.GW_NOTE_BYTES)
        return printable(
            bytes(ffi.buffer(out, max(lib.gw_read_note(self.port, out, lib.GW_NOTE_BYTES), 0))).decode(errors="replace").expandtabs(4), "\n"
        )

    def owner(self) -> Identity:
        """Who owns the segment, or did last."""
        return _identity(self.overview().owner)

    def supervisor(self) -> Identity:
        """Who keeps an owner running, or did last; an owner without a supervisor is its own."""
        return _identity(self.overview().supervisor)

    def owner_is_dead(self) -> bool:
        """Whether the kernel proves that the owner of the segment is gone. Its supervisor may be about to start another."""
        overview = self.overview()
        return self._is_dead(lib.GW_OWNER_LOCK, overview.epoch, overview.owner)

    def is_dead(self) -> bool:
        """Whether the owner is gone, and nobody is left who would start another."""
        overview = self.overview()
        return self._is_dead(lib.GW_OWNER_LOCK, overview.epoch, overview.owner) and self._is_dead(
            lib.GW_SUPERVISOR_LOCK, overview.supervisor_epoch, overview.supervisor
        )

    def _is_dead(self, lock: int, epoch: int, identity: Any) -> bool:
        if epoch & 1:  # somebody new is introducing itself, or died doing so
            return bool(lib.gw_is_locked(self.fd, lock) == 0)
        known = self._watches.get(lock)
        if known is None or known[0] != epoch:
            known = self._watches[lock] = (epoch, Watch(_identity(identity), self.fd, lock))
        return known[1].is_dead()

    def _pid_here(self, who: Identity) -> int:
        """0 where the pid belongs to another pid namespace."""
        return who.pid if who.pid_namespace == own_pid_namespace() else 0

    def _reopen(self) -> int:
        """A descriptor with an open file description of its own, which locks need; works also after the name is gone."""
        with files.explained(f"the segment of worker {self.name!r} cannot be opened again"):
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


def _lock_as_owner(lock_fd: int, patience_s: float) -> bool:
    """The owner's lock, when it is free within this time: the kernel drops it a moment after its holder's death is known."""
    give_up = time.monotonic() + patience_s
    while lib.gw_try_lock(lock_fd, lib.GW_OWNER_LOCK):
        if time.monotonic() >= give_up:
            return False
        time.sleep(0.001)
    return True


def _identity(c: Any) -> Identity:
    return Identity(c.pid, c.start_ticks, c.pid_namespace)
