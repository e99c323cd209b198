"""What a client waits for before its request is on its way, apart from how it waits.

Connecting and getting a slot are written once, as generators that yield what has to be waited for: the blocking client waits there and then (`run`), the one
of an event loop awaits it (async_client.py).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gpuworker._native import lib

if TYPE_CHECKING:
    from gpuworker.client.link import Link

T = TypeVar("T")


class Pause(NamedTuple):
    """So many seconds."""

    seconds: float

    def wait(self) -> int:
        """Here and now."""
        time.sleep(self.seconds)
        return 0


class Room(NamedTuple):
    """A free slot, before `deadline_ns` on CLOCK_MONOTONIC (0: none), and for now until `until_ns`. The generator is sent the ticket, or the negative errno that
    says why there is none, -ETIMEDOUT when it is to ask whether the owner lives."""

    link: Link
    until_ns: int
    deadline_ns: int

    def wait(self) -> int:
        """Here and now."""
        return int(lib.gw_claim_wait(self.link.port, self.until_ns))


Steps = Generator["Pause | Room", int, T]


def run(steps: Steps[T]) -> T:
    """Waits in this thread. What interrupts it ends the generator there (GeneratorExit), which then gives back what it has claimed."""
    try:
        step = next(steps)
        while True:
            step = steps.send(step.wait())
    except StopIteration as over:
        result: T = over.value
        return result
    finally:
        steps.close()
