"""What dead processes have left in /dev/shm: segments, files of large payloads, half-made segments."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable

from gpuworker.cli.doctor import Check
from gpuworker.cli.target import attach
from gpuworker.cli.text import count, size
from gpuworker.errors import GpuWorkerError
from gpuworker.segment import names, worker_names

REMEDY = "gpuworker doctor --clean"


def leftovers() -> list[Check]:
    """Dead workers, and names that have only payload files; a live owner sweeps its own."""
    alive: list[str] = []
    dead: list[str] = []
    unknown: list[Check] = []
    for name in worker_names():
        try:
            (dead if attach(name).is_dead() else alive).append(name)
        except (GpuWorkerError, OSError) as error:
            unknown.append(Check("leftovers", "OK", f"worker {name!r} cannot be looked into: {error}"))
    sizes = sizes_of(os.listdir(names.SHM_DIR))
    found = judge(sizes, alive, dead, {pid for pid in pids_of(sizes) if os.path.exists(f"/proc/{pid}")})
    return unknown + found or [Check("leftovers", "OK", f"none; {count(len(alive), 'worker')} running")]


def sizes_of(files: Iterable[str]) -> dict[str, int]:
    """Bytes of memory that each of our files takes."""
    found = {}
    for file in files:
        if file.startswith(names.PREFIX):
            with contextlib.suppress(FileNotFoundError):
                found[file] = os.lstat(f"{names.SHM_DIR}/{file}").st_blocks * 512
    return found


def pids_of(files: Iterable[str]) -> set[str]:
    """The processes that half-made segments are named after."""
    return {match[2] for match in map(names.BESIDE.fullmatch, files) if match and match[2]}


def judge(sizes: dict[str, int], alive: Collection[str], dead: Collection[str], living_pids: Collection[str]) -> list[Check]:
    """sizes: of all files; alive, dead: names of workers; living_pids: those among `pids_of(sizes)` that still run."""
    found = []
    if dead:
        what = ", ".join(sorted(f"{name} ({held(name, sizes)})" for name in dead))
        advice = f"the next start of the same name takes it over, with the requests that were queued; if there will be none: {REMEDY}"
        found.append(Check("leftovers", "WARN", f"{count(len(dead), 'dead worker')}: {what}", advice))
    orphans: dict[str, list[int]] = {}
    for file, n in sizes.items():
        match = names.BESIDE.fullmatch(file)
        if match and match[2] not in living_pids and (match[2] or match[1] not in (*alive, *dead)):
            orphans.setdefault(match[1], []).append(n)
    for name, parts in orphans.items():
        what = f"{count(len(parts), 'file')} of {size(sum(parts))} that worker {name!r} no longer needs"
        found.append(Check("leftovers", "WARN", what, f"the next start of the same name removes them; if there will be none: {REMEDY}"))
    return found


def held(name: str, sizes: dict[str, int]) -> str:
    """How much memory a dead worker's files take."""
    payloads = [n for file, n in sizes.items() if file.startswith(f"{names.PREFIX}{name}.spill-")]
    return size(sizes.get(names.PREFIX + name, 0)) + (f" and {count(len(payloads), 'payload file')} of {size(sum(payloads))}" if payloads else "")
