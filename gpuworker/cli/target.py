"""The worker that a command is about: its name, and its segment."""

from __future__ import annotations

import argparse
import difflib

from gpuworker.errors import GpuWorkerError, WorkerNotFound
from gpuworker.segment import Segment, names, worker_names
from gpuworker.segment.liveness import own_pid_namespace


class CommandError(GpuWorkerError):
    """The command could not do what it was asked to; the message is the line for stderr."""


def worker_name(text: str) -> str:
    """The argument type of a worker's name."""
    try:
        names.shm_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def attach(name: str, read_only: bool = True) -> Segment:
    """The worker's segment, mapped read-only unless told otherwise. Raises WorkerNotFound, with the nearest name there is, or SegmentError."""
    try:
        return Segment.attach(name, read_only)
    except WorkerNotFound as error:
        near = difflib.get_close_matches(name, worker_names(), n=1)
        if not near:
            raise
        raise WorkerNotFound(f"{error}; did you mean {near[0]!r}?") from None


def is_local(segment: Segment) -> bool:
    """Whether the owner's pid means something in this process's pid namespace."""
    return segment.supervisor().pid_namespace == own_pid_namespace()
