"""stdout, for commands whose output is the result: that all of it gets there, and nothing else does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

from gpuworker.cli.target import CommandError


def show(text: str) -> None:
    """Prints it. Raises CommandError where that fails (a full disk)."""
    if sys.stdout is None:
        raise CommandError("stdout is closed")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes at exit
        raise CommandError(f"stdout cannot be written: {error.strerror}") from None


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
