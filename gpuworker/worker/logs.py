"""Logs of the processes we start: to stderr, at the level that GPUWORKER_LOG names, in the form that GPUWORKER_LOG_FORMAT names."""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections.abc import Callable

from gpuworker.worker.json_logs import JsonFormatter, JsonLines, log_uncaught

LEVEL, FORMAT = "GPUWORKER_LOG", "GPUWORKER_LOG_FORMAT"
FORMATS = ("text", "json")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_json = JsonFormatter()
PATIENCE_MS = 1000


class Stderr:
    """This process's stderr, written to without ever being held up: a reader who has been asleep for a second loses some of it, as owners must be looked
    after all the same."""

    def __init__(self) -> None:
        self._is_stuck = False
        self._poll = select.poll()
        self._poll.register(2, select.POLLOUT)

    def write(self, words: str | bytes) -> None:
        """Writes it, or drops it."""
        raw = words.encode(errors="backslashreplace") if isinstance(words, str) else words
        for at in range(0, len(raw), select.PIPE_BUF):
            self._is_stuck = not self._poll.poll(0 if self._is_stuck else PATIENCE_MS)
            if not self._is_stuck:
                with contextlib.suppress(OSError):
                    os.write(2, raw[at : at + select.PIPE_BUF])  # so much a writable pipe takes at once

    def flush(self) -> None:
        """Nothing is kept back."""


stderr = Stderr()


def set_up(default: str = "WARNING", worker: str = "") -> None:
    """GPUWORKER_LOG, or the default, is the level of our own logs, GPUWORKER_LOG_FORMAT ("text" or "json") their form; the processes that this one starts inherit
    both. DEBUG also lets other libraries say more. `worker`: whose process this is, as far as that is known yet (see `belongs_to`)."""
    asked = os.environ[LEVEL] = os.environ.get(LEVEL) or default
    level = asked.upper() if asked.upper() in LEVELS else default
    wanted = os.environ[FORMAT] = os.environ.get(FORMAT) or "text"
    logging.basicConfig(
        stream=stderr, format="%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s", level="INFO" if level == "DEBUG" else "WARNING"
    )
    log = logging.getLogger("gpuworker")
    log.setLevel(level)
    if is_json():
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is stderr:
                handler.setFormatter(_json)
        belongs_to(worker)
        log_uncaught(log)
    elif wanted not in FORMATS:
        log.warning("%s=%s: it is text or json; logs are text", FORMAT, wanted)
    if asked.upper() not in LEVELS:
        log.warning("%s=%s: it is one of %s; the level is %s", LEVEL, asked, ", ".join(LEVELS), level)


def is_json() -> bool:
    """Whether logs are wanted as JSON."""
    return os.environ.get(FORMAT) == "json"


def belongs_to(worker: str) -> None:
    """From now on log records name this worker."""
    _json.worker = worker


def passing_on(worker: str, pid: int) -> Callable[[bytes], object]:
    """What passes on to our stderr what that process writes to its own; called with b"" at the end."""
    if not is_json():
        return stderr.write
    lines = JsonLines(stderr.write, worker, pid)
    return lambda part: lines.feed(part) if part else lines.end()
