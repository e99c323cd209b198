"""The application under uvicorn, as `gpuworker http` starts it. Its processes get what it is to serve in the environment."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from typing import Any

import uvicorn

from ..asgi import make_app
from .exchange import App
from .protocol import Protocol

OPTIONS = "GPUWORKER_HTTP_OPTIONS"
GRACE_S = 30
"""What requests that are running when the server is told to stop have left."""


def run(options: dict[str, Any], *, host: str, port: int, workers: int, access_log: bool) -> int:
    """Serves until it is told to stop. options: of make_app. -> the exit code. Raises OSError or ValueError for options that cannot be."""
    make_app(**options)
    os.environ[OPTIONS] = json.dumps(options)
    uvicorn.run(
        "gpuworker.frontends.http.serve:app", factory=True, host=host, port=port, workers=workers, access_log=access_log, log_level="info", lifespan="on",
        server_header=False, proxy_headers=False, http=Protocol, timeout_graceful_shutdown=GRACE_S,
    )  # fmt: skip
    return 0


def app() -> App:
    """Of one process."""
    _end_with_parent()
    return make_app(**json.loads(os.environ[OPTIONS]))


def _end_with_parent() -> None:
    """uvicorn's processes would outlive one that was killed, and keep its port from the next."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="gpuworker-parent", daemon=True).start()
