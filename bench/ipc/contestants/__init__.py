"""The ways to call another process that are compared. To add one: a subclass of `Contestant` in a module here, listed in `ALL`."""

from __future__ import annotations

from ipc.contestant import Contestant
from ipc.contestants.faster_fifo_queue import FasterFifo
from ipc.contestants.gunicorn_dirty import GunicornDirty
from ipc.contestants.iceoryx import IceoryxEvents, IceoryxPolled
from ipc.contestants.message_queue import MessageQueue
from ipc.contestants.ours import Adaptive, Busy, Park
from ipc.contestants.standard_library import Pipe, Queue
from ipc.contestants.unix_socket import UnixSocket
from ipc.contestants.zeromq import ZeroMq
from ipc.floor import SemaphoreFloor, SpinFloor

ALL: tuple[type[Contestant], ...] = (
    SemaphoreFloor,
    SpinFloor,
    Park,
    Adaptive,
    Busy,
    Pipe,
    Queue,
    UnixSocket,
    MessageQueue,
    ZeroMq,
    FasterFifo,
    IceoryxEvents,
    IceoryxPolled,
    GunicornDirty,
)
