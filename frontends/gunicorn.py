"""One owner beside gunicorn's workers. In gunicorn.conf.py:

    from gpuworker.frontends.gunicorn import sidecar

    on_starting, on_reload, on_exit = sidecar("myapp.model:run_batch", name="embed", max_batch_size=64)

and in the application, wherever it suits, at import time too: `client = gpuworker.connect("embed")`. All workers of all classes, with `--preload` or
without, call the same owner. A configuration with hooks of its own calls ours in them, as does one with several sidecars:

    embed = sidecar("myapp.model:run_batch", name="embed")

    def on_starting(server):
        embed.on_starting(server)
        ...

What happens when:
- gunicorn starts: the owner loads its handler before the port is opened; if it cannot, gunicorn logs the handler's traceback and exits with status 1.
  `--preload` imports the application even before that, so requests may be sent from requests, not from module level.
- HUP: workers are replaced, the owner stays. A changed handler or option is logged as needing a restart; a sidecar new in the file is started,
  one that is gone from it stays.
- the owner dies: another is started, after 0.5 s and then after longer and longer pauses (frontends/supervisor.py). Until then requests fail fast.
- gunicorn is told to stop: the workers finish their requests, then the owner drains and ends. It also ends when the master is killed.
- USR2: the new master's workers go on with the old master's owner; when the old master ends, its owner does, and the new master starts one with the
  new code. Requests fail while that loads. Where two owners fit the GPU, a `name` that differs from release to release upgrades without that gap.
- new code for the owner without a restart: `gpuworker stop embed`; the next one is a fresh interpreter. (`--reload` replaces only workers.)

The owner writes to gunicorn's stderr; `capture_output = True` sends that to the error log. It runs as gunicorn's `user` and `group`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from gpuworker.errors import GpuWorkerError

from .supervisor import Supervisor

_supervisors: dict[str, Supervisor] = {}  # of this master, by worker name. Here, because HUP executes gunicorn.conf.py again


class Hooks(NamedTuple):
    """Server hooks for gunicorn.conf.py, each called with the arbiter, in the master."""

    on_starting: Callable[[Any], None]
    on_reload: Callable[[Any], None]
    on_exit: Callable[[Any], None]


def sidecar(handler: str, *, name: str, **options: Any) -> Hooks:
    """Hooks that run an owner for as long as gunicorn's master lives. `handler`: "module:attr", imported by the owner only; `options`: as for
    gpuworker.Worker, e.g. max_batch_size, max_wait_ms, capacity."""
    if not isinstance(handler, str):
        raise TypeError(f"handler {handler!r}: name it as 'module:attr', so that only its owner imports it")
    wanted = Supervisor(handler, name, options)

    def on_starting(server: Any) -> None:
        try:
            _start(wanted, server, standby=server.master_pid != 0)  # its master_pid: the old master's, after USR2
        except (GpuWorkerError, OSError) as error:
            server.log.critical("%s", error)
            if server.pidfile is not None:
                server.pidfile.unlink()
            sys.exit(1)

    def on_reload(server: Any) -> None:
        running = _supervisors.get(name)
        if running is None or not running.is_running():
            try:
                _start(wanted, server, standby=True)  # the owner may be draining still after its supervisor was killed
            except (GpuWorkerError, OSError) as error:  # a reload should not end a service
                server.log.error("%s", error)
        elif running.job != wanted.job:
            server.log.warning("Worker %s goes on as it was started; what changed in its configuration needs a restart of gunicorn", name)

    def on_exit(server: Any) -> None:
        running = _supervisors.pop(name, None)
        if running is not None:
            running.stop()

    return Hooks(on_starting, on_reload, on_exit)


def _start(supervisor: Supervisor, server: Any, standby: bool) -> None:
    """In on_starting and not in when_ready: there the port would be open already, and Ctrl-C would wait until the handler is loaded."""
    ids = {"user": server.cfg.uid, "group": server.cfg.gid} if os.geteuid() == 0 else {}
    pid = supervisor.start(standby, **ids)
    _supervisors[supervisor.name] = supervisor
    server.log.info("Worker %s is owned by process %d", supervisor.name, pid)
