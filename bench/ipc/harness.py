"""Runs one cell of one contestant in a process tree of its own, and measures it.

    harness ── leader ─┬─ server (whatever the contestant starts; every descendant but the clients counts as server)
                       ├─ client 0
                       └─ client N-1

The clients connect, compare whole replies, call for `warm_up_s`, then are measured for `measured_s`: closed loop, one request in flight each.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ipc.cells import Cell, Timing
from ipc.contestant import Call, Contestant
from ipc.machine import cpu_s, descendants, die_with_parent, end_descendants, idle_s, pin
from ipc.statistics import fairness, percentile

_WINDOW = struct.Struct("=QQ")
_READY = b"R"
_START_DELAY_NS = 5_000_000
_SETTLE_S = 0.5
_STOP_LIMIT_S = 5.0
_cell_count = 0


def run_cell(kind: type[Contestant], cell: Cell, timing: Timing) -> dict[str, Any]:
    """Measure one cell. Returns its metrics, or {"error": reason}; never raises because of the contestant."""
    global _cell_count
    _cell_count += 1
    reason = unsupported(kind, cell)
    if reason:
        return {"error": reason}
    token = f"bench{os.getpid()}x{_cell_count}"
    directory = Path(tempfile.mkdtemp(prefix="ipc-"))
    contestant = kind(cell, token, directory)
    try:
        return _run_in_leader(contestant, timing)
    finally:
        end_descendants()
        with contextlib.suppress(ImportError):
            contestant.clean()
        for leftover in Path("/dev/shm").glob(f"*{token}*"):
            leftover.unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)


def unsupported(kind: type[Contestant], cell: Cell) -> str:
    """Why this contestant has no such cell, or ""."""
    if cell.payload_bytes > kind.max_payload_bytes:
        return f"messages are limited to {kind.max_payload_bytes:,} bytes"
    if cell.clients > kind.max_clients:
        return f"takes {kind.max_clients} client"
    return ""


def _run_in_leader(contestant: Contestant, timing: Timing) -> dict[str, Any]:
    reader, writer = os.pipe()
    errors = contestant.directory / "stderr"
    leader = _fork(lambda: _lead(contestant, timing, writer), errors)
    os.close(writer)
    with os.fdopen(reader, "rb") as results:
        if not select.select([results], [], [], timing.limit_s)[0]:
            os.kill(leader, signal.SIGKILL)
            return {"error": _last_line(errors) or f"no result within {timing.limit_s:g} s"}
        document = results.readline()  # not to the end of the file: the server holds the pipe too
    with contextlib.suppress(psutil.Error):
        psutil.Process(leader).wait(_STOP_LIMIT_S)
    return json.loads(document) if document else {"error": _last_line(errors) or "ended without a result"}


def _fork(main: Callable[[], None], errors: Path | None = None) -> int:
    """Run `main` in a forked process, which ends with it; its stderr, and that of all below it, goes to the file `errors`."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the harness ends us
        if errors:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        main()
        status = 0
    except BaseException:  # a forked child must never return into its parent's code
        traceback.print_exc()
    os._exit(status)


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1].strip()[:200] if lines else ""


def _lead(contestant: Contestant, timing: Timing, writer: int) -> None:
    """The leader: start the server, fork the clients, watch the window, gather."""
    cell = contestant.cell
    pin(cell.placement, is_server=True)
    contestant.open()
    contestant.start()
    window, starts = mmap.mmap(-1, _WINDOW.size), os.pipe()
    pipes = [os.pipe() for _ in range(cell.clients)]
    clients = [_fork(partial(_call, contestant, index, window, starts[0], pipes)) for index in range(cell.clients)]
    for _, client_end in pipes:
        os.close(client_end)
    readers = [os.fdopen(reader, "rb") for reader, _ in pipes]
    for reader in readers:
        if reader.read(1) != _READY:
            raise RuntimeError("a client failed: " + _last_line(contestant.directory / "stderr"))
    watch = _Watch([process.pid for process in descendants() if process.pid not in clients], clients)
    if cell.idle:
        time.sleep(_SETTLE_S)
        metrics = watch.over(time.perf_counter_ns(), time.perf_counter_ns() + int(timing.idle_s * 1e9))
        os.write(starts[1], b"g" * cell.clients)
    else:
        begin_ns = time.perf_counter_ns() + _START_DELAY_NS + int(timing.warm_up_s * 1e9)
        end_ns = begin_ns + int(timing.measured_s * 1e9)
        window[:] = _WINDOW.pack(begin_ns, end_ns)
        os.write(starts[1], b"g" * cell.clients)
        metrics = watch.over(begin_ns, end_ns)
        metrics |= _summary([_result(reader, contestant) for reader in readers], metrics, timing.measured_s)
    os.write(writer, json.dumps(metrics).encode() + b"\n")
    contestant.stop()


def _result(reader: Any, contestant: Contestant) -> dict[str, Any]:
    document = reader.read()
    if not document:
        raise RuntimeError("a client failed: " + _last_line(contestant.directory / "stderr"))
    return pickle.loads(document)


def _call(contestant: Contestant, index: int, window: mmap.mmap, start: int, pipes: list[tuple[int, int]]) -> None:
    """Client `index`: one byte when it is connected, its measurements when the window is over."""
    result = pipes[index][1]
    for _, other in pipes:
        if other != result:
            os.close(other)  # else the leader would not see that another client ended
    pin(contestant.cell.placement, is_server=False)
    call = contestant.connect(index)
    _compare_whole_replies(call, contestant.cell)
    os.write(result, _READY)
    os.read(start, 1)
    if contestant.cell.idle:
        return
    begin_ns, end_ns = _WINDOW.unpack(window[:])
    contestant.loop(call, begin_ns)
    began_s = _own_cpu_s()
    calls, latencies_ns = contestant.loop(call, end_ns)
    used_s = _own_cpu_s() - began_s
    with os.fdopen(result, "wb") as results:
        pickle.dump({"calls": calls, "latencies_ns": latencies_ns, "cpu_s": used_s}, results, protocol=5)


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _compare_whole_replies(call: Call, cell: Cell) -> None:
    for _ in range(3):
        payload = cell.payload()
        reply = call(payload)
        if not cell.is_array:
            if bytes(reply) != payload:
                raise RuntimeError("a reply differs from its request")
            continue
        if not isinstance(reply, np.ndarray) or reply.dtype != np.float32 or not np.array_equal(reply, payload):
            raise RuntimeError("a reply differs from its request")
        if np.shares_memory(reply, payload):
            raise RuntimeError("a reply is not memory of its own")


class _Watch:
    """CPU of the server's processes and of the machine over a window."""

    def __init__(self, servers: list[int], clients: list[int]) -> None:
        self.servers = [os.getpid(), *servers]  # the leader only sleeps, unless the contestant does something in it
        self.own = [os.getppid(), *self.servers, *clients]

    def over(self, begin_ns: int, end_ns: int) -> dict[str, Any]:
        """Sleep to the end of the window. Returns the server's share of a core and what others used, in cores."""
        _sleep_until(begin_ns)
        began_ns, server_s, own_s, idle_begin_s = self._read()
        _sleep_until(end_ns)
        ended_ns, server_end_s, own_end_s, idle_end_s = self._read()
        wall_s = (ended_ns - began_ns) / 1e9
        busy = os.cpu_count() - (idle_end_s - idle_begin_s) / wall_s
        foreign = max(0.0, busy - (own_end_s - own_s) / wall_s)  # idle time comes in steps of 10 ms
        return {"server_cores": (server_end_s - server_s) / wall_s, "foreign_cores": foreign}

    def _read(self) -> tuple[int, float, float, float]:
        servers_s = _total(self.servers)
        return time.perf_counter_ns(), servers_s, _total(self.own), idle_s()


def _total(pids: Iterable[int]) -> float:
    return sum(cpu_s(pid) for pid in pids)


def _sleep_until(moment_ns: int) -> None:
    time.sleep(max(0, moment_ns - time.perf_counter_ns()) / 1e9)


def _summary(clients: list[dict[str, Any]], watched: dict[str, Any], measured_s: float) -> dict[str, Any]:
    calls = [client["calls"] for client in clients]
    latencies_ns = np.sort(np.concatenate([client["latencies_ns"] for client in clients]))
    cpu_used_s = sum(client["cpu_s"] for client in clients) + watched["server_cores"] * measured_s
    return {
        "calls": sum(calls),
        "p50_us": percentile(latencies_ns, 50) / 1e3,
        "p99_us": percentile(latencies_ns, 99) / 1e3,
        "requests_per_s": sum(calls) / measured_s,
        "cpu_s_per_100k": cpu_used_s / sum(calls) * 100_000,
        "fairness": fairness(calls),
    }
