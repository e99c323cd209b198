"""What saves a request over HTTP its system calls and timers, looked at by itself."""

import asyncio

import pytest

from gpuworker.frontends.http.patience import Patience, of

protocol = pytest.importorskip("gpuworker.frontends.http.protocol")


class Wire:
    """A transport that notes what it is told."""

    def __init__(self):
        self.told = []

    def write(self, data):
        self.told.append([data])

    def writelines(self, pieces):
        self.told.append(list(pieces))

    def close(self):
        self.told.append("closed")

    def is_closing(self):
        return "closed" in self.told

    def get_extra_info(self, name):
        return name

    def pause_reading(self):
        self.told.append("paused")


def on_a_wire(act):
    async def run():
        wire = Wire()
        await act(wire, protocol.Joining(wire, asyncio.get_running_loop()))
        return wire.told

    return asyncio.run(run())


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


def test_a_head_goes_out_with_its_body():
    async def act(wire, joined):
        for _ in range(2):
            joined.write(HEAD)
            assert wire.told == [] or len(wire.told) == 1
            joined.write(b"body")
        await asyncio.sleep(0)
        assert joined.get_extra_info("peername") == "peername"
        assert not joined.is_closing()

    assert on_a_wire(act) == [[HEAD, b"body"]] * 2


def test_a_head_whose_body_comes_later_does_not_wait_for_it():
    async def act(wire, joined):
        joined.write(HEAD)
        await asyncio.sleep(0)
        assert wire.told == [[HEAD]]
        joined.write(b"first")
        joined.write(b"second")
        joined.pause_reading()

    assert on_a_wire(act) == [[HEAD], [b"first"], [b"second"], "paused"]


def test_a_connection_that_is_closed_loses_nothing():
    async def act(wire, joined):
        joined.write(HEAD)
        joined.close()
        await asyncio.sleep(0)
        assert joined.is_closing()

    assert on_a_wire(act) == [[HEAD], "closed"]


@pytest.mark.parametrize("pieces", [[b"late"], [HEAD, b"late"], [HEAD]])
def test_what_is_written_after_the_end_is_dropped(pieces):
    async def act(wire, joined):
        joined.write(HEAD)
        wire.close()  # the caller has gone, and the server does not know yet
        for piece in pieces:
            joined.write(piece)
        await asyncio.sleep(0)
        joined.close()

    assert on_a_wire(act) == ["closed", "closed"]


class Guest:
    def __init__(self):
        self.has_been_told = asyncio.Event()

    def watch(self):
        self.has_been_told.set()


def test_only_who_stays_is_watched():
    async def run():
        patience = of(asyncio.get_running_loop())
        assert of(asyncio.get_running_loop()) is patience
        early, late = Guest(), Guest()
        patience.enter(early)
        patience.enter(late)
        patience.leave(early)
        await asyncio.wait_for(late.has_been_told.wait(), 30)
        assert not early.has_been_told.is_set()
        again = Guest()
        patience.enter(again)
        await asyncio.wait_for(again.has_been_told.wait(), 30)
        return patience

    first, second = asyncio.run(run()), asyncio.run(run())
    assert first is not second  # each loop has its own


def test_nobody_is_watched_when_nobody_is_there():
    class Clock:
        calls = 0

        def call_later(self, _, tick):
            self.calls += 1
            self.tick = tick

    clock = Clock()
    patience = Patience(clock)
    guest = object()
    patience.enter(guest)
    patience.leave(guest)
    clock.tick()
    assert clock.calls == 1
