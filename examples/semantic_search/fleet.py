"""Several processes at once, each taking the next text that none has taken yet; vectors and times land in memory they share."""

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

from .handler import DIMENSIONS
from .memory import Memory

READY_TIMEOUT_S = 120.0
LEAVE_TIMEOUT_S = 5.0
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
    deployment: Callable[[list[int]], list[int]]  # of these processes' pids: the pids of all that such a service consists of


@dataclass(frozen=True)
class Result:
    vectors: np.ndarray  # (texts, 384)
    latency_ms: np.ndarray  # (texts,)
    way: np.ndarray  # (texts,): the number of the way that embedded it
    seconds: float
    memory: Memory  # of all processes that the ways consist of, taken half way through


class Shared:
    """Results in anonymous memory that forked processes share with their parent."""

    def __init__(self, count: int) -> None:
        self.next = fork.Value("q", 0)  # number of texts taken
        self.vectors = shared_array((count, DIMENSIONS), np.float32)
        self.latency_ns = shared_array((count,), np.int64)  # 0: not answered yet
        self.way = shared_array((count,), np.int8)

    def take(self) -> int:
        with self.next.get_lock():
            self.next.value += 1
            return int(self.next.value) - 1


def shared_array(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


def embed_all(texts: list[str], ways: list[Way], advance: Callable[[int], None]) -> Result:
    """Embeds each text once, all ways at the same time; calls `advance(number answered)` now and then. Raises FleetError."""
    shared = Shared(len(texts))
    start = fork.Barrier(sum(way.processes for way in ways) + 1)
    fleet = [
        [fork.Process(target=member, args=(texts, number, way, shared, start, os.getpid()), daemon=True) for _ in range(way.processes)]
        for number, way in enumerate(ways)
    ]
    members = [process for processes in fleet for process in processes]
    try:
        for process in members:
            process.start()
        try:
            start.wait(READY_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise FleetError("a process could not get ready") from None
        started = time.monotonic()
        watch(members, shared, len(texts) // 2, advance)
        pids = {pid for way, processes in zip(ways, fleet, strict=True) for pid in way.deployment([process.pid or 0 for process in processes])}
        memory = Memory.of(pids)
        watch(members, shared, len(texts), advance)
        seconds = time.monotonic() - started
        for process in members:
            process.join(LEAVE_TIMEOUT_S)
    finally:
        for process in members:
            if process.pid:
                process.kill()
                process.join()
    return Result(shared.vectors, shared.latency_ns / 1e6, shared.way, seconds, memory)


def watch(members: list[multiprocessing.Process], shared: Shared, until: int, advance: Callable[[int], None]) -> None:
    """Returns when `until` texts are answered."""
    while (answered := int(np.count_nonzero(shared.latency_ns))) < until:
        advance(answered)
        wait([process.sentinel for process in members if process.is_alive()], timeout=0.05)
        if any(process.exitcode for process in members):
            raise FleetError("a process failed while it was embedding texts")
    advance(answered)


def member(texts: list[str], number: int, way: Way, shared: Shared, start: threading.Barrier, parent: int) -> None:
    """What each process of the fleet does."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    try:
        embed = way.open()
    except BaseException:
        start.abort()
        raise
    taken: deque[tuple[int, int]] = deque()

    def next_texts() -> Iterator[str]:
        while (index := shared.take()) < len(texts):
            taken.append((index, time.monotonic_ns()))
            yield texts[index]

    start.wait()
    for vector in embed(next_texts()):
        index, started_ns = taken.popleft()
        shared.vectors[index] = vector
        shared.way[index] = number
        shared.latency_ns[index] = time.monotonic_ns() - started_ns


def end_with_parent(parent: int, how: int = signal.SIGKILL) -> None:
    """Has the kernel send us `how` when the process that forked us dies, whatever it dies of."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, how)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
