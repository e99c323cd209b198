"""stdout, for commands whose output is the result: that all of it gets there, and nothing else does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

from gpuworker.cli.target import CommandError


def show(text: str) -> None:
    """Prints it, as the command's result. Raises CommandError where that fails (a full disk), BrokenPipeError where nobody reads on."""
    if sys.stdout is None:
        raise CommandError("stdout is closed")
    try:
        _write(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"stdout cannot be written: {error.strerror}") from None


def remark(line: str) -> None:
    """Prints a line about what has been done, for whoever listens: where nobody does, it has been done all the same."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError):
            _write(line + "\n")


def _write(text: str) -> None:
    """What the encoding has no character for is escaped. Raises OSError."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError:
        give_up()
        raise


def give_up() -> None:
    """What stdout still holds goes nowhere, or the interpreter complains when it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def stdout_is_stderr() -> Iterator[None]:
    """What the handler prints meanwhile, in Python or in C, goes to stderr: stdout is for the report."""
    if sys.stdout is None:
        raise CommandError("stdout is closed")
    stdout, c_library = sys.stdout, ctypes.CDLL(None)
    stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        stdout.flush()
        c_library.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
