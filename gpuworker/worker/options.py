"""Everything that can be set about a worker, checked in one place."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from gpuworker._native import lib
from gpuworker.segment import Geometry
from gpuworker.segment.files import group_id
from gpuworker.segment.wire import LINE, ON_FULL, WAKE, choice

ON_OWNER_DEATH = {"requeue": 0, "fail": 1}


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker. Raises ValueError for a value out of range, TypeError for an unknown name (with the nearest right one)."""

    max_batch_size: int = 32
    """Most requests that run_batch is given at once."""
    max_wait_ms: float = 0.0
    """Longest that a request waits, from its enqueue time on, for its batch to fill while the device is free. 0: it does not wait."""
    capacity: int = 256
    """Slots: requests that can be on their way at a time, from being sent to their answers being read."""
    max_request_bytes: int = 65536
    """Room for a request in its slot; larger ones travel through a file of their own in /dev/shm, up to max_payload_bytes."""
    max_response_bytes: int = 65536
    """The same for responses."""
    max_payload_bytes: int = 64 << 20
    """Largest request or response at all."""
    max_clients: int = 128
    """Frontend processes (clients) that can be joined at a time."""
    client_quota: int | None = None
    """Slots one client may hold. Default: all while it is alone, 7 of 8 while others are joined."""
    on_full: str = "reject"
    """What a request does when no slot is free, unless its client says otherwise: "reject" or "block"."""
    wake: str = "adaptive"
    """How both sides wait: "park" sleeps at once, "adaptive" spins while that has lately paid and a core is free, "busy" always spins."""
    isolate_errors: bool = True
    """When run_batch raises, run the batch again in halves until only the requests at fault fail."""
    allow_pickle: bool = False
    """Lets values of other types cross by pickle. Only for frontends that may run any code in the owner, and it in them."""
    group: str | None = None
    """Unix group whose processes may be clients too, if they name it in gpuworker.connect. Default: only this user's."""
    on_owner_death: str = "requeue"
    """What becomes of requests that were running when their owner died: "requeue" (run again by the next owner) or "fail" (WorkerDied)."""
    max_attempts: int = 2
    """A request that was running when its owner died this many times is failed instead of run again."""
    max_restarts: int = 5
    """Owners in a row that may die before they have answered anything; one more, and the worker has failed."""
    standby: bool = False
    """Keep a second owner loaded, which takes over at once when the first dies. It takes the memory of a second model."""
    run_timeout_s: float | None = None
    """Longest that a batch may run, errors isolated: then its owner is killed and the batch's callers are told. Default: no limit."""
    startup_timeout_s: float = 300.0
    """How long the handler may take to load and warm up."""
    drain_timeout_s: float = 10.0
    """How long queued and running requests may take to finish after SIGTERM."""

    def __post_init__(self) -> None:
        for option, least, most in (
            ("max_batch_size", 1, lib.GW_MAX_CAPACITY),
            ("capacity", 1, lib.GW_MAX_CAPACITY),
            ("max_request_bytes", 64, 1 << 34),
            ("max_response_bytes", 512, 1 << 34),
            ("max_payload_bytes", 0, 1 << 35),
            ("max_clients", 1, lib.GW_MAX_PARTICIPANTS),
            ("max_attempts", 1, 1 << 31),
            ("max_restarts", 0, 1 << 31),
        ):
            _require_int(option, getattr(self, option), least, most)
        if self.client_quota is not None:
            _require_int("client_quota", self.client_quota, 1, self.capacity)
        for option in ("max_wait_ms", "startup_timeout_s", "drain_timeout_s", "run_timeout_s"):
            value = getattr(self, option)
            if option == "run_timeout_s" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e9:
                raise ValueError(f"{option}={value!r}: give a number from 0 to 1e9")
        for option in ("isolate_errors", "allow_pickle", "standby"):
            if not isinstance(getattr(self, option), bool):
                raise ValueError(f"{option}={getattr(self, option)!r}: give True or False")
        if self.group is not None:
            group_id(self.group)
            if self.allow_pickle:
                raise ValueError("allow_pickle=True and group: a pickle runs any code, so every member of the group could act as this user")
        if self.on_full == "fallback":
            raise ValueError("on_full='fallback' is a client's choice: gpuworker.connect(name, fallback=callable)")
        choice(ON_FULL, self.on_full, "on_full")
        choice(ON_OWNER_DEATH, self.on_owner_death, "on_owner_death")
        choice(WAKE, self.wake, "wake")

    @classmethod
    def of(cls, options: dict[str, Any]) -> WorkerOptions:
        """From keyword arguments; an unknown one is refused with the nearest right name."""
        known = {field.name for field in dataclasses.fields(cls)}
        for option in options:
            if option not in known:
                near = difflib.get_close_matches(option, known, n=1)
                raise TypeError(f"unknown worker option {option!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return cls(**options)

    @property
    def attempts(self) -> int:
        """Owners that a request may be run by."""
        return self.max_attempts if self.on_owner_death == "requeue" else 1

    @property
    def geometry(self) -> Geometry:
        """The segment that these options need."""
        request_bytes, response_bytes = (-(-size // LINE) * LINE for size in (self.max_request_bytes, self.max_response_bytes))
        return Geometry(
            self.capacity, request_bytes, response_bytes, self.max_clients, self.max_payload_bytes, group_id(self.group) if self.group else -1
        )

    @property
    def quotas(self) -> tuple[int, int]:
        """(while other clients are joined, while alone): slots one client may hold."""
        if self.client_quota is not None:
            return self.client_quota, self.client_quota
        return max(1, self.capacity - self.capacity // 8), self.capacity


def _require_int(option: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{option}={value!r}: give an integer from {least:,} to {most:,}")
