"""gpuworker, with each of its wake policies."""

from __future__ import annotations

import os
from pathlib import Path

from ipc.contestant import MAX_BATCH_SIZE, Call, Contestant, identity

_BENCH = Path(__file__).parents[2]
_HEADER_ROOM_BYTES = 4096


class _Gpuworker(Contestant):
    requires = ("gpuworker",)
    ours = True
    wake = ""

    def start(self) -> None:
        import gpuworker

        # The owner is a fresh interpreter and imports `identity` by name.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_BENCH), os.environ.get("PYTHONPATH"))))
        slot_bytes = max(65536, self.cell.payload_bytes + _HEADER_ROOM_BYTES)
        self.worker = gpuworker.Worker(
            identity,
            name=self.token,
            max_batch_size=MAX_BATCH_SIZE,
            max_wait_ms=0,
            capacity=256 if slot_bytes == 65536 else 8,
            max_request_bytes=slot_bytes,
            max_response_bytes=slot_bytes,
            wake=self.wake,
        )
        self.worker.__enter__()

    def connect(self, index: int) -> Call:
        import gpuworker

        self.client = gpuworker.connect(self.token, wake=self.wake)
        return self.client.submit

    def stop(self) -> None:
        self.worker.__exit__(None, None, None)


class Park(_Gpuworker):
    name = "gpuworker-park"
    title = 'gpuworker, wake="park"'
    note = "never spins; slots as large as the payload"
    wake = "park"


class Adaptive(_Gpuworker):
    name = "gpuworker-adaptive"
    title = 'gpuworker, wake="adaptive"'
    note = "the default: spins while that has lately paid and a core is free"
    wake = "adaptive"


class Busy(_Gpuworker):
    name = "gpuworker-busy"
    title = 'gpuworker, wake="busy"'
    note = "always spins"
    wake = "busy"
