"""Logs for machines: one JSON object a line, whoever wrote it."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from gpuworker.segment.wire import request_id

LONGEST_LINE_BYTES = 1 << 20
"""Of what is passed on as one line; more is cut into pieces."""
_STANDARD = frozenset(vars(logging.makeLogRecord({})))
_ALWAYS = frozenset({"time", "level", "logger", "message", "worker", "pid", "exception", "requests", "stack"})
_OURS = b'{"time": "'


class Running:
    """The requests of the batch that the handler has now. Set by the owner's thread, and looked at when that logs something."""

    def __init__(self) -> None:
        self.tickets: Sequence[int] = ()
        self.thread = 0

    def begin(self, tickets: Sequence[int]) -> None:
        """A batch is given to the handler."""
        self.tickets, self.thread = tickets, threading.get_ident()

    def end(self) -> None:
        """It has come back."""
        self.tickets = ()


running = Running()


class JsonFormatter(logging.Formatter):
    """time (RFC 3339, UTC), level, logger, message, worker, pid; `requests`, the ids (slot.generation) of those concerned; `exception`; and what the record has
    been given as `extra`. Values that JSON does not know become text."""

    worker = ""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        fields: dict[str, Any] = {
            "time": _rfc3339(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
            "worker": self.worker,
            "pid": record.process,
        }
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD and name not in ("message", "asctime", "taskName")}
        tickets = extra.pop("tickets", running.tickets if record.thread == running.thread else ())
        if not all(isinstance(ticket, int) for ticket in tickets):  # an extra of somebody else's with this name
            extra["tickets"], tickets = tickets, ()
        if tickets:
            fields["requests"] = [request_id(ticket) for ticket in tickets]
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, _ = record.exc_info
            fields["exception"] = {"type": kind.__qualname__, "message": _text(error), "traceback": _words(self.formatException, record.exc_info)}
        if record.stack_info:
            fields["stack"] = record.stack_info
        fields |= {f"{name}_" if name in _ALWAYS else name: value for name, value in extra.items()}
        return _dumps(fields)


class JsonLines:
    """Passes on what a process has written: its JSON lines as they are, and each other line (of a library, of the interpreter) as an object with it as message."""

    def __init__(self, write: Callable[[bytes], object], worker: str, pid: int) -> None:
        self._write, self._worker, self._pid = write, worker, pid
        self._rest = b""

    def feed(self, part: bytes) -> None:
        """Whole lines go out; the rest waits for its end."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        out = b"".join(self._line(line) for line in lines if line.strip())
        if out:
            self._write(out)

    def end(self) -> None:
        """No more comes."""
        self.feed(b"\n")

    def _line(self, line: bytes) -> bytes:
        if line.startswith(_OURS) and _is_object(line):
            return line + b"\n"
        words = line.decode(errors="backslashreplace").strip()
        fields = {"time": _rfc3339(time.time()), "level": "INFO", "logger": "stderr", "message": words, "worker": self._worker, "pid": self._pid}
        return _dumps(fields).encode() + b"\n"


def _rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    """What the record says; where its arguments do not fit, or fail when they are shown, what it was made of."""
    try:
        return record.getMessage()
    except Exception as error:
        return f"{_text(record.msg)} (its arguments cannot be filled in: {type(error).__name__}: {_text(error)})"


def _words(make: Callable[[Any], str], of: Any) -> str:
    """make(of), or why that fails."""
    try:
        return make(of)
    except Exception as error:
        return f"(cannot be shown: {type(error).__name__})"


def _text(value: Any) -> str:
    return _words(str, value)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _dumps(fields: dict[str, Any]) -> str:
    """As JSON, whatever the values are: one that JSON has no form for (nan, keys that are no strings, a cycle, an object that fails when it is shown) is text."""
    try:
        return json.dumps(fields, default=_text, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps({name: _plain(value) for name, value in fields.items()})


def _plain(value: Any) -> Any:
    try:
        json.dumps(value, default=_text, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return _words(repr, value)
    return value


def log_uncaught(log: logging.Logger) -> None:
    """What ends a thread or this process, and Python's warnings, are log records, too."""

    def of_process(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        log.critical("process %d ends in %s", os.getpid(), kind.__name__, exc_info=(kind, error, traceback))

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
            name = args.thread.name if args.thread is not None else "a thread"
            log.critical("%s ends in %s", name, args.exc_type.__name__, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))

    sys.excepthook, threading.excepthook = of_process, of_thread
    logging.captureWarnings(True)
