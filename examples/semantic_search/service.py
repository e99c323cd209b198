"""The web service of the demo: gunicorn in a process of its own, reached over HTTP."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import psutil

from .fleet import Embed, FleetError, end_with_parent
from .usage import end_all

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


class Service:
    """gunicorn with `processes` sync workers; its configuration starts the owner called `name`."""

    def __init__(self, name: str, processes: int) -> None:
        package = __package__ or ""
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:  # any free port; gunicorn inherits the socket
            self.port: int = listener.getsockname()[1]
            self.gunicorn = subprocess.Popen(
                [sys.executable, "-m", "gunicorn", "-c", f"python:{package}.gunicorn_conf", "-b", f"fd://{listener.fileno()}", f"{package}.app:app"],
                env={**os.environ, "SEMANTIC_SEARCH_WORKER": name, "SEMANTIC_SEARCH_PROCESSES": str(processes)},
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the demo, which then ends gunicorn
                preexec_fn=functools.partial(end_with_parent, os.getpid(), signal.SIGTERM),
            )

    def wait_until_ready(self) -> None:
        """Raises FleetError when gunicorn ends, or answers nothing within START_TIMEOUT_S."""
        give_up = time.monotonic() + START_TIMEOUT_S
        while self.gunicorn.poll() is None and time.monotonic() < give_up:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("GET", "/healthz")[0] == http.HTTPStatus.OK:
                    return
            time.sleep(0.1)
        raise FleetError("gunicorn did not get ready; its own output says more")

    def request(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()

    def open(self) -> Embed:
        return lambda texts: map(self.embed, texts)

    def embed(self, text: str) -> np.ndarray:
        status, body = self.request("POST", "/", json.dumps(text))
        if status != http.HTTPStatus.OK:
            raise FleetError(f"HTTP {status}: {body[:500]!r}")
        return np.array(json.loads(body), np.float32)

    def pids(self) -> tuple[int, ...]:
        """gunicorn's master, its workers, the owner and its supervisor; nothing once the master has ended."""
        try:
            master = psutil.Process(self.gunicorn.pid)
            return (master.pid, *(child.pid for child in master.children(recursive=True)))
        except psutil.NoSuchProcess:
            return ()

    def stop(self) -> None:
        """Returns when all of them have ended."""
        pids = self.pids()
        self.gunicorn.terminate()
        end_all(pids, STOP_TIMEOUT_S)
        self.gunicorn.wait()


@contextlib.contextmanager
def running(name: str, processes: int) -> Iterator[Service]:
    service = Service(name, processes)
    try:
        service.wait_until_ready()
        yield service
    finally:
        service.stop()
