"""Numbers and tables as people read them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WIDTH = 80


def span(seconds: float) -> str:
    """A length of time: three digits and a unit ("45.1 us", "2.05 ms", "3.2 s"), from two minutes on the two largest units ("3 h 5 min")."""
    if seconds <= 0:
        return "0 s"
    for unit, unit_s in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    if seconds < 119.5:
        return f"{seconds:.3g} s"
    left = round(seconds)
    parts: list[str] = []
    for unit, whole_s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, whole_s)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 "))


def size(size_bytes: float) -> str:
    """A number of bytes: "512 bytes", "33.1 MiB"."""
    if size_bytes < 1000:
        return f"{size_bytes:.0f} bytes"
    units = ["KiB", "MiB", "GiB", "TiB"]
    while (size_bytes := size_bytes / 1024) >= 999.5 and len(units) > 1:
        units.pop(0)
    return f"{size_bytes:.3g} {units[0]}"


def rate(per_s: float) -> str:
    """A frequency: "0.5/s", "1,234/s"."""
    return f"{per_s:,.0f}/s" if per_s >= 10 or not per_s else f"{per_s:.1f}/s"


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: "1 slot", "3 slots"; plural: where an s does not make it."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def bar(part: float, whole: float, width: int) -> str:
    """A bar of `width` characters for the whole; anything above nothing shows."""
    return "#" * max(round(part / whole * width), 1) if part > 0 else ""


def shorten(text: str, width: int) -> str:
    """The text, its middle left out where it is longer than `width`."""
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return f"{text[: width - 3 - tail]}...{text[len(text) - tail :]}"


def table(rows: Sequence[Sequence[str]], align: str, indent: str = "") -> list[str]:
    """Lines of columns two spaces apart; align: one of "<" and ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [indent + "  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True)).rstrip() for row in rows]


def setting(value: Any) -> str:
    """An option's value as a file has it; "-" for none."""
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
