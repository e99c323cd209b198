"""Argument types of the commands: numbers within bounds. A mistake is answered with what to give."""

from __future__ import annotations

import argparse
import math
import re

from gpuworker.cli.text import shorten


def number(text: str, what: str, least: float, most: float) -> float:
    """For argument types. Raises ArgumentTypeError that says what to give."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{shorten(text, 40)}: give {what}")
    return value


def integer(text: str, least: int, most: int) -> int:
    """For argument types. Raises ArgumentTypeError that says what to give."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{shorten(text, 40)}: give an integer from {least:,} to {most:,}")
    return value


def size_bytes(text: str) -> int:
    """An argument type: bytes, or with a unit: 65536, 512MiB, 2GiB, 2GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(k|m|g|t)?(i)?b?", text.strip(), re.IGNORECASE | re.ASCII)
    if found is None or (found[3] and not found[2]):
        raise argparse.ArgumentTypeError(f"{shorten(text, 40)}: give a number of bytes, or of another unit, as in 512MiB, 2GiB or 2GB")
    factor: int = (1024 if found[3] else 1000) ** (" kmgt".index(found[2].lower()) if found[2] else 0)
    return int(found[1]) * factor if found[1].isdecimal() else round(float(found[1]) * factor)


def positive(text: str) -> float:
    """An argument type."""
    return number(text, "a number above 0, from 0.000001 to 1e9", 1e-6, 1e9)


def wait(text: str) -> float:
    """An argument type: 0 or more."""
    return number(text, "a number from 0 to 1e9", 0, 1e9)


def interval(text: str) -> float:
    """An argument type: seconds between two looks."""
    return number(text, "a number of seconds from 0.01 to 86400", 0.01, 86400)


def share(text: str) -> float:
    """An argument type."""
    return number(text, "a number from 0 to 1", 0, 1)


def positive_list(text: str) -> list[float]:
    """An argument type."""
    return [number(part, "numbers above 0, from 0.000001 to 1e9, with commas between them", 1e-6, 1e9) for part in text.split(",")]


def count(text: str) -> int:
    """An argument type."""
    return integer(text, 1, 10_000_000)


def seed(text: str) -> int:
    """An argument type."""
    return integer(text, 0, (1 << 63) - 1)


def counts(text: str) -> tuple[int, ...]:
    """An argument type: ascending."""
    return tuple(sorted({count(part) for part in text.split(",")}))
