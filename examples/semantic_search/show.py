"""What the demo prints: a progress bar on a terminal, plain lines elsewhere, and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

console = Console()


def say(line: str = "") -> None:
    print(line, flush=True)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the number done so far."""
    if console.is_terminal and not console.is_dumb_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # No refresh thread: processes are forked while the bar is up.
        with Progress(*columns, console=console, auto_refresh=False) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.update(task, completed=done, refresh=True)
    else:
        yield plain_progress(label, total)


def plain_progress(label: str, total: int) -> Callable[[int], None]:
    """One line per quarter."""
    quarter = 0

    def advance(done: int) -> None:
        nonlocal quarter
        if done * 4 // total > quarter:
            quarter = done * 4 // total
            say(f"  {label}: {done} of {total}")

    return advance


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Markdown; the first column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(zip(cells, widths, strict=True)))
        return "| " + " | ".join([first, *others]) + " |"

    say(line(header))
    say("|" + "|".join("-" * (width + 2) if not column else "-" * (width + 1) + ":" for column, width in enumerate(widths)) + "|")
    for row in rows:
        say(line(row))
