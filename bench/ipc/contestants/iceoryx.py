"""iceoryx2 request-response: polled by both sides, or with its events for the wake-ups."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from ipc.contestant import MAX_BATCH_SIZE, Call, Contestant, identity

_MAX_NODES = 32


class _ClientNumber(ctypes.Structure):
    _fields_ = [("index", ctypes.c_uint64)]


class IceoryxPolled(Contestant):
    name = "iceoryx2-polled"
    title = "iceoryx2, polled"
    note = "request-response on slices of bytes; both sides poll receive() with sched_yield between"
    requires = ("iceoryx2",)

    def _join(self) -> ModuleType:
        """A node of this process, and the service. Everything on disk and in /dev/shm carries this cell's token."""
        import iceoryx2 as iox2

        iox2.set_log_level(iox2.LogLevel.Error)
        config = iox2.config.default()
        config.global_cfg.prefix = iox2.FileName.new(self.token)
        config.global_cfg.root_path = iox2.Path.new(str(self.directory))
        self.node = iox2.NodeBuilder.new().config(config).create(iox2.ServiceType.Ipc)
        octets = iox2.Slice[ctypes.c_uint8]
        builder = self.node.service_builder(iox2.ServiceName.new("echo")).request_response(octets, octets).request_header(_ClientNumber)
        self.service = builder.max_clients(_MAX_NODES).max_nodes(_MAX_NODES).open_or_create()
        return iox2

    def _wait_for_requests(self) -> None:
        os.sched_yield()

    def _answered(self, index: int) -> None:
        """Tell client `index` that its response is there."""

    def serve(self, ready: Callable[[], None]) -> NoReturn:
        self._join()
        self._open_server_events()
        self.server = self.service.server_builder().initial_max_slice_len(self.cell.payload_bytes).create()
        receive, size_bytes = self.server.receive, self.cell.payload_bytes
        ready()
        while True:
            batch = []
            while len(batch) < MAX_BATCH_SIZE and (request := receive()) is not None:
                batch.append(request)
            if not batch:
                self._wait_for_requests()
            for request in identity(batch):
                response = request.loan_slice_uninit(size_bytes)
                ctypes.memmove(response.payload_ptr, request.payload_ptr, size_bytes)
                response.assume_init().send()
                self._answered(ctypes.c_uint64.from_address(request.user_header_ptr).value)

    def _open_server_events(self) -> None:
        pass

    def _open_client_events(self, index: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """How a client rings the server after a request, and what it does between two looks for its response."""
        return (lambda: None), os.sched_yield

    def connect(self, index: int) -> Call:
        self._join()
        ring, wait = self._open_client_events(index)
        self.client = self.service.client_builder().initial_max_slice_len(self.cell.payload_bytes).create()
        loan, size_bytes, is_array = self.client.loan_slice_uninit, self.cell.payload_bytes, self.cell.is_array
        memory = ctypes.c_ubyte * size_bytes  # the fastest of ctypes' ways to an array's memory

        def call(payload: Any) -> Any:
            request = loan(size_bytes)
            ctypes.memmove(request.payload_ptr, memory.from_buffer(payload) if is_array else payload, size_bytes)
            ctypes.c_uint64.from_address(request.user_header_ptr).value = index
            pending = request.assume_init().send()
            ring()
            while (response := pending.receive()) is None:
                wait()
            if not is_array:
                return ctypes.string_at(response.payload_ptr, size_bytes)
            return np.frombuffer(memory.from_address(response.payload_ptr), np.float32).copy()

        return call


class IceoryxEvents(IceoryxPolled):
    name = "iceoryx2-events"
    title = "iceoryx2, events"
    note = "as above, blocking: one event service rings the server, one per client rings back"

    def _join(self) -> ModuleType:
        self.iox2 = super()._join()
        return self.iox2

    def _event(self, name: str) -> Any:
        builder = self.node.service_builder(self.iox2.ServiceName.new(name)).event()
        return builder.max_notifiers(_MAX_NODES).max_listeners(2).max_nodes(_MAX_NODES).open_or_create()

    def _open_server_events(self) -> None:
        self.bell = self._event("server").listener_builder().create()
        events = [self._event(f"client-{index}") for index in range(self.cell.clients)]
        self.notifiers = [event.notifier_builder().create() for event in events]
        self.pause = self.iox2.Duration.from_secs(1)

    def _wait_for_requests(self) -> None:
        self.bell.timed_wait(self.pause)

    def _answered(self, index: int) -> None:
        self.notifiers[index].notify()

    def _open_client_events(self, index: int) -> tuple[Callable[[], None], Callable[[], None]]:
        self.notifier = self._event("server").notifier_builder().create()
        self.listener = self._event(f"client-{index}").listener_builder().create()
        pause, timed_wait = self.iox2.Duration.from_secs(1), self.listener.timed_wait
        return self.notifier.notify, lambda: timed_wait(pause)
