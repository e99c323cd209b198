"""Becoming the owner: from a handler and a name to a served ring, and back."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from gpuworker._native import ffi, lib
from gpuworker.segment import Segment
from gpuworker.segment.wire import ON_FULL, WAKE
from gpuworker.worker.handler import Handler
from gpuworker.worker.keeper import Keeper
from gpuworker.worker.options import WorkerOptions
from gpuworker.worker.owner import Owner
from gpuworker.worker.reaper import retire

log = logging.getLogger("gpuworker")


def serve(handler: Any, *, name: str, **options: Any) -> None:
    """This process becomes the owner of worker `name` and serves until SIGTERM or SIGINT, then drains. Call it from the main thread.

    handler: a function `run_batch(requests: list) -> list`, a class with that method (and optionally `load()`, `warmup()`, `close()`), an instance, or
    "module:attr". Options: see gpuworker.worker.WorkerOptions. Raises WorkerAlreadyRunning, SegmentError, and whatever `load` raises.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("serve() handles signals and so belongs in the main thread; in another one use gpuworker.Worker(handler, in_process=True)")
    checked = WorkerOptions.of(options)
    session = Session(handler, name, checked)
    handled = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in handled}
    for number in handled:
        signal.signal(number, session.on_signal)
    try:
        session.run()
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Session:
    """One life of an owner: owns the segment, loads the handler, serves, drains, cleans up.

    await_turn: for an owner with a supervisor, which holds the segment. It loads first, calls this, and owns the segment when that returns.
    """

    def __init__(self, handler: Any, name: str, options: WorkerOptions, may_exit: bool = True, await_turn: Callable[[], None] | None = None) -> None:
        self.handler = Handler(handler)
        self.options = options = self.handler.suited(options)
        self._await_turn = await_turn
        # Before loading: a name that is taken should not cost a model's load time.
        self.segment = Segment.attach(name) if await_turn else Segment.own(name, options.geometry)
        self.owner = Owner(self.segment, self.handler, options)
        self._keeper = Keeper(self.owner, may_exit, is_supervised=await_turn is not None)
        self._name = name
        self._serving = False

    def run(self, on_ready: Callable[[], None] | None = None, on_released: Callable[[], None] | None = None) -> None:
        """Loads, calls `on_ready`, serves until stopped, and calls `on_released` when the segment is not ours any more. Raises what loading raises. Without
        a supervisor the segment is gone afterwards in any case."""
        port, options = self.segment.port, self.options
        try:
            if self._await_turn is not None:
                self.handler.load(options)
                self.owner.prepare()
                self._info()  # an owner that cannot say who it is must not take another's place
                self._await_turn()
                self.segment.become_owner()
            lib.gw_recover(port, options.attempts, lib.GW_KIND_DIED)
            lib.gw_set_policy(port, ON_FULL[options.on_full], WAKE[options.wake], *options.quotas, int(options.allow_pickle), options.max_batch_size)
            self.owner.line.announce()
            self._publish_info()
            lib.gw_publish_execution(port, ffi.new("uint64_t[]", lib.GW_EXECUTION), lib.GW_EXECUTION)  # counters of the last owner go
            self._keeper.start()
            if self._await_turn is None:
                self.handler.load(options)
                self.owner.prepare()
                self._publish_info()
            self.owner.run(lambda: self._ready(on_ready))
        finally:
            try:
                self._keeper.finish()
                self.owner.close()
            finally:
                self._let_go()
                if on_released is not None:
                    on_released()
                self.handler.close()
                log.info("worker %s has stopped", self._name)

    def _publish_info(self) -> None:
        blob = self._info()
        lib.gw_set_info(self.segment.port, blob, len(blob))

    def _info(self) -> bytes:
        """For people and tools; and for clients, what a request has to look like, which is known once the handler has loaded. Raises ValueError if it is too
        large."""
        contract = self.handler.contract
        info = {"name": self._name, "handler": self.handler.name, "options": vars(self.options)}
        if contract is not None:
            info["contract"] = {**contract, "uses_lengths": self.options.uses_lengths and contract.get("uses_lengths", True)}
        blob = json.dumps(info).encode()
        if len(blob) > lib.GW_INFO_BYTES:
            raise ValueError(
                f"what clients have to know about {self.handler.name} takes {len(blob):,} bytes, more than {lib.GW_INFO_BYTES:,}: shorten names"
            )
        return blob

    def _let_go(self) -> None:
        if self._await_turn is None or self.segment.is_orphan():
            retire(self.segment)
        self.segment.close()

    def _ready(self, on_ready: Callable[[], None] | None) -> None:
        self._serving = True
        supervisor = f", supervised by process {os.getppid()}" if self._await_turn is not None else ""
        log.info("worker %s is ready in process %d%s: %s", self._name, os.getpid(), supervisor, self.handler.name)
        if on_ready is not None:
            on_ready()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """First signal: drain. Second, or one while the handler still loads: stop now."""
        if not self._serving:
            raise SystemExit(f"stopped by {signal.Signals(number).name} before it was ready")
        self.owner.stop(drain=self.owner.stop_ns is None)
