"""One owner beside gunicorn's workers. In gunicorn.conf.py:

    from gpuworker.frontends.gunicorn import sidecar

    on_starting, on_reload, on_exit = sidecar("myapp.model:run_batch", name="embed", max_batch_size=64)

and in the application, wherever it suits, at import time too: `client = gpuworker.connect("embed")`. All workers of all classes, with `--preload` or
without, call the same owner. A configuration with hooks of its own calls ours in them, as does one with several sidecars:

    embed = sidecar("myapp.model:run_batch", name="embed")

    def on_starting(server):
        embed.on_starting(server)
        ...

With the settings in a file (docs/configuration.md): `sidecar(gpuworker.load_config("gpuworker.toml", "embed"))`.

What happens when:
- gunicorn starts: the owner loads its handler before the port is opened; if it cannot, gunicorn logs the handler's traceback and exits with status 1.
  `--preload` imports the application even before that, so requests may be sent from requests, not from module level.
- HUP: workers are replaced, the owner stays. A changed handler or option is logged as needing a restart; a sidecar new in the file is started,
  one that is gone from it stays.
- the owner dies: another is started at once, and answers what was queued (gpuworker.Worker); owners that keep dying are given up, then requests fail
  fast with the reason until HUP.
- gunicorn is told to stop: the workers finish their requests, then the owner drains and ends. It also ends when the master is killed.
- USR2: the new master's workers go on with the old master's owner; when the old master ends, its owner does, and the new master starts one with the
  new code. Requests fail while that loads. Where two owners fit the GPU, a `name` that differs from release to release upgrades without that gap.
- new code for the owner without a restart: `gpuworker reload embed`; no request fails. (`--reload` replaces only workers.)

The owner writes to gunicorn's stderr; `capture_output = True` sends that to the error log. It runs as gunicorn's `user` and `group`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import gpuworker
from gpuworker.errors import GpuWorkerError


class _Running(NamedTuple):
    worker: gpuworker.Worker
    job: tuple[Any, dict[str, Any]]


_running: dict[str, _Running] = {}  # of this master, by worker name. Here, because HUP executes gunicorn.conf.py again


class Hooks(NamedTuple):
    """Server hooks for gunicorn.conf.py, each called with the arbiter, in the master."""

    on_starting: Callable[[Any], None]
    on_reload: Callable[[Any], None]
    on_exit: Callable[[Any], None]


def sidecar(handler: str | gpuworker.WorkerConfig, *, name: str | None = None, **options: Any) -> Hooks:
    """Hooks that run an owner for as long as gunicorn's master lives. `handler`: "module:attr", imported by the owner only; `options`: as for
    gpuworker.Worker, e.g. max_batch_size, max_wait_ms, capacity. Or all of it from a file: sidecar(gpuworker.load_config("gpuworker.toml", "embed"))."""
    if isinstance(handler, gpuworker.WorkerConfig):
        if name is not None or options:
            raise TypeError("a WorkerConfig has name and options already; give others to load_config")
        return _hooks(handler.handler, handler.name, handler.options)
    if not isinstance(handler, str):
        raise TypeError(f"handler {handler!r}: name it as 'module:attr', so that only its owner imports it")
    if name is None:
        raise TypeError("name: what clients connect to")
    return _hooks(handler, name, options)


def _hooks(handler: Any, name: str, options: dict[str, Any]) -> Hooks:
    gpuworker.WorkerOptions.of(options)  # a wrong one is an error here

    def start(server: Any, wait_for_name: bool) -> None:
        """In on_starting and not in when_ready: there the port would be open already, and Ctrl-C would wait until the handler is loaded."""
        ids = {"user": server.cfg.uid, "group": server.cfg.gid} if os.geteuid() == 0 else {}
        worker = gpuworker.Worker(handler, name=name, **options).start(wait_for_name=wait_for_name, **ids)
        _running[name] = _Running(worker, (handler, options))
        server.log.info("Worker %s is owned by process %s", name, worker.pid)

    def on_starting(server: Any) -> None:
        try:
            start(server, wait_for_name=server.master_pid != 0)  # its master_pid: the old master's, after USR2
        except (GpuWorkerError, OSError) as error:
            server.log.critical("%s", error)
            if server.pidfile is not None:
                server.pidfile.unlink()
            sys.exit(1)

    def on_reload(server: Any) -> None:
        running = _running.get(name)
        if running is None or running.worker.supervisor_pid is None:
            try:
                start(server, wait_for_name=True)
            except (GpuWorkerError, OSError) as error:  # a reload should not end a service
                server.log.error("%s", error)
        elif running.job != (handler, options):
            server.log.warning("Worker %s goes on as it was started; what changed in its configuration needs a restart of gunicorn", name)

    def on_exit(server: Any) -> None:
        running = _running.pop(name, None)
        if running is not None:
            running.worker.stop()

    return Hooks(on_starting, on_reload, on_exit)
