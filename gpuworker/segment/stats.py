"""Statistics as people and tools see them. They live in the segment: readable while the owner hangs, and after it died."""

from __future__ import annotations

import dataclasses
import json
import time
from bisect import bisect_left
from itertools import accumulate
from typing import Any

from gpuworker._native import ffi, lib
from gpuworker.scheduling.decision import Reason
from gpuworker.segment.board import shown
from gpuworker.segment.execution import Execution
from gpuworker.segment.files import group_id
from gpuworker.segment.generation import Generation, read_generation
from gpuworker.segment.segment import Segment, printable, state_name

SILENT_S = 5.0
"""A serving owner writes its heartbeat ten times a second, unless its handler holds the GIL."""
_MOST = 1e15
"""No option is as large as that."""
_BUCKETS: int = lib.GW_BUCKETS
_HISTOGRAM_WORDS = _BUCKETS + 2
_OWNER_COUNTERS = (
    "completed", "failed", "expired", "abandoned", "reaped_slots", "reaped_clients", "batches", "requeued", "late_wakes", "spins", "parks",
    "on_time", "late", "rejected_late", "predicted", "predicted_ns", "ran_ns", "overruns", "tokens", "padded_tokens",
)  # fmt: skip
REASONS = tuple(reason.name.lower() for reason in Reason)
"""Keys of `dispatch_reasons`."""
_CLIENT_COUNTERS = ("submitted", "rejected", "cancelled", "expired", "fallbacks", "rejected_forecast", "satisfied")


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Log-linear: four buckets an octave from 256 ns on, so a quantile is within a quarter of the true one."""

    count: int
    mean_us: float
    p50_us: float
    p99_us: float
    buckets: tuple[int, ...] = dataclasses.field(repr=False)
    sum_ns: int = dataclasses.field(default=0, repr=False)

    @classmethod
    def of(cls, words: list[int]) -> Histogram:
        """From the segment's words: buckets, sum in ns, count."""
        buckets, total_ns, count = tuple(words[:_BUCKETS]), words[_BUCKETS], words[_BUCKETS + 1]
        return cls(
            count, round(total_ns / count / 1e3, 3) if count else 0.0, _quantile_us(buckets, 0.5), _quantile_us(buckets, 0.99), buckets, total_ns
        )

    def since(self, before: Histogram) -> Histogram:
        """What was counted after `before`."""
        buckets = [max(a - b, 0) for a, b in zip(self.buckets, before.buckets, strict=True)]
        return Histogram.of([*buckets, max(self.sum_ns - before.sum_ns, 0), max(self.count - before.count, 0)])

    def quantile_us(self, q: float) -> float:
        """The q-quantile (0..1); 0 where nothing was counted."""
        return _quantile_us(self.buckets, q)


@dataclasses.dataclass(frozen=True)
class ClientView:
    """One joined frontend process."""

    pid: int
    slots_held: int


@dataclasses.dataclass(frozen=True)
class Stats:
    """One worker at one moment. The waits of a request, in order: claim_wait (for a free slot), queue_wait (until the owner saw it), batch_wait
    (until its batch left), run, wake (until its caller ran again). `completed`: answered, or, where an answer comes piece by piece, read as far as its reader
    wanted (to a stop string); `abandoned`: answered when nobody waited any more. `alive`: its owner or its supervisor lives (an owner without a supervisor is its
    own); `note`: why the last owner died, or why a reload failed; `paused`: no batch begins until somebody resumes.

    Under a latency budget: `on_time` and `late` count answers, `rejected_late` requests that the owner gave up, `rejected_forecast` those that a client did not
    send; `goodput` is the share of all these that was on time. `predicted_run_ms` and `observed_run_ms` are means over the same batches, margin included;
    `overruns` ran longer than predicted. `padding`: padded_tokens / tokens of what has run; 0 where lengths are not used."""

    name: str
    state: str
    owner_pid: int
    owner_alive: bool
    supervisor_pid: int
    alive: bool
    restarts: int
    reloads: int
    note: str
    uptime_s: float
    heartbeat_age_s: float
    batch_running_s: float
    capacity: int
    slots_in_use: int
    clients: tuple[ClientView, ...]
    submitted: int
    completed: int
    failed: int
    cancelled: int
    expired: int
    rejected: int
    fallbacks: int
    abandoned: int
    reaped_clients: int
    reaped_slots: int
    requeued: int
    on_time: int
    late: int
    rejected_late: int
    rejected_forecast: int
    goodput: float
    predicted_batches: int
    predicted_run_ms: float
    observed_run_ms: float
    overruns: int
    tokens: int
    padded_tokens: int
    padding: float
    late_wakes: int
    owner_spins: int
    owner_parks: int
    batches: int
    mean_batch_size: float
    batch_sizes: dict[str, int]
    dispatch_reasons: dict[str, int]
    claim_wait: Histogram
    queue_wait: Histogram
    batch_wait: Histogram
    run: Histogram
    wake: Histogram
    handler: str
    options: dict[str, Any]
    execution: Execution | None = None
    """Of a TensorHandler that has run a batch."""
    generation: Generation | None = None
    """Of a worker that generates."""
    paused: bool = False
    failed_reloads: int = 0
    predicted_ns: int = 0
    """The sum behind predicted_run_ms, and the next that behind observed_run_ms: for whoever takes differences."""
    observed_ns: int = 0
    satisfied: int = 0
    """Of the completed, those whose reader ended them; the owner counts them as abandoned, a moment later."""

    @classmethod
    def of(cls, name: str, group: str | None = None) -> Stats:
        """Reads the statistics of a worker. group: as for gpuworker.connect. Raises WorkerNotFound or SegmentError."""
        return cls.read(Segment.attach(name, read_only=True, gid=-1 if group is None else group_id(group)))

    @classmethod
    def read(cls, segment: Segment) -> Stats:
        """Reads the statistics of an attached segment."""
        o = segment.overview()
        owner_words, client_words = ffi.sizeof("gw_stats") // 8, ffi.sizeof("gw_client_stats") // 8
        assert owner_words == len(_OWNER_COUNTERS) + lib.GW_REASONS + _BUCKETS + 3 * _HISTOGRAM_WORDS
        assert client_words == len(_CLIENT_COUNTERS) + 2 * _HISTOGRAM_WORDS
        owner_raw, client_raw = ffi.new("uint64_t[]", owner_words), ffi.new("uint64_t[]", client_words)
        lib.gw_read_stats(segment.port, owner_raw, owner_words, client_raw, client_words)
        owner, client = ffi.unpack(owner_raw, owner_words), ffi.unpack(client_raw, client_words)
        counts = dict(zip(_OWNER_COUNTERS, owner, strict=False))
        asked = dict(zip(_CLIENT_COUNTERS, client, strict=False))
        at = len(_OWNER_COUNTERS)
        reasons, sizes, at = (
            owner[at : at + lib.GW_REASONS],
            owner[at + lib.GW_REASONS : at + lib.GW_REASONS + _BUCKETS],
            at + lib.GW_REASONS + _BUCKETS,
        )
        queue_wait, batch_wait, run = (Histogram.of(owner[at + i * _HISTOGRAM_WORDS : at + (i + 1) * _HISTOGRAM_WORDS]) for i in range(3))
        at = len(_CLIENT_COUNTERS)
        claim_wait, wake = (Histogram.of(client[at + i * _HISTOGRAM_WORDS : at + (i + 1) * _HISTOGRAM_WORDS]) for i in range(2))
        now_ns = time.monotonic_ns()
        info = _info(segment)
        batches, answered = counts["batches"], counts["completed"] + counts["failed"] + counts["abandoned"]
        return cls(
            name=segment.name,
            state=state_name(o.state),
            owner_pid=o.owner.pid,
            owner_alive=not segment.owner_is_dead(),
            supervisor_pid=o.supervisor.pid,
            alive=not segment.is_dead(),
            restarts=o.restarts,
            reloads=o.reloads,
            note=segment.note(),
            uptime_s=_seconds_since(o.started_ns, now_ns),
            heartbeat_age_s=_seconds_since(o.heartbeat_ns, now_ns),
            batch_running_s=_seconds_since(o.batch_started_ns, now_ns),
            capacity=o.capacity,
            slots_in_use=o.in_use,
            clients=_clients(segment),
            submitted=asked["submitted"],
            completed=counts["completed"] + asked["satisfied"],
            failed=counts["failed"],
            cancelled=asked["cancelled"],
            expired=counts["expired"] + asked["expired"],
            rejected=asked["rejected"],
            fallbacks=asked["fallbacks"],
            abandoned=max(counts["abandoned"] - asked["satisfied"], 0),  # the owner sees only that nobody waits any more
            reaped_clients=counts["reaped_clients"],
            reaped_slots=counts["reaped_slots"],
            requeued=counts["requeued"],
            on_time=counts["on_time"],
            late=counts["late"],
            rejected_late=counts["rejected_late"],
            rejected_forecast=asked["rejected_forecast"],
            goodput=_ratio(counts["on_time"], counts["on_time"] + counts["late"] + counts["rejected_late"] + asked["rejected_forecast"]),
            predicted_batches=counts["predicted"],
            predicted_run_ms=_ratio(counts["predicted_ns"], counts["predicted"] * 1e6, 6),
            observed_run_ms=_ratio(counts["ran_ns"], counts["predicted"] * 1e6, 6),
            overruns=counts["overruns"],
            tokens=counts["tokens"],
            padded_tokens=counts["padded_tokens"],
            padding=_ratio(counts["padded_tokens"], counts["tokens"]),
            late_wakes=counts["late_wakes"],
            owner_spins=counts["spins"],
            owner_parks=counts["parks"],
            batches=batches,
            mean_batch_size=round(answered / batches, 3) if batches else 0.0,
            batch_sizes={_size_label(i): n for i, n in enumerate(sizes) if n},
            dispatch_reasons=dict(zip(REASONS, reasons, strict=False)),
            claim_wait=claim_wait,
            queue_wait=queue_wait,
            batch_wait=batch_wait,
            run=run,
            wake=wake,
            handler=info.get("handler", ""),
            options=info.get("options", {}),
            execution=Execution.of(shown(segment.port)),
            generation=read_generation(segment.port),
            paused=bool(o.paused),
            failed_reloads=o.failed_reloads,
            predicted_ns=counts["predicted_ns"],
            observed_ns=counts["ran_ns"],
            satisfied=asked["satisfied"],
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return dataclasses.asdict(self)

    def condition(self, silent_s: float = SILENT_S) -> str:
        """How the worker is, in a word: its `state`, or what is known better: "dead", "restarting", "silent" (no heartbeat for so long), "paused"."""
        if not self.alive:
            return "failed" if self.state == "failed" else "dead"
        if self.state == "serving" and not self.owner_alive:  # its supervisor has not come to it yet
            return "restarting"
        if self.state in ("serving", "draining") and self.heartbeat_age_s > silent_s:
            return "silent"
        return "paused" if self.paused and self.state == "serving" else self.state

    def cause(self) -> str:
        """`note` in a line, without what the owner has logged last, which may be anything."""
        return self.note.partition(". Its last words:")[0].partition("\n")[0]

    def slots_by_pid(self) -> dict[int, int]:
        """Slots held by each process, which may have joined more than once; the greediest first."""
        held: dict[int, int] = {}
        for client in self.clients:
            held[client.pid] = held.get(client.pid, 0) + client.slots_held
        return dict(sorted(held.items(), key=lambda item: (-item[1], item[0])))

    def number(self, option: str) -> float | None:
        """An option of the worker, if it is a number from 0 on; `options` are as published, and any frontend can write over them."""
        value = self.options.get(option)
        return value if isinstance(value, (int, float)) and 0 <= value < 1e12 else None


def _info(segment: Segment) -> dict[str, Any]:
    """`handler` and `options`, if they are what they should be: any frontend can write there, and a reader may come while the owner writes."""
    try:
        info = json.loads(segment.info() or b"{}")
        if not isinstance(info, dict):
            return {}
    except (ValueError, RecursionError):
        return {}
    found: dict[str, Any] = {}
    if isinstance(info.get("handler"), str):
        found["handler"] = printable(info["handler"])
    if isinstance(info.get("options"), dict):
        found["options"] = {printable(name): _option(value) for name, value in info["options"].items() if _is_option(value)}
    return found


def _is_option(value: Any) -> bool:
    """Whether it is of a kind that WorkerOptions have."""
    if isinstance(value, list):
        return all(type(one) is int and abs(one) < _MOST for one in value)
    return value is None or isinstance(value, (str, bool)) or (isinstance(value, (int, float)) and abs(value) < _MOST)  # nan is not, either


def _option(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def _clients(segment: Segment) -> tuple[ClientView, ...]:
    view = ffi.new("gw_participant_view *")
    joined = []
    index = 0
    while index := lib.gw_next_participant(segment.port, index):
        if lib.gw_read_participant(segment.port, index, view) == lib.GW_ALIVE:
            joined.append(ClientView(view.identity.pid, view.held))
    return tuple(joined)


def _ratio(part: float, whole: float, digits: int = 4) -> float:
    return round(part / whole, digits) if whole else 0.0


def _seconds_since(then_ns: int, now_ns: int) -> float:
    return round(max(now_ns - then_ns, 0) / 1e9, 3) if then_ns else 0.0


_STARTS_NS = (0.0, *(float(256 << bucket // 4) * (1 + bucket % 4 / 4) for bucket in range(1, _BUCKETS + 1)))


def _quantile_us(buckets: tuple[int, ...], q: float) -> float:
    """By linear interpolation inside the bucket that holds the quantile."""
    below = list(accumulate(buckets))
    if not below[-1]:
        return 0.0
    wanted = q * below[-1]
    bucket = bisect_left(below, wanted)
    start, end, count = _STARTS_NS[bucket], _STARTS_NS[bucket + 1], buckets[bucket]
    return round((start + (end - start) * (wanted - below[bucket] + count) / count) / 1e3, 3)


def _size_label(bucket: int) -> str:
    return str(bucket) if bucket < 64 else f"{1 << (bucket - 64 + 6)}-{(1 << (bucket - 64 + 7)) - 1}"
