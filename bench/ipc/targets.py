"""What the project set out to reach, and whether this run reached it."""

from __future__ import annotations

import operator
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ipc.cells import FREE, IDLE_CLIENTS, LOAD_BYTES, ONE_CORE, PLACEMENTS, SMALL_BYTES, TWO_CORES, Cell, size_text
from ipc.statistics import Results

FLOOR, FLOOR_SPIN = "floor", "floor-spin"
PARK, ADAPTIVE, BUSY = "gpuworker-park", "gpuworker-adaptive", "gpuworker-busy"
FLOORS, OURS = (FLOOR, FLOOR_SPIN), (PARK, ADAPTIVE, BUSY)
LOADED = Cell(LOAD_BYTES, 16)
IDLE = Cell(LOAD_BYTES, IDLE_CLIENTS, idle=True)
_COMPARE: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}


@dataclass(frozen=True)
class Target:
    """`measured` is None where this run has no such figure."""

    title: str
    comparison: str
    limit: float | None
    measured: float | None

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
    def p50(name: str, placement: str) -> float | None:
        return results.median(name, Cell(SMALL_BYTES, 1, placement), "p50_us")

    for placement, limit in ((ONE_CORE, 2.0), (TWO_CORES, 1.25)):
        measured = results.ratio(PARK, FLOOR, Cell(SMALL_BYTES, 1, placement), "p50_us")
        yield Target(f"64 B, park, {placement}: p50 / C floor (sem_t) there", "<=", limit, measured)
    yield Target("64 B, adaptive, free: p50 µs, below the fastest other", "<", best(results, Cell(SMALL_BYTES), "p50_us"), p50(ADAPTIVE, FREE))
    yield Target("64 B, adaptive, free: p50 µs", "<=", 5.0, p50(ADAPTIVE, FREE))
    yield Target("64 B, busy, free: p50 µs", "<=", 3.0, p50(BUSY, FREE))


def _large(results: Results) -> Iterator[Target]:
    pairs = ((PARK, FLOOR, "sem_t"), (ADAPTIVE, FLOOR, "sem_t"), (BUSY, FLOOR_SPIN, "spin"))
    for payload_bytes in (256 * 1024, 1024 * 1024):
        size = size_text(payload_bytes)
        for ours, floor, kind in pairs:
            for placement in PLACEMENTS:
                measured = results.ratio(ours, floor, Cell(payload_bytes, 1, placement), "p50_us")
                yield Target(f"{size}, {ours.removeprefix('gpuworker-')}, {placement}: p50 / C floor ({kind}) there", "<=", 1.3, measured)
        cell = Cell(payload_bytes)
        fastest, measured = best(results, cell, "p50_us"), results.median(ADAPTIVE, cell, "p50_us")
        yield Target(f"{size}, adaptive, free: p50 µs, below the fastest other", "<", fastest, measured)


def _loaded(results: Results) -> Iterator[Target]:
    def over(other: str) -> float | None:
        return results.ratio(ADAPTIVE, other, LOADED, "requests_per_s")

    yield Target("16 clients, adaptive: requests/s over pyzmq", ">=", 5.0, over("pyzmq"))
    yield Target("16 clients, adaptive: requests/s over faster-fifo", ">=", 5.0, over("faster-fifo"))
    iceoryx2 = [ratio for kind in ("polled", "events") if (ratio := over(f"iceoryx2-{kind}")) is not None]
    yield Target("16 clients, adaptive: requests/s over iceoryx2 (its faster way)", ">=", 2.0, min(iceoryx2) if iceoryx2 else None)
    yield Target("16 clients, adaptive: slowest client / mean of the others", ">=", 0.5, results.median(ADAPTIVE, LOADED, "fairness"))
    yield Target("16 clients, adaptive: CPU-s per 100k requests", "<=", 1.2, results.median(ADAPTIVE, LOADED, "cpu_s_per_100k"))


def _idle(results: Results, import_ms: float | None) -> Iterator[Target]:
    for name in (PARK, ADAPTIVE):
        cores = results.median(name, IDLE, "server_cores")
        title = f"idle owner, {name.removeprefix('gpuworker-')}, {IDLE_CLIENTS} silent clients: % of a core"
        yield Target(title, "<", 0.5, None if cores is None else cores * 100)
    yield Target("import gpuworker and connect, without torch: ms over numpy", "<", 50.0, import_ms)


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
