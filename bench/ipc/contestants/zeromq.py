"""pyzmq over ipc://, REQ clients and a ROUTER server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ipc.contestant import MAX_BATCH_SIZE, Call, Contestant, identity

_ZERO_COPY_FROM_BYTES = 65536


class ZeroMq(Contestant):
    name = "pyzmq"
    title = "pyzmq ipc REQ/ROUTER"
    note = "copy=False from 64 KiB up"
    requires = ("zmq",)

    def open(self) -> None:
        self.address = f"ipc://{self.directory}/zmq"
        self.copy = self.cell.payload_bytes < _ZERO_COPY_FROM_BYTES

    def serve(self, ready: Callable[[], None]) -> NoReturn:
        import zmq

        router = zmq.Context().socket(zmq.ROUTER)
        router.bind(self.address)
        ready()
        while True:
            messages = [router.recv_multipart(copy=self.copy)]
            try:
                while len(messages) < MAX_BATCH_SIZE:
                    messages.append(router.recv_multipart(zmq.NOBLOCK, copy=self.copy))
            except zmq.Again:
                pass
            replies = identity([payload for _, _, payload in messages])
            for (caller, empty, _), reply in zip(messages, replies, strict=True):
                router.send_multipart((caller, empty, reply), copy=self.copy)

    def connect(self, index: int) -> Call:
        import zmq

        # Kept on self: a context that is collected closes its sockets.
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REQ)
        self.socket.connect(self.address)
        send, receive, decode = self.socket.send, self.socket.recv, self.cell.decode

        def call(payload: Any) -> Any:
            send(payload)
            return decode(receive())

        def call_without_copies(payload: Any) -> Any:
            send(payload, copy=False)
            return decode(receive(copy=False).buffer)

        return call if self.copy else call_without_copies
