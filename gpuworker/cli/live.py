"""The live view of `gpuworker top`. Needs textual; nothing else imports this module."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from gpuworker.cli import board
from gpuworker.cli.pausing import set_paused
from gpuworker.cli.rates import Rates
from gpuworker.cli.top import Watch
from gpuworker.errors import GpuWorkerError

STYLES = {"title": "bold", "dim": "dim", "mark": "cyan", "good": "green", "bad": "bold red"}
KEPT = 300
"""Looks whose rates are remembered for the curves."""


class Confirm(ModalScreen[bool]):
    """Asks before something that cannot be taken back."""

    CSS = "Confirm { align: center middle; } #ask { width: 60; max-width: 90%; height: auto; border: round $warning; padding: 1 2; background: $surface; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "answer(True)", "Yes"), Binding("n,escape,q", "answer(False)", "No")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question

    def compose(self) -> ComposeResult:
        """The question, and which keys answer it."""
        with Vertical(id="ask"):
            yield Static(f"{self.question}\n\ny: yes    n: no", markup=False)

    def action_answer(self, answer: bool) -> None:
        """The person has decided."""
        self.dismiss(answer)


class Top(App[None]):
    """Watches one worker, also after its owner died, was replaced, or went away."""

    CSS = "#board { height: 1fr; padding: 0; overflow: hidden; } #said { height: auto; color: $warning; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "Pause/resume"), Binding("d", "ask('stop')", "Drain"), Binding("r", "ask('reload')", "Reload"), Binding("q", "quit", "Quit"),
    ]  # fmt: skip
    QUESTIONS: ClassVar[dict[str, str]] = {
        "stop": "Drain worker {}? It finishes what it has, takes nothing new, and ends.",
        "reload": "Reload worker {}? A new owner loads beside the old one, which needs room for two models, and takes over. No request fails.",
    }

    def __init__(self, name: str, interval_s: float) -> None:
        super().__init__()
        self.worker, self.interval_s = name, interval_s
        self.watch_ = Watch(name)
        self.board, self.said = Static("", id="board", markup=False), Static("", id="said", markup=False)
        self.rates: Rates | None = None
        self.gone = ""
        self.history: dict[str, deque[float]] = {key: deque(maxlen=KEPT) for key in ("submitted", "completed", "batches")}

    def compose(self) -> ComposeResult:
        """The board, what a key has led to, and the keys."""
        yield self.board
        yield self.said
        yield Footer()

    def on_mount(self) -> None:
        """Begins to look."""
        self.look()
        self.set_interval(self.interval_s, self.look)

    def on_resize(self) -> None:
        """The same, laid out for the new size, once widgets have theirs."""
        self.call_after_refresh(self.show)

    def look(self) -> None:
        """One more look."""
        try:
            self.rates, self.gone = self.watch_.look(), ""
        except (GpuWorkerError, OSError, ValueError) as error:
            self.gone = str(error)
        else:
            for key, values in self.history.items():
                values.append(self.rates.per_s[key])
        self.show()

    def show(self) -> None:
        """Draws the board in the room there is."""
        if not self.board.is_attached:  # the view is being closed
            return
        room = self.board.size or self.size
        shown = Text(no_wrap=True, overflow="crop")
        if self.gone:
            shown.append(f"{self.gone}\n", "bold red")
            shown.append("waiting for it to come back; q leaves\n", "dim")
        if self.rates is not None:
            for line in board.lines(self.rates, self.history, room.width, max(room.height - 2 * bool(self.gone), 0)):
                for text, style in line:
                    shown.append(text, STYLES.get(style, "") if not self.gone else "dim")
                shown.append("\n")
        self.board.update(shown)

    def say(self, words: str) -> None:
        """What a key has led to, until the next one."""
        if self.said.is_attached:
            self.said.update(words)
            self.call_after_refresh(self.show)

    def action_pause(self) -> None:
        """Pauses the worker, or lets it go on."""
        paused = self.rates is not None and self.rates.state == "paused"
        try:
            set_paused(self.worker, not paused)
            self.say("it goes on" if paused else "paused: nothing begins until it is resumed; p resumes")
        except (GpuWorkerError, OSError) as error:
            self.say(str(error))
        self.look()

    def action_ask(self, command: str) -> None:
        """Asks, and then does it."""

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self.command(command), exclusive=False)

        self.push_screen(Confirm(self.QUESTIONS[command].format(self.worker)), answered)

    async def command(self, command: str) -> None:
        """`gpuworker stop` or `reload`, in a process of its own, so that the view goes on meanwhile."""
        self.say(f"{command}: under way")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gpuworker.cli", command, self.worker,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=dict(os.environ),
        )  # fmt: skip
        out, _ = await process.communicate()
        self.say(out.decode(errors="replace").strip() or f"{command}: done")
        self.look()
