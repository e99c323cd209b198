"""Nothing that an owner has started outlives it: a child with a CUDA context of its own would keep the GPU's memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Container, Iterator

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


@contextlib.contextmanager
def adopting_orphans() -> Iterator[list[int]]:
    """Within the block, what a descendant leaves behind at its death becomes this process's own child (Linux, prctl). Gives the children there are now:
    none of an owner's, but a shell may have had some before it became this process."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield _children()
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def kill_orphans(spare: Container[int]) -> None:
    """Kills all children but those in `spare`, and what they leave behind, until there is nothing left."""
    while orphans := send_sigkill(spare):
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def send_sigkill(spare: Container[int]) -> list[int]:
    """To all children but those in `spare`. -> which they were; they stay zombies until they are waited for."""
    orphans = [pid for pid in _children() if pid not in spare]
    for pid in orphans:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return orphans


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        import psutil

        return [child.pid for child in psutil.Process().children()]
