"""Several processes at once, each with its share of the texts; vectors and times land in memory that they share with their parent."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait

import numpy as np

from .model import DIMENSIONS
from .usage import Memory, cpu_s, machine_cpu_s

READY_TIMEOUT_S = 120.0
LEAVE_TIMEOUT_S = 5.0
PR_SET_PDEATHSIG = 1
fork = multiprocessing.get_context("fork")

# Texts in, their vectors out in the same order. `map(one, texts)` asks for a text only when it has answered the one before.
Embed = Callable[[Iterable[str]], Iterator[np.ndarray]]


class FleetError(Exception):
    """A process of the fleet failed; its own traceback is on stderr."""


@dataclass(frozen=True)
class Way:
    """One way to have texts embedded, used by `processes` processes."""

    label: str
    processes: int
    open: Callable[[], Embed]  # called in each process before the clock starts
    servers: tuple[int, ...] = ()  # pids of what they call
    outside: bool = False  # the processes stand for visitors of a service: what they take is not counted as its cost


@dataclass(frozen=True)
class Result:
    """`cpu_s` and `memory` are those of all processes that count; `foreign` is the CPU time that others on the machine had, per second."""

    vectors: np.ndarray  # (texts, 384)
    latency_ms: np.ndarray  # (texts,)
    seconds: float
    cpu_s: float
    memory: Memory  # half way through
    foreign: float


class Shared:
    """Results in anonymous memory that forked processes share with their parent."""

    def __init__(self, texts: int, members: int) -> None:
        self.vectors = shared_array((texts, DIMENSIONS), np.float32)
        self.latency_ns = shared_array((texts,), np.int64)  # 0: not answered yet
        self.cpu_ns = shared_array((members,), np.int64)


def shared_array(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


def embed_all(texts: list[str], ways: list[Way], advance: Callable[[int], None]) -> Result:
    """Embeds each text once, all ways at the same time; calls `advance(number answered)` now and then. Raises FleetError."""
    way_of = [way for way in ways for _ in range(way.processes)]
    counts = np.array([not way.outside for way in way_of])
    servers = {pid for way in ways for pid in way.servers}
    shared = Shared(len(texts), len(way_of))
    together = fork.Barrier(len(way_of) + 1)  # all start together, and stay until all have finished
    members = [
        fork.Process(target=member, args=(texts, way, number, shared, together, os.getpid()), daemon=True) for number, way in enumerate(way_of)
    ]
    try:
        for process in members:
            process.start()
        try:
            together.wait(READY_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise FleetError("a process could not get ready") from None
        started, machine_before, servers_before = time.monotonic(), machine_cpu_s(), cpu_s(servers)
        watch(members, shared, len(texts) // 2, advance)
        memory = Memory.of(servers | {process.pid or 0 for process, count in zip(members, counts, strict=True) if count})
        watch(members, shared, len(texts), advance)
        seconds, machine, served = time.monotonic() - started, machine_cpu_s() - machine_before, cpu_s(servers) - servers_before
        together.wait(LEAVE_TIMEOUT_S)
        for process in members:
            process.join(LEAVE_TIMEOUT_S)
    finally:
        for process in members:
            if process.pid:
                process.kill()
                process.join()
    member_cpu_s = shared.cpu_ns / 1e9
    foreign = max(machine - served - float(member_cpu_s.sum()), 0.0) / seconds
    return Result(shared.vectors, shared.latency_ns / 1e6, seconds, served + float(member_cpu_s[counts].sum()), memory, foreign)


def watch(members: list[multiprocessing.Process], shared: Shared, until: int, advance: Callable[[int], None]) -> None:
    """Returns when `until` texts are answered."""
    while (answered := int(np.count_nonzero(shared.latency_ns))) < until:
        advance(answered)
        wait([process.sentinel for process in members if process.is_alive()], timeout=0.05)
        if any(process.exitcode for process in members):
            raise FleetError("a process failed while it was embedding texts")
    advance(answered)


def member(texts: list[str], way: Way, number: int, shared: Shared, together: threading.Barrier, parent: int) -> None:
    """What process `number` of the fleet does: every so many-th text."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    try:
        embed = way.open()
    except BaseException:
        together.abort()
        raise
    sent: deque[tuple[int, int]] = deque()

    def mine() -> Iterator[str]:
        for index in range(number, len(texts), len(shared.cpu_ns)):
            sent.append((index, time.monotonic_ns()))
            yield texts[index]

    together.wait()
    before_ns = time.process_time_ns()
    for vector in embed(mine()):
        index, started_ns = sent.popleft()
        shared.vectors[index] = vector
        shared.cpu_ns[number] = time.process_time_ns() - before_ns
        shared.latency_ns[index] = time.monotonic_ns() - started_ns
    together.wait()


def end_with_parent(parent: int, how: int = signal.SIGKILL) -> None:
    """Has the kernel send us `how` when the process that forked us dies, whatever it dies of."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
