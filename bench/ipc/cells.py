"""Which cells are measured: payload, number of clients, placement; and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

ONE_CORE, TWO_CORES, FREE = "one core", "two cores", "free"
PLACEMENTS = (ONE_CORE, TWO_CORES, FREE)
SMALL_BYTES = 64
LOAD_BYTES = 4096
PAYLOADS_BYTES = (SMALL_BYTES, LOAD_BYTES, 256 * 1024, 1024 * 1024)
LOAD_CLIENTS = (1, 4, 16)
IDLE_CLIENTS = 4
_view_float32 = partial(np.frombuffer, dtype=np.float32)


def size_text(size_bytes: int) -> str:
    """64 -> "64 B", 4096 -> "4 KiB", 1048576 -> "1 MiB"."""
    for unit_bytes, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes} {unit}"
    return f"{size_bytes} B"


@dataclass(frozen=True)
class Cell:
    """One measurement of one contestant. `placement`: where the client and the server may run."""

    payload_bytes: int
    clients: int = 1
    placement: str = FREE
    idle: bool = False  # clients connect, make one call and stay silent

    @property
    def title(self) -> str:
        """The cell in words."""
        clients = "1 client" if self.clients == 1 else f"{self.clients} clients"
        return f"{size_text(self.payload_bytes)}, {clients}{' silent' if self.idle else ''}, {self.placement}"

    @property
    def is_array(self) -> bool:
        """Payloads above 64 bytes are float32 arrays; that one is `bytes`."""
        return self.payload_bytes > SMALL_BYTES

    @property
    def decode(self) -> Callable[[Any], Any]:
        """Turns raw bytes that the client owns into what the caller is given; no copy."""
        return _view_float32 if self.is_array else bytes

    def payload(self) -> Any:
        """A payload of this size with content worth comparing."""
        content = np.random.default_rng(7).random(self.payload_bytes // 4, dtype=np.float32)
        return content if self.is_array else content.tobytes()


@dataclass(frozen=True)
class Timing:
    """How long each phase of a cell lasts, and when the harness gives up on it."""

    warm_up_s: float = 0.25
    measured_s: float = 0.6
    idle_s: float = 2.0
    limit_s: float = 30.0


def plan(quick: bool, every_placement: bool) -> list[Cell]:
    """The cells of a round. `every_placement`: for the floor and for ours, which are compared under each pinning."""
    payloads = (SMALL_BYTES, 256 * 1024, 1024 * 1024) if quick else PAYLOADS_BYTES
    cells = []
    for payload_bytes in payloads:
        for placement in PLACEMENTS:
            everybody = placement == FREE or (payload_bytes == SMALL_BYTES and not quick)
            if everybody or (every_placement and not (quick and payload_bytes > SMALL_BYTES)):
                cells.append(Cell(payload_bytes, 1, placement))
    cells += [Cell(LOAD_BYTES, clients) for clients in LOAD_CLIENTS if clients > (4 if quick else 1)]
    if every_placement or not quick:
        cells.append(Cell(LOAD_BYTES, IDLE_CLIENTS, idle=True))
    return cells
