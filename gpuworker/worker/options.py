"""Everything that can be set about a worker, checked in one place."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from gpuworker._native import lib
from gpuworker.segment import Geometry
from gpuworker.segment.files import group_id
from gpuworker.segment.wire import ADMISSION, LINE, ON_FULL, WAKE, choice
from gpuworker.tracing import is_wanted

ON_OWNER_DEATH = {"requeue": 0, "fail": 1}
DEFAULT_BATCH_SIZE = 32


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker. Raises ValueError for a value out of range, TypeError for an unknown name (with the nearest right one)."""

    max_batch_size: int = DEFAULT_BATCH_SIZE
    """Most requests that run_batch is given at once."""
    max_wait_ms: float | None = None
    """Longest that a request waits, from its enqueue time on, for its batch to fill while the device is free. 0: it does not wait. Default: 0; with
    latency_budget_ms, as long as that allows and it is worth it."""
    latency_budget_ms: float | None = None
    """What a request may take from its enqueue time to its answer, waiting and running together; a client may set another for a request. Batches are then
    chosen so that as many as possible are in time. Default: none, batches leave by size and age."""
    late: str = "reject"
    """What becomes of requests that cannot be within latency_budget_ms any more: "reject" (BudgetExceeded, at once) or "serve" (when nothing else is there)."""
    wait: str = "auto"
    """How long requests wait for company under a latency_budget_ms: "auto" (while that is worth it) or "until_deadline" (as long as all can still be in time)."""
    admission: str = "auto"
    """Whether clients ask a forecast before they send: "off", "on" (a request that would be late overflows at once, see on_full) or "auto" (where the budget
    is at least four full batches long, as with less a forecast turns away too many)."""
    target_miss_rate: float = 0.1
    """Share of batches that may run longer than predicted: the prediction's margin is tuned to it."""
    cost_file: str = "auto"
    """Where learned run times are kept for the next start: a path, "off", or "auto" (in ~/.cache/gpuworker, one per handler and device)."""
    length_buckets: str | tuple[int, ...] | None = None
    """Batch only requests of similar length, as the handler's length(request) or the client has it: boundaries (128,256,512), or "learn" from the traffic."""
    max_length_buckets: int = 8
    """How many boundaries "learn" may set."""
    max_length: int | None = None
    """Longest request that is taken. Default: the last of length_buckets, or any."""
    max_batch_tokens: int | None = None
    """Most that a batch may hold: its number of requests times the length that they are padded to. Default: no limit."""
    allowed_batch_sizes: str | tuple[int, ...] | None = None
    """Sizes that the handler pads its batches to (1,2,4,8): the run times of those are what counts, and the last is the max_batch_size. Default: every size."""
    priorities: bool = False
    """Let clients give requests a priority, 0 to 255; higher ones go first."""
    priority_ageing_ms: float = 0.0
    """With priorities: a request that has waited so long counts as one level higher. 0: never."""
    fair_share: bool = True
    """When one client has queued so much that others would wait for more than four batches, each of them gets at least a quarter of an even share."""
    device: str | None = None
    """For a TensorHandler: where its batches run, "cpu", "cuda" or "cuda:1". Default: what the handler says, else cuda if there is one."""
    pipeline_depth: int | None = None
    """For a TensorHandler: batches on their way to and from the device at a time. Default: what the handler says, else 2 on cuda and 1 on the cpu."""
    cuda_graphs: bool | None = None
    """For a TensorHandler on cuda: capture its batches as CUDA graphs. Default: what the handler says, else yes where that is possible."""
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
    """Unix group (its name, or its number in digits) whose processes may be clients too, if they name it in gpuworker.connect. Default: only this user's."""
    on_owner_death: str = "requeue"
    """What becomes of requests that were running when their owner died: "requeue" (run again by the next owner) or "fail" (WorkerDied)."""
    max_attempts: int = 2
    """A request that was running when its owner died this many times is failed instead of run again."""
    max_restarts: int = 5
    """Owners in a row that may die before they have answered anything; one more, and the worker has failed."""
    standby: bool = False
    """Keep a second owner loaded, which takes over at once when the first dies. It takes the memory of a second model."""
    run_timeout_s: float | None = None
    """Longest that a batch may run, errors isolated: then its owner is killed, and the batch's callers are told. Default: no limit."""
    startup_timeout_s: float = 300.0
    """How long the handler may take to load and warm up."""
    drain_timeout_s: float = 10.0
    """How long queued and running requests may take to finish after SIGTERM."""
    tracing: bool | None = None
    """Make OpenTelemetry spans for requests whose clients say which trace they are part of. Default: what GPUWORKER_TRACING says, or no."""

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
            ("max_length_buckets", 1, lib.GW_LANES),
        ):
            _require_int(option, getattr(self, option), least, most)
        if self.pipeline_depth is not None:
            _require_int("pipeline_depth", self.pipeline_depth, 1, lib.GW_MAX_DEPTH)
        if self.device is not None and (not isinstance(self.device, str) or not self.device):
            raise ValueError(f'device={self.device!r}: give "cpu", "cuda" or "cuda:1"')
        if self.cuda_graphs is not None and not isinstance(self.cuda_graphs, bool):
            raise ValueError(f"cuda_graphs={self.cuda_graphs!r}: give True or False")
        is_wanted(self.tracing)
        if self.client_quota is not None:
            _require_int("client_quota", self.client_quota, 1, self.capacity)
        for option in ("max_length", "max_batch_tokens"):
            if getattr(self, option) is not None:
                _require_int(option, getattr(self, option), 1, lib.GW_MAX_LENGTH if option == "max_length" else 1 << 40)
        for option, most in (("length_buckets", lib.GW_LANES), ("allowed_batch_sizes", 1 << 12)):
            object.__setattr__(self, option, _ascending(option, getattr(self, option), most, may_learn=option == "length_buckets"))
        if self.sizes:
            if self.max_batch_size not in (DEFAULT_BATCH_SIZE, self.sizes[-1]):
                raise ValueError(
                    f"max_batch_size={self.max_batch_size}: it is not the last of allowed_batch_sizes, {self.sizes[-1]}; leave one of them out"
                )
            object.__setattr__(self, "max_batch_size", self.sizes[-1])
        if self.boundaries:
            if self.max_length is not None and self.max_length > self.boundaries[-1]:
                raise ValueError(f"max_length={self.max_length}: it is more than the last of length_buckets, {self.boundaries[-1]}")
            if self.max_batch_tokens is not None and self.max_batch_tokens < self.boundaries[-1]:
                raise ValueError(
                    f"max_batch_tokens={self.max_batch_tokens}: one request padded to the last of length_buckets, {self.boundaries[-1]}, has more"
                )
        if self.priority_ageing_ms and not self.priorities:
            raise ValueError("priority_ageing_ms: there are no priorities; set priorities=True, too")
        for option in ("max_wait_ms", "latency_budget_ms", "priority_ageing_ms", "startup_timeout_s", "drain_timeout_s", "run_timeout_s"):
            value = getattr(self, option)
            if value is None and option in ("max_wait_ms", "latency_budget_ms", "run_timeout_s"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e9:
                raise ValueError(f"{option}={value!r}: give a number from 0 to 1e9")
        if self.latency_budget_ms is not None and self.latency_budget_ms < 0.001:
            raise ValueError(f"latency_budget_ms={self.latency_budget_ms!r}: give at least 0.001, or leave it out")
        if isinstance(self.target_miss_rate, bool) or not isinstance(self.target_miss_rate, (int, float)) or not 0 < self.target_miss_rate < 1:
            raise ValueError(f"target_miss_rate={self.target_miss_rate!r}: give a number between 0 and 1")
        if not isinstance(self.cost_file, str) or not self.cost_file:
            raise ValueError(f'cost_file={self.cost_file!r}: give a path, "auto" or "off"')
        for option, values in (("late", ("reject", "serve")), ("wait", ("auto", "until_deadline")), ("admission", tuple(ADMISSION))):
            if getattr(self, option) not in values:
                raise ValueError(f"{option}={getattr(self, option)!r}: choose one of {', '.join(map(repr, values))}")
        for option, default in (("late", "reject"), ("wait", "auto"), ("admission", "auto")):
            if self.latency_budget_ms is None and getattr(self, option) != default:
                raise ValueError(f"{option}={getattr(self, option)!r}: it says what happens under a latency_budget_ms, and there is none")
        for option in ("isolate_errors", "allow_pickle", "standby", "fair_share", "priorities"):
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
    def is_plain(self) -> bool:
        """Whether batches leave by size and age alone, from one queue in the order of arrival."""
        return self.latency_budget_ms is None and not self.uses_lengths and not self.priorities

    @property
    def uses_lengths(self) -> bool:
        """Whether requests have lengths."""
        return not (self.length_buckets is None and self.max_batch_tokens is None and self.max_length is None)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The length buckets as they are given; none where they are learned."""
        return self.length_buckets if isinstance(self.length_buckets, tuple) else ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The allowed batch sizes; none where every size is."""
        return self.allowed_batch_sizes if isinstance(self.allowed_batch_sizes, tuple) else ()

    @property
    def longest(self) -> int:
        """The longest request that is taken; 0: any."""
        limits = (self.max_length, self.max_batch_tokens, *self.boundaries[-1:])
        return min((limit for limit in limits if limit is not None and limit <= lib.GW_MAX_LENGTH), default=0)

    @property
    def device_options(self) -> tuple[str, ...]:
        """Those that are set and only a TensorHandler knows."""
        return tuple(option for option in ("device", "pipeline_depth", "cuda_graphs") if getattr(self, option) is not None)

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


def _ascending(option: str, value: Any, most: int, may_learn: bool) -> str | tuple[int, ...] | None:
    """Integers from a list, or from "1,2,4" as the command line has it."""
    if value is None or (may_learn and value == "learn"):
        return "learn" if value else None
    try:
        numbers = tuple(int(part) for part in value.split(",")) if isinstance(value, str) else () if isinstance(value, bytes) else tuple(value)
    except (TypeError, ValueError):
        numbers = ()
    if (
        not 1 <= len(numbers) <= most
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers)
        or sorted(set(numbers)) != list(numbers)
    ):
        learn = ', or "learn"' if may_learn else ""
        raise ValueError(f"{option}={value!r}: give 1 to {most} integers in ascending order, such as 128,256,512{learn}")
    return numbers
