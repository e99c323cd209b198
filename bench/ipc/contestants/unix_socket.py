"""A Unix stream socket, 8 bytes of length before each message."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from ipc.contestant import MAX_BATCH_SIZE, Call, Contestant, identity

_HEADER = struct.Struct("=Q")


def _send(connection: socket.socket, payload: Any) -> None:
    view = memoryview(payload).cast("B")
    sent_bytes = connection.sendmsg((_HEADER.pack(len(view)), view)) - _HEADER.size
    if sent_bytes < len(view):
        connection.sendall(view[sent_bytes:])


def _receive(connection: socket.socket, header: bytearray, payload: memoryview) -> None:
    """Fill `payload`, whose size the other side knows; usually one system call for header and payload."""
    received_bytes = connection.recvmsg_into((header, payload))[0] - _HEADER.size
    if received_bytes < 0:
        raise EOFError("the other side closed the socket")
    while received_bytes < len(payload):
        received_bytes += connection.recv_into(payload[received_bytes:])
    if _HEADER.unpack(header)[0] != len(payload):
        raise RuntimeError("a message of another length arrived")


class UnixSocket(Contestant):
    name = "uds"
    title = "Unix stream socket"
    note = "sendmsg/recvmsg_into, one socket per client, epoll at the server"

    def open(self) -> None:
        self.pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(self.cell.clients)]

    def serve(self, ready: Callable[[], None]) -> NoReturn:
        ends = {server.fileno(): server for server, _ in self.pairs}
        buffers = {descriptor: memoryview(bytearray(self.cell.payload_bytes)) for descriptor in ends}
        header, poller = bytearray(_HEADER.size), select.epoll()
        for descriptor in ends:
            poller.register(descriptor, select.EPOLLIN)
        ready()
        while True:
            callers = [descriptor for descriptor, _ in poller.poll(maxevents=MAX_BATCH_SIZE)]
            for descriptor in callers:
                _receive(ends[descriptor], header, buffers[descriptor])
            for descriptor, reply in zip(callers, identity([buffers[descriptor] for descriptor in callers]), strict=True):
                _send(ends[descriptor], reply)

    def connect(self, index: int) -> Call:
        connection, header, size_bytes = self.pairs[index][1], bytearray(_HEADER.size), self.cell.payload_bytes

        def call_array(payload: np.ndarray) -> np.ndarray:
            _send(connection, payload)
            reply = np.empty(len(payload), np.float32)
            _receive(connection, header, memoryview(reply).cast("B"))
            return reply

        def call_bytes(payload: bytes) -> bytes:
            _send(connection, payload)
            reply = bytearray(size_bytes)
            _receive(connection, header, memoryview(reply))
            return bytes(reply)

        return call_array if self.cell.is_array else call_bytes
