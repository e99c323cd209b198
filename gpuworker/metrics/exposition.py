"""Whose statistics are exposed, and what becomes of workers that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuworker.errors import GpuWorkerError, WorkerNotFound
from gpuworker.metrics.families import FAMILIES, UP, is_up
from gpuworker.metrics.text import Writer, heading
from gpuworker.segment.reader import StatsReader
from gpuworker.segment.stats import Stats

_reader, _writer = StatsReader(), Writer(FAMILIES)


def render_metrics(names: Sequence[str] | None = None, group: str | None = None) -> bytes:
    """The metrics of these workers (default: of all of this user's) in Prometheus' text format, UTF-8. They are read from the segments: owners are not
    asked, and need not live. A worker that is named and cannot be read is `gpuworker_up 0`; a comment says why. group: as for gpuworker.connect, for workers of
    other users.

    Raises ValueError for what is no name of a worker, SegmentError where there is no /dev/shm to look into.
    """
    found: list[Stats] = []
    up, comments = [heading(UP)], []
    for name, stats in _look(names, group):
        up.append(f'{UP.name}{{worker="{name}"}} {is_up(stats) if isinstance(stats, Stats) else 0}\n')
        if isinstance(stats, Stats):
            found.append(stats)
        else:
            comments.append(f"# worker {name}: {' '.join(stats.split())}\n")
    return "".join([*up, _writer.write(found), *comments]).encode()


def which_are_up(names: Sequence[str] | None = None) -> dict[str, bool]:
    """`gpuworker_up` of each worker, without the rest."""
    return {name: isinstance(stats, Stats) and bool(is_up(stats)) for name, stats in _look(names)}


def _look(names: Sequence[str] | None, group: str | None = None) -> Iterable[tuple[str, Stats | str]]:
    """Each worker's statistics, or why there are none."""
    for name in _reader.names() if names is None else dict.fromkeys(names):
        try:
            yield name, _reader.read(name, group)
        except (GpuWorkerError, OSError) as error:
            if names is not None or not isinstance(error, WorkerNotFound):  # else it has just gone
                yield name, str(error)
