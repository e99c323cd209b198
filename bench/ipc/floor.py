"""The floor as two contestants: floor.c, compiled when the benchmark starts, called through ctypes; its timed loop is in C."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np

from ipc.contestant import Call, Contestant

_SOURCE = Path(__file__).with_name("floor.c")
_KEPT_LATENCIES = 1 << 23
_libraries: dict[str, ctypes.CDLL] = {}


def _library() -> ctypes.CDLL:
    """Compile and load floor.c, once per run. Raises RuntimeError with the compiler's words."""
    if "floor" not in _libraries:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise RuntimeError("no C compiler (cc) found")
        with tempfile.TemporaryDirectory() as directory:
            shared_object = Path(directory, "floor.so")
            command = [compiler, "-std=c11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread", str(_SOURCE), "-o", str(shared_object)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise RuntimeError(result.stderr.strip() or f"{compiler} failed")
            library = ctypes.CDLL(str(shared_object))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.floor_size.argtypes, library.floor_size.restype = [size], size
        library.floor_init.argtypes, library.floor_init.restype = [pointer], None
        library.floor_serve.argtypes, library.floor_serve.restype = [pointer, size, ctypes.c_int], None
        library.floor_loop.argtypes = [pointer, size, ctypes.c_int, pointer, pointer, ctypes.c_uint64, pointer, size]
        library.floor_loop.restype = ctypes.c_int64
        _libraries["floor"] = library
    return _libraries["floor"]


class SemaphoreFloor(Contestant):
    name = "floor"
    title = "C floor: sem_t"
    note = "two C loops, the same copies as an identity call, one sem_post and one sem_wait each way"
    is_floor = True
    max_clients = 1
    spin = 0

    @classmethod
    def prepare(cls) -> None:
        _library()

    def open(self) -> None:
        self.library = _library()
        self.memory = mmap.mmap(-1, self.library.floor_size(self.cell.payload_bytes))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.library.floor_init(self.address)

    def serve(self, ready: Callable[[], None]) -> NoReturn:
        ready()
        self.library.floor_serve(self.address, self.cell.payload_bytes, self.spin)
        raise RuntimeError("floor_serve returned")

    def connect(self, index: int) -> Call:
        return self._call_once

    def _call_once(self, payload: bytes | np.ndarray) -> bytes | np.ndarray:
        """One call of the C loop; used only to compare a whole reply."""
        request = np.frombuffer(payload, np.uint8).copy()
        _, reply = self._run(request, 0, np.empty(1, np.uint32))
        reply[:4] = np.frombuffer(payload, np.uint8)[:4]  # the loop has numbered the call here
        return self.cell.decode(reply.tobytes())

    def _run(self, request: np.ndarray, until_ns: int, latencies_ns: np.ndarray) -> tuple[int, np.ndarray]:
        reply = np.zeros_like(request)
        calls = self.library.floor_loop(
            self.address, request.nbytes, self.spin, request.ctypes.data, reply.ctypes.data, until_ns, latencies_ns.ctypes.data, len(latencies_ns)
        )
        if calls < 0 or not np.array_equal(request, reply):
            raise RuntimeError("a reply differs from its request")
        return calls, reply

    def loop(self, call: Call, until_ns: int) -> tuple[int, np.ndarray]:
        latencies_ns = np.empty(_KEPT_LATENCIES, np.uint32)
        calls, _ = self._run(np.frombuffer(self.cell.payload(), np.uint8).copy(), until_ns, latencies_ns)
        return calls, latencies_ns[:calls].copy()


class SpinFloor(SemaphoreFloor):
    name = "floor-spin"
    title = "C floor: yielding spin"
    note = "as above, but both sides watch a flag: 64 pauses, then sched_yield"
    spin = 1
