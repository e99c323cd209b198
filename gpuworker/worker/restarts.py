"""When to start an owner again. Pure: told what happened, says what to do."""

from __future__ import annotations

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0


class Restarts:
    """An owner that has answered something is replaced at once. Of those that die before, the first is too, the next ones after longer and longer pauses,
    and after `max_restarts` of them in a row (None: never) there is none."""

    def __init__(self, max_restarts: int | None) -> None:
        self.max_restarts = max_restarts
        self.fruitless = 0
        """Owners in a row that have died without having answered anything."""

    def pause_s(self, has_answered: bool) -> float | None:
        """After an owner's death: how long to wait before the next one is started. None: not at all."""
        self.fruitless = 0 if has_answered else self.fruitless + 1
        if self.max_restarts is not None and self.fruitless > self.max_restarts:
            return None
        return 0.0 if self.fruitless < 2 else min(FIRST_PAUSE_S * 2.0 ** min(self.fruitless - 2, 30), LONGEST_PAUSE_S)
