"""POSIX message queues, as the kernel ships them: 10 messages of 8 KiB."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any, NoReturn

from ipc.contestant import MAX_BATCH_SIZE, Call, Contestant, identity

_INDEX = struct.Struct("=I")
_KERNEL_LIMIT_BYTES = 8192


class MessageQueue(Contestant):
    name = "posix-mq"
    title = "posix_ipc.MessageQueue"
    note = "one request queue (the client's number before each payload), one reply queue per client; kernel limit 8 KiB a message"
    requires = ("posix_ipc",)
    max_payload_bytes = _KERNEL_LIMIT_BYTES - _INDEX.size

    def _queue(self, suffix: object, messages: int = 0) -> Any:
        import posix_ipc

        name = f"/{self.token}-{suffix}"
        if not messages:
            return posix_ipc.MessageQueue(name)
        return posix_ipc.MessageQueue(name, posix_ipc.O_CREX, max_messages=messages, max_message_size=self.cell.payload_bytes + _INDEX.size)

    def open(self) -> None:
        self.requests = self._queue("requests", messages=10)
        self.replies = [self._queue(index, messages=1) for index in range(self.cell.clients)]

    def serve(self, ready: Callable[[], None]) -> NoReturn:
        receive, unpack = self.requests.receive, _INDEX.unpack_from
        ready()
        while True:
            messages = [receive()[0]]
            messages += [receive()[0] for _ in range(min(self.requests.current_messages, MAX_BATCH_SIZE - 1))]
            for message, reply in zip(messages, identity([memoryview(message)[_INDEX.size :] for message in messages]), strict=True):
                self.replies[unpack(message)[0]].send(bytes(reply))

    def connect(self, index: int) -> Call:
        send, receive, prefix, decode = self.requests.send, self.replies[index].receive, _INDEX.pack(index), self.cell.decode

        def call(payload: Any) -> Any:
            send(b"".join((prefix, payload)))
            return decode(receive()[0])

        return call

    def clean(self) -> None:
        import posix_ipc

        for suffix in ("requests", *range(self.cell.clients)):
            with contextlib.suppress(posix_ipc.ExistentialError):
                posix_ipc.unlink_message_queue(f"/{self.token}-{suffix}")
