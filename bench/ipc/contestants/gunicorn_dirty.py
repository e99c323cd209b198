"""gunicorn's dirty workers (since 25): a pool beside the web workers, reached over a Unix socket through an arbiter process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ipc.contestant import Call, Contestant, wait_until
from ipc.machine import die_with_parent

_APP = "ipc.contestants.gunicorn_dirty:Echo"
_BENCH = Path(__file__).parents[2]


def web_app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
    """The web side that gunicorn needs; nobody calls it."""
    start_response("204 No Content", [])
    return iter(())


class Echo:
    """The dirty app: what it needs of gunicorn.dirty.DirtyApp, without importing it here."""

    workers = None

    def init(self) -> None:
        pass

    def __call__(self, action: str, payload: bytes) -> bytes:
        return payload

    def close(self) -> None:
        pass


class GunicornDirty(Contestant):
    name = "gunicorn-dirty"
    title = "gunicorn dirty worker"
    note = "a real gunicorn with one dirty worker of one thread; clients use the DirtyClient that its web workers use; no batching"
    requires = ("gunicorn.dirty",)

    @classmethod
    def prepare(cls) -> None:
        try:
            super().prepare()
        except ModuleNotFoundError:
            raise ImportError("gunicorn is not installed") from None

    def start(self) -> None:
        options = ["--workers=1", f"--bind=unix:{self.directory}/http", "--no-control-socket", "--log-level=warning"]
        dirty = ["--dirty-workers=1", f"--dirty-app={_APP}", "--dirty-threads=1"]
        environment = os.environ | {"TMPDIR": str(self.directory), "PYTHONPATH": str(_BENCH)}
        command = [sys.executable, "-m", "gunicorn", *options, *dirty, "ipc.contestants.gunicorn_dirty:web_app"]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent)
        self.address = str(wait_until(self._arbiter_socket, "gunicorn's dirty arbiter"))
        wait_until(self._answers, "gunicorn's dirty worker")

    def _arbiter_socket(self) -> Path | None:
        if self.process.poll() is not None:
            raise RuntimeError(f"gunicorn ended with status {self.process.returncode}")
        return next(self.directory.glob("gunicorn-dirty-*/arbiter.sock"), None)

    def _answers(self) -> bool:
        from gunicorn.dirty.errors import DirtyError

        try:
            return self._call_with_new_client()(self.cell.payload()) is not None
        except DirtyError:
            return False

    def _call_with_new_client(self) -> Call:
        from gunicorn.dirty.client import DirtyClient

        execute, decode = DirtyClient(self.address, timeout=60).execute, self.cell.decode
        if self.cell.is_array:
            return lambda payload: decode(execute(_APP, "echo", payload.tobytes()))
        return lambda payload: execute(_APP, "echo", payload)

    def connect(self, index: int) -> Call:
        return self._call_with_new_client()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=5)
