"""What is going on, while it does: on a terminal a picture that changes, elsewhere a line every few seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from examples.semantic_search.show import console, say
from gpuworker.segment.generation import Generation
from gpuworker.segment.stats import Stats

from .fleet import Board

WINDOW_S = 2.0
LINE_EVERY_S = 5.0


class Speed:
    """Tokens per second, over the last WINDOW_S."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def now(self, tokens: int) -> float:
        """tokens: that have come so far."""
        now_s = time.monotonic()
        self._seen.append((now_s, tokens))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        began_s, before = self._seen[0]
        return (tokens - before) / (now_s - began_s) if now_s > began_s else 0.0


@contextmanager
def watching(worker: str) -> Iterator[Callable[[Board], None]]:
    """Gives a function to call with the board, as often as one likes."""
    speed = Speed()
    if console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:  # no thread: processes are forked meanwhile
            yield lambda board: live.update(picture(board, Stats.of(worker).generation, speed.now(int(board.came.sum()))), refresh=True)
    else:
        last_s = time.monotonic()

        def line(board: Board) -> None:
            nonlocal last_s
            rate = speed.now(int(board.came.sum()))
            if time.monotonic() - last_s >= LINE_EVERY_S:
                last_s = time.monotonic()
                say(f"  {headline(board, Stats.of(worker).generation, rate)}")

        yield line


def headline(board: Board, found: Generation | None, rate: float) -> str:
    """In one line."""
    done = f"{int((board.done_ns > 0).sum())} of {len(board.done_ns)} answered"
    if found is None:
        return done
    blocks = f"blocks {found.blocks_used} used, {found.blocks_free} free ({found.blocks_cached} of them with prefixes)"
    return f"{done}; running {found.running}, waiting {found.waiting}; {blocks}; {rate:.0f} tokens/s"


def picture(board: Board, found: Generation | None, rate: float) -> Group:
    """The line, and what each frontend is getting."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", style="dim")
    table.add_column(justify="right")
    table.add_column(no_wrap=True, overflow="ellipsis")
    open_now = [i for i in range(len(board.done_ns)) if board.came[i] and not board.done_ns[i]]
    for i in open_now:
        table.add_row(f"frontend {board.reader[i] + 1}", f"{board.came[i]} of {board.most[i]}", Text(" ".join(board.head(i).split())))
    return Group(Text(headline(board, found, rate), style="bold"), table)
