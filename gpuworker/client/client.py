"""The blocking client."""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from gpuworker._native import lib
from gpuworker.client import remedies
from gpuworker.client.generate import Generates
from gpuworker.client.link import SLICE_NS, Link
from gpuworker.client.locks import Lock
from gpuworker.client.pending import Pending, deadline
from gpuworker.client.reservation import Reservation
from gpuworker.client.steps import Pause, Room, Steps, run
from gpuworker.client.terms import length_of, terms_of, with_length
from gpuworker.errors import BudgetExceeded, DeadlineExceeded, GpuWorkerError, InvalidRequest, SegmentError, WorkerDraining, WorkerNotFound
from gpuworker.segment import Segment, State, spill
from gpuworker.segment.files import group_id
from gpuworker.segment.names import shm_name
from gpuworker.segment.segment import state_name
from gpuworker.segment.wire import ON_FULL, WAKE, choice
from gpuworker.tracing import is_wanted, stamper

_NO_SLOT = (-errno.EAGAIN, -errno.EDQUOT)
_OVERFLOW = (*_NO_SLOT, -errno.ETIME)
_clients: weakref.WeakSet[Client] = weakref.WeakSet()
T = TypeVar("T")


def connect(
    name: str,
    *,
    connect_timeout_s: float = 10.0,
    on_full: str | None = None,
    fallback: Callable[[Any], Any] | None = None,
    wake: str | None = None,
    group: str | None = None,
    allow_pickle: bool = False,
    length: Callable[[Any], int] | None = None,
    tracing: bool | None = None,
) -> Client:
    """A client of the worker called `name`. Nothing is opened before the first request, so this may be called at import time and before a fork.

    connect_timeout_s: how long the first request waits for a worker that is still starting (WorkerNotFound after that).
    on_full: what a request does when no slot is free: "reject" (QueueFull), "block" (until its timeout) or "fallback" (call `fallback(request)` in
        this process). Default: as the worker says; "fallback" if one is given.
    wake: how this process waits for answers: "park", "adaptive" or "busy". Default: as the worker does.
    group: the Unix group whose members' workers are trusted; without it only a worker of this user is. See the worker's option of that name.
    allow_pickle: values of other types cross by pickle, if the worker allows it too. Only where every process that uses this worker may run any code here.
    length: what a request counts for in the worker's length_buckets and max_batch_tokens, e.g. its tokens. Without it that is the extent of the first named
        dimension, where the worker has declared its inputs, and else the owner asks the handler's `length`.
    tracing: each request carries the OpenTelemetry span that is current where it is sent, for the owner to add spans of its own (docs/operations.md). Default:
        what GPUWORKER_TRACING says, or no.
    """
    return Client(
        name, connect_timeout_s=connect_timeout_s, on_full=on_full, fallback=fallback, wake=wake, group=group, allow_pickle=allow_pickle, length=length,
        tracing=tracing,
    )  # fmt: skip


class Client(Generates):
    """Calls one worker. Thread-safe and fork-safe: one client may be used by all threads of a process and by its forked children at once."""

    def __init__(
        self,
        name: str,
        *,
        connect_timeout_s: float = 10.0,
        on_full: str | None = None,
        fallback: Callable[[Any], Any] | None = None,
        wake: str | None = None,
        group: str | None = None,
        allow_pickle: bool = False,
        length: Callable[[Any], int] | None = None,
        tracing: bool | None = None,
    ) -> None:
        shm_name(name)  # a bad name is an error here, not at the first request
        choice(WAKE, wake, "wake")
        on_full = choice(ON_FULL, on_full or ("fallback" if fallback else None), "on_full")
        if (on_full == "fallback") != (fallback is not None):
            raise ValueError("on_full='fallback' and fallback=callable go together")
        if fallback is not None and not callable(fallback):
            raise ValueError(f"fallback={fallback!r}: give a callable that takes the request")
        if isinstance(connect_timeout_s, bool) or not isinstance(connect_timeout_s, (int, float)) or not 0 <= connect_timeout_s <= 1e9:
            raise ValueError(f"connect_timeout_s={connect_timeout_s!r}: give seconds from 0 to 1e9")
        if not isinstance(allow_pickle, bool):
            raise ValueError(f"allow_pickle={allow_pickle!r}: give True or False")
        if length is not None and not callable(length):
            raise ValueError(f"length={length!r}: give a callable that takes the request")
        self.name, self.connect_timeout_s, self.group, self._allow_pickle = name, connect_timeout_s, group, allow_pickle
        self._gid = -1 if group is None else group_id(group)
        self._on_full, self._fallback, self._wake, self._length = on_full, fallback, wake, length
        self._stamp = stamper() if is_wanted(tracing) else None
        self._link: Link | None = None
        self._lock = Lock()
        self._reserved: dict[int, weakref.ref[Reservation]] = {}  # by id of the array
        self._closed = False
        _clients.add(self)

    def submit(self, request: Any, timeout: float | None = None, *, latency_budget_ms: float | None = None, priority: int = 0) -> Any:
        """Sends a request and waits for its answer. Request and answer: see gpuworker.payload for the types that cross.

        timeout: seconds for everything from here to the answer. latency_budget_ms: in place of the worker's own. priority: 0 to 255, higher goes first, where the
        worker has priorities. Raises DeadlineExceeded when the timeout passes, BudgetExceeded, QueueFull, WorkerNotFound, WorkerDied, WorkerDraining,
        PayloadTooLarge, InvalidRequest, RequestTooLong, UnsupportedPayload, or what `run_batch` raised for this request.
        """
        deadline_ns = 0 if timeout is None else deadline(timeout)
        link = self._link
        if link is None or link.lost:
            link = run(self._connect(deadline_ns))
        payload, terms = request, 0
        if link.fits or latency_budget_ms is not None or priority != 0 or self._length is not None:
            link, payload, terms = self._prepare(link, request, latency_budget_ms, priority, deadline_ns)
        if self._reserved and (reservation := self._reservation_of(request)):
            return reservation.enqueue(deadline_ns, terms).result()
        try:
            ticket = link.send(payload, deadline_ns, terms)
            if ticket >= 0:
                return link.answer(ticket, deadline_ns)
        except BaseException:
            link.undo()
            raise
        return self._overflow(ticket, link, request, payload, deadline_ns, terms).result()

    def enqueue(self, request: Any, timeout: float | None = None, *, latency_budget_ms: float | None = None, priority: int = 0) -> Pending:
        """Sends a request without waiting for its answer. Raises as `submit` does for what can be known now.

        A Pending that is dropped without `result()` withdraws its request.
        """
        deadline_ns = 0 if timeout is None else deadline(timeout)
        link, payload, terms = self._prepare(self._live_link(deadline_ns), request, latency_budget_ms, priority, deadline_ns)
        if self._reserved and (reservation := self._reservation_of(request)):
            return reservation.enqueue(deadline_ns, terms)
        pending = self._send(link, payload, deadline_ns, terms)
        return self._overflow(pending, link, request, payload, deadline_ns, terms) if isinstance(pending, int) else pending

    def _send(self, link: Link, payload: Any, deadline_ns: int, terms: int) -> Pending | int:
        """A Pending, or the negative errno that prevented one."""
        try:
            ticket = link.send(payload, deadline_ns, terms)
            if ticket < 0:
                return ticket
            pending = Pending(link, ticket, deadline_ns)
        except BaseException:
            link.undo()
            raise
        link.settle()
        return pending

    def map(
        self, requests: Iterable[Any], timeout: float | None = None, *, latency_budget_ms: float | None = None, priority: int = 0
    ) -> Iterator[Any]:  # fmt: skip
        """Answers in the order of the requests, with several on their way at a time. `timeout` in seconds covers each request from its sending on.

        A full ring never fails it while it has requests of its own to wait for. The first error ends it and withdraws the rest.
        """
        pending: deque[Pending] = deque()
        try:
            for request in requests:
                prepared_for: Link | None = None
                while True:
                    deadline_ns = 0 if timeout is None else deadline(timeout)
                    link = self._live_link(deadline_ns)
                    if link is not prepared_for:
                        prepared_for, payload, terms = self._prepare(link, request, latency_budget_ms, priority, deadline_ns)
                        link = prepared_for
                    sent = -errno.EAGAIN if len(pending) >= link.window else self._send(link, payload, deadline_ns, terms)
                    if sent in _OVERFLOW and pending:
                        yield pending.popleft().result()
                        continue
                    pending.append(self._overflow(sent, link, request, payload, deadline_ns, terms) if isinstance(sent, int) else sent)
                    break
            while pending:
                yield pending.popleft().result()
        finally:
            for left in pending:
                left.drop()

    def reserve(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32, timeout: float | None = None) -> Reservation:
        """A slot to be filled in place, so that the array is not copied at all on its way out:

            with client.reserve((3, 224, 224), "uint8") as array:
                decode_image_into(array)
                answer = client.submit(array)

        The array is C-contiguous, 64-byte aligned, not initialised, and valid only inside the block. `timeout` in seconds: for getting a slot.
        """
        return Reservation(self, shape, dtype, 0 if timeout is None else deadline(timeout))

    def close(self) -> None:
        """Leaves the worker. Requests that are on their way are withdrawn (RequestCancelled). Closing twice is fine."""
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
        if link is not None and link.pid == os.getpid():
            link.segment.leave()
            if not link.segment.is_own:
                spill.sweep(link.segment)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<gpuworker.Client of {self.name!r}, {'closed' if self._closed else 'connected' if self._link else 'not connected yet'}>"

    # Getting a link, and what to do when there is no slot.

    def _reservation_of(self, request: Any) -> Reservation | None:
        found = self._reserved.get(id(request))
        return found() if found is not None else None

    def _prepare(self, link: Link, request: Any, latency_budget_ms: float | None, priority: int, deadline_ns: int) -> tuple[Link, Any, int]:
        """-> (link, what to send there, and on which terms). What a worker that has ended would do with a request is no matter: the one that there is now is
        asked."""
        while (found := self._fit(link, request, latency_budget_ms, priority)) is None:
            link = run(self._successor(link, deadline_ns))
        return link, *found

    def _fit(self, link: Link, request: Any, latency_budget_ms: float | None, priority: int) -> tuple[Any, int] | None:
        """-> (what to send, see Link.fit, on which terms, see terms_of); None if the worker has ended."""
        payload, length = request, 0
        if link.fits:
            try:
                payload, length = link.fit(request)
            except InvalidRequest:
                if not link.scheduling().has_ended:
                    raise
                return None
        if self._length is not None:
            length = length_of(request, self._length)
        if latency_budget_ms is None and priority == 0 and not length:
            return payload, 0
        scheduling = link.scheduling()
        return None if scheduling.has_ended else (payload, terms_of(self.name, scheduling, latency_budget_ms, priority, length))

    def _successor(self, link: Link, deadline_ns: int) -> Steps[Link]:
        link.lost = True
        return (yield from self._connect(deadline_ns))

    def _live_link(self, deadline_ns: int) -> Link:
        link = self._link
        return run(self._connect(deadline_ns)) if link is None or link.lost else link

    def _connect(self, deadline_ns: int, give_up_ns: int | None = None) -> Steps[Link]:
        """The link, made on first use, after a fork, and when the worker was replaced. give_up_ns: on CLOCK_MONOTONIC, in place of connect_timeout_s from now."""
        if give_up_ns is None:
            give_up_ns = time.monotonic_ns() + int(self.connect_timeout_s * 1e9)
        pause_s = 0.002
        while True:
            with self._lock:
                if self._closed:
                    raise RuntimeError(f"{self!r} cannot send")
                if self._link is not None and self._link.is_usable():
                    self._link.lost = False  # a new owner took the segment over
                    return self._link
                self._link = None
                why = self._try_to_link()
                if self._link is not None:
                    return self._link
            now = time.monotonic_ns()
            if deadline_ns and now >= deadline_ns:
                raise DeadlineExceeded(f"the timeout passed before worker {self.name!r} could be reached: {why}", "connecting")
            if now >= give_up_ns and why is not None:
                raise type(why)(f"{why} (waited connect_timeout_s={self.connect_timeout_s:g})")
            yield Pause(pause_s)
            pause_s = min(pause_s * 1.5, 0.05)

    def _try_to_link(self) -> GpuWorkerError | None:
        """Sets `_link`, or returns why that must wait. Raises SegmentError and WorkerDied for what waiting does not cure."""
        try:
            segment = Segment.attach(self.name, gid=self._gid)
        except WorkerNotFound as missing:
            return missing
        state = segment.overview().state
        if state == State.FAILED:
            raise remedies.failed(segment)
        if segment.is_dead():
            return WorkerNotFound(f"the owner of worker {self.name!r} (pid {segment.owner().pid}) is dead; start it again")
        if state not in (State.SERVING, State.RESTARTING):
            return WorkerNotFound(f"worker {self.name!r} is {state_name(state)}")
        if not segment.join():
            return SegmentError(f"all max_clients={segment.overview().max_participants} places of worker {self.name!r} are taken")
        self._link = Link(segment, self._wake, self._allow_pickle, self._stamp)
        return None

    def _overflow(self, problem: int, sent_to: Link, request: Any, payload: Any, deadline_ns: int, terms: int) -> Pending:
        """The request found no slot, or no ring, or would be late: reconnects, or follows the overflow policy. `payload`: what it is to `sent_to`."""
        if self._falls_back(problem):
            assert self._fallback is not None
            return Pending.settled(self._fallback(request))
        return run(self._send_late(problem, sent_to, request, payload, deadline_ns, terms, lambda link, ticket: Pending(link, ticket, deadline_ns)))

    def _falls_back(self, problem: int) -> bool:
        """Whether the fallback answers a request that found no slot; then that is counted."""
        if problem not in _OVERFLOW or self._fallback is None:
            return False
        if self._link is not None:
            lib.gw_count_client(self._link.port, lib.GW_FELL_BACK)
        return True

    def _send_now(self, link: Link, payload: Any, deadline_ns: int, terms: int) -> int:
        """As Link.send, unless others have waited for a slot before."""
        return link.send(payload, deadline_ns, terms)

    def _send_late(
        self, problem: int, sent_to: Link, request: Any, payload: Any, deadline_ns: int, terms: int, take_charge: Callable[[Link, int], T]
    ) -> Steps[T]:
        """Sends a request after a first attempt failed with `problem`. -> what `take_charge` makes of its ticket."""
        while True:
            try:
                link, ticket = yield from self._claim(problem, deadline_ns, terms)
                if link is not sent_to:  # another worker, which may have declared something else
                    payload, length = link.fit(request)
                    sent_to, terms = link, terms if self._length is not None else with_length(terms, length)
                problem = link.send_claimed(ticket, payload, deadline_ns, terms)
                sent = take_charge(link, problem) if problem >= 0 else None
            except BaseException:
                if self._link is not None:
                    self._link.undo()
                raise
            link.settle()
            if sent is not None:
                return sent

    def _claim(self, problem: int, deadline_ns: int, terms: int = 0) -> Steps[tuple[Link, int]]:
        """A slot after a first attempt failed with `problem`; waits for one if the policy is to block."""
        while True:
            link = self._link
            if problem == -errno.ESHUTDOWN:
                raise WorkerDraining(f"worker {self.name!r} is draining and takes no new requests")
            if problem in (-errno.ECHILD, -errno.ENOTCONN) or link is None or link.lost:
                link = yield from self._connect(deadline_ns)
                ticket = lib.gw_claim(link.port)
            elif problem not in (*_OVERFLOW, -errno.ETIMEDOUT, -errno.EINTR):
                raise SegmentError(remedies.explain(problem, ""))
            elif late := (remedies.budget_exceeded(link.port, terms) if problem == -errno.ETIME else None):
                problem = yield from self._wait_or_raise(link, *late, deadline_ns)
                continue
            elif problem == -errno.ETIME:
                ticket = lib.gw_claim(link.port)  # it is not late any more
            elif (self._on_full or link.on_full) != "block":
                lib.gw_count_client(link.port, lib.GW_REJECTED)
                raise remedies.queue_full(link.segment, problem)
            else:
                now = time.monotonic_ns()
                if deadline_ns and now >= deadline_ns:
                    lib.gw_count_client(link.port, lib.GW_EXPIRED)
                    raise DeadlineExceeded("the timeout passed while waiting for a free slot; the request did not run", "claiming")
                until_ns = now + SLICE_NS
                ticket = yield Room(link, min(until_ns, deadline_ns) if deadline_ns else until_ns, deadline_ns)
                if ticket == -errno.ETIMEDOUT and link.segment.is_dead():
                    raise link.died()
            if ticket >= 0:
                return link, ticket
            problem = ticket

    def _wait_or_raise(self, link: Link, late: BudgetExceeded, is_hopeless: bool, deadline_ns: int) -> Steps[int]:
        """A request would be late: if the policy is to block, it waits for there to be fewer before it. -> the problem as it is then."""
        now = time.monotonic_ns()
        if is_hopeless or (self._on_full or link.on_full) != "block":
            lib.gw_count_client(link.port, lib.GW_FORECAST_LATE)
            raise late
        if deadline_ns and now >= deadline_ns:
            lib.gw_count_client(link.port, lib.GW_EXPIRED)
            raise DeadlineExceeded("the timeout passed while the request could not have been in time; it did not run", "claiming")
        state = link.segment.overview().state
        if state >= State.DRAINING or link.segment.is_dead():
            return -errno.ESHUTDOWN if state == State.DRAINING else -errno.ENOTCONN
        yield Pause(min(late.retry_after_ms / 1e3, SLICE_NS / 1e9, (deadline_ns - now) / 1e9 if deadline_ns else 1.0))
        return -errno.ETIME


def _after_fork_in_child() -> None:
    """Links belong to the parent: the child makes its own. Locks may have been held by threads that do not exist here."""
    for client in list(_clients):
        client._lock = Lock()
        client._link = None
        client._reserved = {}


os.register_at_fork(after_in_child=_after_fork_in_child)
