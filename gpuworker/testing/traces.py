"""Recorded traffic: files of arrival times and request lengths."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuworker.scheduling import Queued

UNITS_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
TIME_COLUMNS = ("timestamp", "arrival", "arrived", "time")
LENGTH_COLUMNS = ("contexttokens", "inputlength", "prefilltokens", "prompttokens", "requesttokens", "inputtokens", "length", "tokens")
DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|[+-]\d\d:?\d\d)?")


class Trace(NamedTuple):
    """Arrivals in ns, ascending from 0, and the requests' lengths (0 where the file has none)."""

    arrivals_ns: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def requests(self, count: int | None = None) -> list[Queued]:
        """The first `count`, or all of them."""
        pairs = zip(self.arrivals_ns[:count].tolist(), self.lengths[:count].tolist(), strict=True)
        return [Queued(i, at, length=length) for i, (at, length) in enumerate(pairs)]


def scaled(trace: Trace, rate_per_s: float) -> Trace:
    """The same trace at another mean rate: gaps keep their proportions and their order, so bursts last less long the faster it goes."""
    times_ns = trace.arrivals_ns - trace.arrivals_ns[0]
    faster = (len(times_ns) / rate_per_s * 1e9) / int(times_ns[-1])
    return Trace(np.rint(times_ns * faster).astype(np.int64), trace.lengths)


def read_trace(path: str | Path) -> Trace:
    """Reads a CSV file with a header, or one JSON object a line (as of the Mooncake traces).

    The time is in the first column whose name holds "timestamp", "arrival", "arrived" or "time": dates with up to nine digits of a second (the Azure LLM
    inference traces have seven), or numbers in the unit that the name ends in, e.g. "time_ms" or "Timestamp [s]"; else seconds in CSV, ms in JSON. The
    length is in ContextTokens, input_length, num_prefill_tokens or the like; without one lengths are 0. Arrivals of the same recorded time are spread over
    the smallest step between times, at random but always the same.

    Raises ValueError for a file that is none of these, naming the line.
    """
    path = Path(path)
    with path.open(newline="") as file:
        first = file.readline()
        file.seek(0)
        rows: Iterable[Mapping[str, Any]]
        if first.lstrip().startswith("{"):
            rows, columns, unit = (json.loads(line) for line in file if line.strip()), list(json.loads(first)), "ms"
        else:
            reader = csv.DictReader(file)
            rows, columns, unit = reader, list(reader.fieldnames or ()), "s"
        time, length = _column(columns, TIME_COLUMNS), _column(columns, LENGTH_COLUMNS)
        if time is None:
            raise ValueError(f"{path}: no column with a time among {columns}")
        unit_ns = UNITS_NS[_unit(time) or unit]
        times_ns, lengths = [], []
        for number, row in enumerate(rows, start=1):
            try:
                times_ns.append(_time_ns(str(row[time]), unit_ns))
                lengths.append(int(row[length]) if length else 0)
            except (TypeError, ValueError, InvalidOperation):
                raise ValueError(f"{path}: record {number} has no time and length that can be read: {dict(row)}") from None
    if len(times_ns) < 2:
        raise ValueError(f"{path}: fewer than two requests")
    return _spread(np.array(times_ns, dtype=np.int64), np.array(lengths, dtype=np.int64))


def _column(columns: Sequence[str], known: Sequence[str]) -> str | None:
    """The column whose name holds the earliest of the known words."""
    plain = {column: re.sub(r"[^a-z]", "", column.lower()) for column in columns}
    return next((column for word in known for column in columns if word in plain[column]), None)


def _unit(column: str) -> str | None:
    unit = re.search(r"[ _\[(](ns|us|ms|s)[\])]?$", column.strip().lower())
    return unit[1] if unit else None


def _time_ns(text: str, unit_ns: int) -> int:
    date = DATE.fullmatch(text.strip())
    if date is None:
        return int(Decimal(text.strip()) * unit_ns)
    whole = datetime.fromisoformat(f"{date[1]} {date[2]}") - datetime(1970, 1, 1)
    return whole // timedelta(seconds=1) * UNITS_NS["s"] + int((date[3] or "").ljust(9, "0"))


def _spread(times_ns: NDArray[np.int64], lengths: NDArray[np.int64]) -> Trace:
    steps = np.diff(np.unique(times_ns))
    if not len(steps):
        raise ValueError("all requests of the trace have the same time")
    _, where, how_many = np.unique(times_ns, return_inverse=True, return_counts=True)
    offsets = np.random.default_rng(0).integers(0, int(steps.min()), len(times_ns))
    times_ns = times_ns + np.where(how_many[where] > 1, offsets, 0)
    order = np.argsort(times_ns, kind="stable")
    return Trace(times_ns[order] - times_ns[order[0]], lengths[order])
