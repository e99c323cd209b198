"""What the project set out to reach, and whether this run reached it."""

from __future__ import annotations

import operator
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ipc.cells import IDLE_CLIENTS, LOAD_BYTES, ONE_CORE, PLACEMENTS, SMALL_BYTES, TWO_CORES, Cell
from ipc.statistics import Results

FLOOR, FLOOR_SPIN = "floor", "floor-spin"
PARK, ADAPTIVE, BUSY = "gpuworker-park", "gpuworker-adaptive", "gpuworker-busy"
FLOORS, OURS = (FLOOR, FLOOR_SPIN), (PARK, ADAPTIVE, BUSY)
LOADED = Cell(LOAD_BYTES, 16)
IDLE = Cell(LOAD_BYTES, IDLE_CLIENTS, idle=True)
_COMPARE: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}


@dataclass(frozen=True)
class Target:
    """`measured` is None where this run has no such figure. `foreign_cores`: what others used while it was taken."""

    title: str
    comparison: str
    limit: float | None
    measured: float | None
    foreign_cores: float | None = None

    @property
    def verdict(self) -> str:
        """met, missed or n/a."""
        if self.measured is None or self.limit is None:
            return "n/a"
        return "met" if _COMPARE[self.comparison](self.measured, self.limit) else "missed"


def best(results: Results, cell: Cell, metric: str, prefer: Callable[..., float] = min, only: tuple[str, ...] = ()) -> float | None:
    """The best figure of the other contestants (neither floors nor ours), or of those named in `only`."""
    names = only or {record["contestant"] for record in results.records} - {*FLOORS, *OURS}
    figures = [figure for name in names if (figure := results.median(name, cell, metric)) is not None]
    return prefer(figures) if figures else None


def evaluate(results: Results, import_ms: float | None = None) -> list[Target]:
    """Every target of the project that this benchmark measures. `import_ms`: from `measure_import_ms`."""
    return [*_small(results), *_large(results), *_loaded(results), *_idle(results, import_ms)]


def _small(results: Results) -> Iterator[Target]:
    for placement, limit in ((ONE_CORE, 2.0), (TWO_CORES, 1.25)):
        yield _over_floor(results, PARK, FLOOR, Cell(SMALL_BYTES, 1, placement), limit)
    free = Cell(SMALL_BYTES)
    yield _figure(results, ADAPTIVE, free, "p50_us", "p50 µs, below the fastest other", "<", best(results, free, "p50_us"))
    yield _figure(results, ADAPTIVE, free, "p50_us", "p50 µs", "<=", 5.0)
    yield _figure(results, BUSY, free, "p50_us", "p50 µs", "<=", 3.0)


def _large(results: Results) -> Iterator[Target]:
    for payload_bytes in (256 * 1024, 1024 * 1024):
        for ours, floor in ((PARK, FLOOR), (ADAPTIVE, FLOOR), (BUSY, FLOOR_SPIN)):
            for placement in PLACEMENTS:
                yield _over_floor(results, ours, floor, Cell(payload_bytes, 1, placement), 1.3)
        cell = Cell(payload_bytes)
        yield _figure(results, ADAPTIVE, cell, "p50_us", "p50 µs, below the fastest other", "<", best(results, cell, "p50_us"))


def _loaded(results: Results) -> Iterator[Target]:
    def over(others: tuple[str, ...], limit: float) -> Target:
        ratios = [ratio for other in others if (ratio := results.ratio(ADAPTIVE, other, LOADED, "requests_per_s")) is not None]
        title = f"{LOADED.title}, adaptive: requests/s over {' and '.join(others)}"
        return Target(title, ">=", limit, min(ratios, default=None), results.median(ADAPTIVE, LOADED, "foreign_cores"))

    yield over(("pyzmq",), 5.0)
    yield over(("faster-fifo",), 5.0)
    yield over(("iceoryx2-polled", "iceoryx2-events"), 2.0)
    yield _figure(results, ADAPTIVE, LOADED, "fairness", "slowest client / mean of the others", ">=", 0.5)
    yield _figure(results, ADAPTIVE, LOADED, "cpu_s_per_100k", "CPU-s per 100k requests", "<=", 1.2)


def _idle(results: Results, import_ms: float | None) -> Iterator[Target]:
    for name in (PARK, ADAPTIVE):
        yield _figure(results, name, IDLE, "server_cores", "what the owner uses of a core", "<", 0.005)
    yield Target("import gpuworker and connect, without torch: ms over numpy", "<", 50.0, import_ms)


def _over_floor(results: Results, ours: str, floor: str, cell: Cell, limit: float) -> Target:
    kind = "sem_t" if floor == FLOOR else "spin"
    title = f"{cell.title}, {_policy(ours)}: p50 / C floor ({kind}) there"
    return Target(title, "<=", limit, results.ratio(ours, floor, cell, "p50_us"), results.median(ours, cell, "foreign_cores"))


def _figure(results: Results, ours: str, cell: Cell, metric: str, what: str, comparison: str, limit: float | None) -> Target:
    title = f"{cell.title}, {_policy(ours)}: {what}"
    return Target(title, comparison, limit, results.median(ours, cell, metric), results.median(ours, cell, "foreign_cores"))


def _policy(ours: str) -> str:
    return ours.removeprefix("gpuworker-")


def measure_import_ms(tries: int = 5) -> float | None:
    """Median milliseconds of `import gpuworker` and `connect` in a fresh interpreter that has numpy; None when that fails or loads torch."""
    program = """
import sys, time, numpy
begin = time.perf_counter()
import gpuworker
gpuworker.connect("a-name-nobody-serves")
print((time.perf_counter() - begin) * 1e3 if "torch" not in sys.modules else "torch was imported")
"""
    try:
        runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True) for _ in range(tries)]
        return statistics.median(float(run.stdout) for run in runs)
    except (subprocess.SubprocessError, ValueError):
        return None
