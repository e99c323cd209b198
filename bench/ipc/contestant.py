"""What a contestant is: how to serve and how to call, nothing about measuring."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ipc.cells import Cell
from ipc.machine import die_with_parent

MAX_BATCH_SIZE = 64
CONNECT_LIMIT_S = 10.0
Call = Callable[[Any], Any]


def identity(requests: list[Any]) -> list[Any]:
    """The handler of every server: the model is free, so only the way to it costs."""
    return requests


class Contestant:
    """One way to call a server from N client processes. One instance lives for one cell.

    `token`: a name no other cell uses; what is left of it in /dev/shm is removed by the harness. `directory`: a folder of this cell's own.
    """

    name = ""
    title = ""
    note = ""
    requires: tuple[str, ...] = ()
    ours = False
    is_floor = False
    max_payload_bytes = 1 << 62
    max_clients = 1 << 30

    def __init__(self, cell: Cell, token: str, directory: Path) -> None:
        self.cell, self.token, self.directory = cell, token, directory

    @classmethod
    def prepare(cls) -> None:
        """Once per run, in the harness. Raises ImportError, or whatever tells why this contestant cannot run here."""
        for module in cls.requires:
            if importlib.util.find_spec(module) is None:
                raise ImportError(f"{module} is not installed")

    def open(self) -> None:
        """Before anything is forked: make what the server and the clients inherit."""

    def serve(self, ready: Callable[[], None]) -> NoReturn:
        """The server: call `ready` once, then take what is there (at most MAX_BATCH_SIZE), give it to `identity`, answer, for ever."""
        raise NotImplementedError

    def connect(self, index: int) -> Call:
        """In client process `index`: the function that is timed, payload -> reply. A reply array is the caller's own memory."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the server and return when it answers. Default: `serve` in a forked process."""
        reader, writer = os.pipe()
        if os.fork() == 0:
            die_with_parent()
            try:
                self.serve(lambda: os.write(writer, b"r"))
            except BaseException:  # a forked child must never return into its parent's code
                traceback.print_exc()
            os._exit(1)
        os.close(writer)
        if not os.read(reader, 1):
            raise RuntimeError("the server ended before it was ready")

    def stop(self) -> None:
        """End a server that must not simply be killed."""

    def clean(self) -> None:
        """In the harness, when every process of the cell is gone: remove what outlives them, apart from /dev/shm/*token* and `directory`."""

    def loop(self, call: Call, until_ns: int) -> tuple[int, np.ndarray]:
        """Call one request after the other until `until_ns` (time.perf_counter_ns). Returns the number of calls and each one's nanoseconds."""
        latencies_ns = _loop_arrays(call, self.cell.payload(), until_ns) if self.cell.is_array else _loop_bytes(call, self.cell.payload(), until_ns)
        return len(latencies_ns), np.minimum(latencies_ns, np.iinfo(np.uint32).max).astype(np.uint32)


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = CONNECT_LIMIT_S) -> Any:
    """The first true value of `condition`. Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} took more than {limit_s:g} s")
        time.sleep(0.005)
    return value


def _loop_bytes(call: Call, payload: bytes, until_ns: int) -> list[int]:
    clock, rest, latencies_ns, number = time.perf_counter_ns, payload[8:], [], 0
    while True:
        request = number.to_bytes(8, sys.byteorder) + rest
        begin_ns = clock()
        reply = call(request)
        finish_ns = clock()
        latencies_ns.append(finish_ns - begin_ns)
        if reply != request:
            raise RuntimeError(f"call {number} was answered with {bytes(reply)[:16]!r}")
        if finish_ns >= until_ns:
            return latencies_ns
        number += 1


def _loop_arrays(call: Call, array: np.ndarray, until_ns: int) -> list[int]:
    clock, latencies_ns, number = time.perf_counter_ns, [], 0
    while True:
        array[0] = number  # exact in float32 up to 2**24 calls
        begin_ns = clock()
        reply = call(array)
        finish_ns = clock()
        latencies_ns.append(finish_ns - begin_ns)
        if reply.item(0) != number:
            raise RuntimeError(f"call {number} was answered with {reply.item(0)}")
        if finish_ns >= until_ns:
            break
        number += 1
    if not np.array_equal(reply, array):
        raise RuntimeError("the last reply differs from its request")
    return latencies_ns
