"""faster-fifo: a queue in shared memory, written in C++ and Cython."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ipc.contestant import MAX_BATCH_SIZE, Call, Contestant, identity

_LONG_S = 3600.0


class FasterFifo(Contestant):
    name = "faster-fifo"
    title = "faster-fifo"
    note = "pickle (its default); get_many at the server, one reply queue per client"
    requires = ("faster_fifo",)

    def open(self) -> None:
        import faster_fifo

        size_bytes = 1_000_000 + 2 * self.cell.payload_bytes
        self.requests = faster_fifo.Queue(max_size_bytes=size_bytes)
        self.replies = [faster_fifo.Queue(max_size_bytes=size_bytes) for _ in range(self.cell.clients)]

    def serve(self, ready: Callable[[], None]) -> NoReturn:
        ready()
        while True:
            batch = self.requests.get_many(timeout=_LONG_S, max_messages_to_get=MAX_BATCH_SIZE)
            for (index, _), reply in zip(batch, identity([payload for _, payload in batch]), strict=True):
                self.replies[index].put(reply)

    def connect(self, index: int) -> Call:
        put, get = self.requests.put, self.replies[index].get

        def call(payload: Any) -> Any:
            put((index, payload))
            return get(timeout=_LONG_S)

        return call
