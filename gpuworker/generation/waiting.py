"""Who waits, in which order, and who may pass whom.

The order is that of `Sequence.key`; a preempted sequence goes by its own key like everybody, which takes it ahead of what came after it.

Only the lack of blocks makes one pass another: when the first needs more than is free, one behind it that fits is let in, or the device would stand half empty
behind a single long prompt. But each is overtaken `max_overtakes` times at most, and then nobody behind it is let in before it is. So both waits are bounded: the
large one's, because from then on what runs only finishes and gives its blocks back, until it fits (when nothing runs, all fits that was accepted); and a small
one's, because it stands still only while somebody ahead of it waits for that. A preempted sequence is not overtaken at all: memory is short then, and
whoever passed it would be the next to be preempted. (Higher priorities are not counted: they come first however long others wait.)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from gpuworker.generation.sequence import Sequence

WINDOW = 32
"""How many, from the first on, are looked at in one step, which bounds the time that it takes."""

by_key = attrgetter("key")


class Waiting:
    """Sequences that hold no blocks. max_overtakes: see above; 0: strictly in order."""

    def __init__(self, max_overtakes: int) -> None:
        self.max_overtakes = max_overtakes
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """It has arrived."""
        insort(self._sequences, sequence, key=by_key)

    def add_preempted(self, sequence: Sequence) -> None:
        """It had to give its blocks back."""
        sequence.overtaken = self.max_overtakes
        self.add(sequence)

    def discard(self, sequence: Sequence) -> None:
        """It waits no longer. Nothing happens if it does not wait here."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)

    def candidates(self) -> Iterator[Sequence]:
        """Who may be let in now, the first first. Not to let one in is to pass it over; stop at any time."""
        passed: list[Sequence] = []
        for sequence in self._sequences[:WINDOW]:
            if any(one.overtaken >= self.max_overtakes for one in passed):
                return
            yield sequence
            if not sequence.is_running:
                passed.append(sequence)

    def let_in(self, sequence: Sequence) -> None:
        """It has blocks now; those ahead of it have been overtaken."""
        place = self._sequences.index(sequence)
        for other in self._sequences[:place]:
            other.overtaken += 1
        del self._sequences[place]
