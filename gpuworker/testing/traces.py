"""Recorded traffic: files of arrival times and request lengths."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuworker.scheduling import Queued
from gpuworker.scheduling.sizes import MAX_LENGTH

UNITS_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
TIME_COLUMNS = ("timestamp", "arrival", "arrived", "time")
LENGTH_COLUMNS = ("contexttokens", "inputlength", "prefilltokens", "prompttokens", "requesttokens", "inputtokens", "length", "tokens")
LATEST_NS = 1 << 62
LONGEST_S = 10 * 365 * 86_400.0
"""No simulation goes over more than ten years: at a fifth of the load, and with the batches that are then still to run, its times fit 64 bits of ns."""
FASTEST_PER_S = 1e9
MOST_LINE_BYTES = 16 << 20
SHOWN = 60
DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|[+-]\d\d:?\d\d)?")


class Trace(NamedTuple):
    """Arrivals in ns, ascending from 0, and the requests' lengths (0 where the file has none)."""

    arrivals_ns: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def rate_per_s(self) -> float:
        """The mean of all."""
        return len(self.arrivals_ns) / (int(self.arrivals_ns[-1]) / 1e9)

    def first(self, count: int | None) -> Trace:
        """The first `count` requests, or all. Raises ValueError if they have no rate: that takes two times."""
        if count is not None and not self.arrivals_ns[:count].any():
            raise ValueError(f"all of its first {count:,} requests have the same time, so they have no rate: take more of them")
        return Trace(self.arrivals_ns[:count], self.lengths[:count])

    def requests(self, count: int | None = None) -> list[Queued]:
        """The first `count`, or all of them."""
        pairs = zip(self.arrivals_ns[:count].tolist(), self.lengths[:count].tolist(), strict=True)
        return [Queued(i, at, length=length) for i, (at, length) in enumerate(pairs)]


def scaled(trace: Trace, rate_per_s: float) -> Trace:
    """The same trace at another mean rate: gaps keep their proportions and their order, so bursts last less long the faster it goes. Raises ValueError for a
    rate that no simulation can have."""
    check_rate(len(trace.arrivals_ns), rate_per_s)
    times_ns = trace.arrivals_ns - trace.arrivals_ns[0]
    faster = (len(times_ns) / rate_per_s * 1e9) / int(times_ns[-1])
    return Trace(np.rint(times_ns * faster).astype(np.int64), trace.lengths)


def check_rate(count: int, rate_per_s: float, longest_s: float = LONGEST_S, fastest_per_s: float = FASTEST_PER_S) -> None:
    """Raises ValueError for requests that come at a higher rate than fastest_per_s, or over a longer time than longest_s."""
    if not count / longest_s <= rate_per_s <= fastest_per_s:
        raise ValueError(
            f"{count:,} requests at {rate_per_s:.3g} a second: from {count / longest_s:.3g} to {fastest_per_s:.3g} a second can be simulated"
        )


def read_trace(path: str | Path) -> Trace:
    """Reads a CSV file with a header, or one JSON object a line (as of the Mooncake traces).

    The time is in the first column whose name holds "timestamp", "arrival", "arrived" or "time": dates with up to nine digits of a second (the Azure LLM
    inference traces have seven), or numbers in the unit that the name ends in, e.g. "time_ms" or "Timestamp [s]"; else seconds in CSV, ms in JSON. The
    length is in ContextTokens, input_length, num_prefill_tokens or the like; without one lengths are 0. Arrivals of the same recorded time are spread over
    the smallest step between times, at random but always the same.

    Raises ValueError for a file that is none of these, naming the line.
    """
    with Path(path).open("rb") as file:
        lines = _Lines(file)
        try:
            times_ns, lengths = _read(lines)
        except (ValueError, csv.Error, RecursionError) as error:
            where = f", line {lines.number}" if lines.number else ""
            raise ValueError(f"{path}{where}: {error}") from None
    try:
        return _spread(np.array(times_ns, dtype=np.int64), np.array(lengths, dtype=np.int64))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class _Lines:
    """A file's lines as text, counted."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.number = file, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(MOST_LINE_BYTES + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > MOST_LINE_BYTES:
            raise ValueError(f"it is longer than {MOST_LINE_BYTES >> 20} MiB: this is no trace")
        try:
            return line.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise ValueError("it is not UTF-8 text") from None


def _read(lines: _Lines) -> tuple[list[int], list[int]]:
    """Times in ns, and lengths."""
    first = next((line for line in lines if line.strip()), None)
    if first is None:
        raise ValueError("the file is empty")
    texts = chain([first], lines)
    rows: Iterable[Mapping[str, Any]]
    if first.lstrip().startswith("{"):
        rows, columns, unit = (_record(text) for text in texts if text.strip()), list(_record(first)), "ms"
    else:
        reader = csv.DictReader(texts)
        rows, columns, unit = reader, list(reader.fieldnames or ()), "s"
    time, length = _column(columns, TIME_COLUMNS), _column(columns, LENGTH_COLUMNS)
    if time is None:
        raise ValueError(f"no column with a time among {_shown(', '.join(columns))}")
    unit_ns = UNITS_NS[_unit(time) or unit]
    times_ns, lengths = [], []
    for row in rows:
        times_ns.append(_time_ns(_cell(row, time), unit_ns))
        lengths.append(_length(_cell(row, length)) if length else 0)
    if len(times_ns) < 2:
        raise ValueError("the file ends with fewer than two requests")
    return times_ns, lengths


def _record(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object: {_shown(text.strip())}")
    return record


def _cell(row: Mapping[str, Any], column: str) -> str:
    if row.get(column) is None:
        raise ValueError(f"it has no {column!r}")
    return str(row[column]).strip()


def _column(columns: Sequence[str], known: Sequence[str]) -> str | None:
    """The column whose name holds the earliest of the known words."""
    plain = {column: re.sub(r"[^a-z]", "", column.lower()) for column in columns}
    return next((column for word in known for column in columns if word in plain[column]), None)


def _unit(column: str) -> str | None:
    unit = re.search(r"[ _\[(](ns|us|ms|s)[\])]?$", column.strip().lower())
    return unit[1] if unit else None


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _time_ns(text: str, unit_ns: int) -> int:
    try:
        date = DATE.fullmatch(text)
        if date is None:
            time_ns = Decimal(text) * unit_ns
        else:
            whole = datetime.fromisoformat(f"{date[1]} {date[2]}") - datetime(1970, 1, 1)
            time_ns = Decimal(whole // timedelta(seconds=1) * UNITS_NS["s"] + int((date[3] or "").ljust(9, "0")))
        if -LATEST_NS <= time_ns <= LATEST_NS:
            return int(time_ns)
    except (ValueError, ArithmeticError):
        pass
    raise ValueError(f"{_shown(text)!r} is no time: give a date, or a number of at most 146 years")


def _length(text: str) -> int:
    try:
        length = Decimal(text)
        if 0 <= length <= MAX_LENGTH and length == int(length):
            return int(length)
    except ArithmeticError:
        pass
    raise ValueError(f"{_shown(text)!r} is no length: give an integer from 0 to {MAX_LENGTH:,}")


def _spread(times_ns: NDArray[np.int64], lengths: NDArray[np.int64]) -> Trace:
    steps = np.diff(np.unique(times_ns))
    if not len(steps):
        raise ValueError("all requests of the trace have the same time, so they have no rate")
    _, where, how_many = np.unique(times_ns, return_inverse=True, return_counts=True)
    offsets = np.random.default_rng(0).integers(0, int(steps.min()), len(times_ns))
    times_ns = times_ns + np.where(how_many[where] > 1, offsets, 0)
    order = np.argsort(times_ns, kind="stable")
    return Trace(times_ns[order] - times_ns[order[0]], lengths[order])
