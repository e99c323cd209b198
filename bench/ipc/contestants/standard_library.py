"""multiprocessing's two channels."""

from __future__ import annotations

import multiprocessing
import select
from collections.abc import Callable
from queue import Empty
from typing import Any, NoReturn

from ipc.contestant import MAX_BATCH_SIZE, Call, Contestant, identity

_fork = multiprocessing.get_context("fork")


class Pipe(Contestant):
    name = "pipe"
    title = "multiprocessing.Pipe (bytes)"
    note = "send_bytes/recv_bytes, no pickle; one pipe per client, epoll at the server"

    def open(self) -> None:
        self.pipes = [_fork.Pipe() for _ in range(self.cell.clients)]

    def serve(self, ready: Callable[[], None]) -> NoReturn:
        ends = {server.fileno(): server for server, _ in self.pipes}
        poller = select.epoll()
        for descriptor in ends:
            poller.register(descriptor, select.EPOLLIN)
        ready()
        while True:
            callers = [ends[descriptor] for descriptor, _ in poller.poll(maxevents=MAX_BATCH_SIZE)]
            for caller, reply in zip(callers, identity([caller.recv_bytes() for caller in callers]), strict=True):
                caller.send_bytes(reply)

    def connect(self, index: int) -> Call:
        send, receive, decode = self.pipes[index][1].send_bytes, self.pipes[index][1].recv_bytes, self.cell.decode

        def call(payload: Any) -> Any:
            send(payload)
            return decode(receive())

        return call


class Queue(Contestant):
    name = "queue"
    title = "multiprocessing.Queue"
    note = "pickle, and a feeder thread at each putting side; one request queue, one reply queue per client"

    def open(self) -> None:
        self.requests, self.replies = _fork.Queue(), [_fork.Queue() for _ in range(self.cell.clients)]

    def serve(self, ready: Callable[[], None]) -> NoReturn:
        ready()
        while True:
            batch = [self.requests.get()]
            try:
                while len(batch) < MAX_BATCH_SIZE:
                    batch.append(self.requests.get_nowait())
            except Empty:
                pass
            for (index, _), reply in zip(batch, identity([payload for _, payload in batch]), strict=True):
                self.replies[index].put(reply)

    def connect(self, index: int) -> Call:
        put, get = self.requests.put, self.replies[index].get

        def call(payload: Any) -> Any:
            put((index, payload))
            return get()

        return call
