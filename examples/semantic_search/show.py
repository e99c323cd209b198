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
        numbers = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "| " + " | ".join([cells[0].ljust(widths[0]), *numbers]) + " |"

    say(line(header))
    say("|" + "|".join("-" * (width + 1) + ("-" if column == 0 else ":") for column, width in enumerate(widths)) + "|")
    for row in rows:
        say(line(row))
