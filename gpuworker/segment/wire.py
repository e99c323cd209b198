"""The numbers of native/layout.h by the names that options and payloads use."""

from __future__ import annotations

import struct

from gpuworker._native import lib

WAKE = {"park": lib.GW_PARK, "adaptive": lib.GW_ADAPTIVE, "busy": lib.GW_BUSY}
ADMISSION = {"off": lib.GW_ADMIT_ALL, "auto": lib.GW_ADMIT_AUTO, "on": lib.GW_ADMIT_IN_TIME}
ON_FULL = {"reject": lib.GW_REJECT, "block": lib.GW_BLOCK, "fallback": lib.GW_FALLBACK}


def choice(options: dict[str, int], key: str | None, option: str) -> str | None:
    """`key`, if it is one of the options or None. Raises ValueError naming them all."""
    if key is not None and key not in options:
        raise ValueError(f"{option}={key!r}: choose one of {', '.join(map(repr, options))}")
    return key


LINE: int = lib.GW_LINE
SLOT_BITS: int = lib.GW_SLOT_BITS
SLOT_MASK = (1 << SLOT_BITS) - 1
"""slot = ticket & SLOT_MASK, generation = ticket >> SLOT_BITS"""


def request_id(ticket: int) -> str:
    """What identifies one request of a segment, for people and logs: slot.generation."""
    return f"{ticket & SLOT_MASK}.{ticket >> SLOT_BITS}"


KIND_SHIFT, META_SHIFT = 54, 36
META_MASK: int = lib.GW_MAX_META
TOTAL_MASK = (1 << META_SHIFT) - 1


LATE = struct.Struct("<QQQ")
"""What GW_KIND_LATE carries: estimated_ns, budget_ns, queue depth."""


def describe(kind: int, meta_bytes: int, total_bytes: int) -> int:
    """Kind, meta and length of a payload in one integer, as gw_describe does. An area is meta, padding to a cache line, data."""
    return kind << KIND_SHIFT | meta_bytes << META_SHIFT | total_bytes


def data_start(meta_bytes: int) -> int:
    """Where the data begins behind its meta: the next cache line."""
    return -(-meta_bytes // LINE) * LINE
