"""Processes that do with a ring what they are told, one command at a time, for test_state_machine.py."""

import contextlib
import ctypes
import errno
import multiprocessing
import os
import signal
import threading
import time

from gpuworker._native import ffi, lib
from gpuworker.segment import Geometry, Identity, Segment
from gpuworker.segment.liveness import Watch

CAPACITY, PLACES, QUOTA = 3, 4, 2
GEOMETRY = Geometry(capacity=CAPACITY, max_request_bytes=64, max_response_bytes=64, max_participants=PLACES)
PR_SET_PDEATHSIG = 1
LONG_NS = 20_000_000_000
WOKEN_BEFORE_NS = 15_000_000_000


def start(kind, *arguments):
    """A new actor, which has said its greeting."""
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid:
        theirs.close()
        return Actor(pid, ours)
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the test may be ended at any time
        actor = kind(*arguments)
        theirs.send(actor.greeting)
        while True:
            method, *rest = theirs.recv()
            theirs.send(getattr(actor, method)(*rest))
    finally:
        os._exit(1)


class Actor:
    """The test's handle to one. Call it with a method and its arguments."""

    def __init__(self, pid, pipe):
        self._pid, self._pipe = pid, pipe
        self.greeting = pipe.recv()

    def __call__(self, method, *arguments):
        self._pipe.send((method, *arguments))
        return self._pipe.recv()

    def signal(self, number):
        os.kill(self._pid, number)
        if number == signal.SIGSTOP:
            os.waitpid(self._pid, os.WUNTRACED)

    def kill(self):
        """Until it is dead. Twice is fine."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pipe.close()
            self._pid = 0


class ClientActor:
    """Greets with its place."""

    def __init__(self, name):
        self._segment = Segment.attach(name)
        assert self._segment.join()
        self._port, self.greeting = self._segment.port, self._segment.port.me
        self._waits = {}

    def _read(self, ticket, response):
        """Kind, and for bytes the number in it."""
        if response < 0:
            return response
        kind, total = response >> 54, response & 0xFFFF
        return (kind, int(bytes(self._segment.responses[ticket & 0xFFF][:total]))) if kind == lib.GW_KIND_BYTES else (kind,)

    def claim(self):
        return lib.gw_claim(self._port)

    def publish(self, ticket, number, is_overdue):
        text = b"%d" % number
        if lib.gw_phase(self._port, ticket) == 1:  # CLAIMED: it is ours to write to
            self._segment.requests[ticket & 0xFFF][: len(text)] = text
        return lib.gw_publish(self._port, ticket, lib.GW_KIND_BYTES << 54 | len(text), int(is_overdue), 0)

    def submit(self, number, is_overdue):
        text = b"%d" % number
        return lib.gw_submit(self._port, lib.GW_KIND_BYTES, b"", 0, text, len(text), int(is_overdue), 0)

    def poll(self, ticket):
        return self._read(ticket, lib.gw_poll(self._port, ticket))

    def wait(self, ticket, seconds):
        return self._read(ticket, lib.gw_wait(self._port, ticket, 0, int(seconds * 1e9)))

    def begin_to_wait(self, ticket):
        """In a thread, which most likely sleeps by the time this returns."""

        def body():
            began_ns = time.monotonic_ns()
            response = -errno.EINTR
            while response == -errno.EINTR:
                response = lib.gw_wait(self._port, ticket, 0, LONG_NS)
            self._waits[ticket][1] = self._read(ticket, response), time.monotonic_ns() - began_ns < WOKEN_BEFORE_NS

        thread = threading.Thread(target=body, daemon=True)
        self._waits[ticket] = [thread, None]
        thread.start()
        give_up_s = time.monotonic() + 1
        while time.monotonic() < give_up_s and not _sleeps(thread):
            time.sleep(0)

    def end_of_wait(self, ticket):
        thread, _ = self._waits[ticket]
        thread.join()
        return self._waits.pop(ticket)[1]

    def release(self, ticket):
        return lib.gw_release(self._port, ticket)

    def cancel(self, ticket):
        return lib.gw_cancel(self._port, ticket)

    def close(self):
        for thread, _ in self._waits.values():
            del thread
        self._segment.close()


def _sleeps(thread):
    """Whether the kernel says that the thread sleeps."""
    with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{thread.native_id}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"S"
    return True


class OwnerActor:
    """Takes the segment over, or makes it. Greets with the number of requests that are to run again."""

    def __init__(self, name, max_attempts):
        self._segment = Segment.own(name, GEOMETRY)
        self._port = port = self._segment.port
        lib.gw_set_policy(port, lib.GW_REJECT, lib.GW_PARK, QUOTA, QUOTA, 0, CAPACITY)
        assert lib.gw_open_backlog(port) == 0
        self.greeting = lib.gw_recover(port, max_attempts, lib.GW_KIND_DIED)
        lib.gw_set_state(port, lib.GW_SERVING)
        self._taken = ffi.new("uint64_t[]", 2 * CAPACITY)

    def _number(self, ticket, described):
        return int(bytes(self._segment.requests[ticket & 0xFFF][: described & 0xFFFF]))

    def collect(self):
        n = lib.gw_collect(self._port, 0)
        items = lib.gw_backlog(self._port)
        return [items[k].ticket for k in range(n)]

    def take(self, count):
        n = lib.gw_take(self._port, count, 0, self._taken)
        words = ffi.unpack(self._taken, 2 * n) if n else []
        return [(ticket, self._number(ticket, described)) for ticket, described in zip(words[::2], words[1::2], strict=True)]

    def finish(self, tickets):
        """Answers each with the number in its request."""
        pairs = ffi.new("uint64_t[]", 2 * len(tickets) + 2)
        for k, ticket in enumerate(tickets):
            text = bytes(self._segment.requests[ticket & 0xFFF]).partition(b"\0")[0]
            lib.gw_respond(self._port, ticket, lib.GW_KIND_BYTES, b"", 0, text, len(text))
            pairs[2 * k] = ticket
        return lib.gw_finish(self._port, pairs, len(tickets))

    def refuse(self, ticket):
        return lib.gw_refuse(self._port, ticket, lib.GW_KIND_DRAINING)

    def expire(self):
        return lib.gw_expire(self._port, time.monotonic_ns())

    def reap(self):
        """The places of the dead, and of those that left and can do nothing any more."""
        view, reaped, place = ffi.new("gw_participant_view *"), [], 0
        while place := lib.gw_next_participant(self._port, place):
            joined = lib.gw_read_participant(self._port, place, view)
            who = view.identity
            watch = Watch(Identity(who.pid, who.start_ticks, who.pid_namespace), self._segment.fd, place)
            if watch.is_dead() or (joined == lib.GW_LEFT and lib.gw_is_locked(self._segment.fd, place) == 0):
                lib.gw_reap(self._port, place)
                reaped.append(place)
            watch.close()
        return reaped
