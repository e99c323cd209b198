"""Run times that are learned from what batches took."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from gpuworker.scheduling.isotonic import Shape
from gpuworker.scheduling.margin import Margin
from gpuworker.scheduling.surface import Surface

WINDOW = 32
"""Run times kept of a shape."""
MOST_SHAPES = 256
REFIT_EVERY = 64
"""Observations after which a fit is renewed at the latest (or as many as there are shapes); a median that moves by more than MOVED is put in at once."""
MOVED = 1 / 16
MARGIN_MOVED = 0.02
COLD = 2.0
"""A shape's first run is not believed if it took more than this many times its prediction: it may have compiled, allocated, or been interrupted."""
SHIFTED = 1.25
SHIFT_RUNS = 12
"""So many batches in a row, of whatever known shapes, that took over SHIFTED times their prediction (or under 1 / SHIFTED) mean that all have changed."""
DOUBTED_AFTER = 1024
"""Observations after which a shape that was not seen again is forgotten if it is COLD times slower than the others suggest: believed, it would never run."""
LONGEST_NS = 86_400 * 10**9
"""No batch is believed to take more than a day."""
FORMAT = 1


class CostModel:
    """RunTimes fitted to observations: medians per shape, made monotone and completed by a Surface, times a Margin.

    Sizes are rounded up to `allowed_batch_sizes` where given. Until the second observation (the first may be a cold one) tables are all 0: everything looks
    feasible, and the first batches teach it. An outlier moves nothing; a lasting change is followed within WINDOW batches of a shape, and one that concerns
    all shapes within SHIFT_RUNS batches, also for shapes that were not seen since.
    """

    learns = True

    def __init__(self, max_batch_size: int, *, allowed_batch_sizes: Sequence[int] = (), miss_rate: float = 0.1, step: float = 0.005) -> None:
        """miss_rate: share of batches that may take longer than predicted. step: how fast the margin answers to misses, see Margin."""
        allowed = sorted(size for size in set(allowed_batch_sizes) if size > 0) or range(1, max_batch_size + 1)
        largest = next((size for size in allowed if size >= max_batch_size), max_batch_size)
        self._sizes = [*(size for size in allowed if size < largest), largest]
        self._place = [bisect_left(self._sizes, size) for size in range(largest + 1)]
        self._max_batch_size = max_batch_size
        self.version = 0
        self.margin = 1.0
        """The factor that tables contain."""
        self._next_margin = Margin(miss_rate, step)
        self._shapes: dict[Shape, _Runs] = {}
        self._fitted: dict[Shape, tuple[int, int]] = {}
        self._surface: Surface | None = None
        self._predicted: dict[int, list[int]] = {}
        self._tables: dict[int, list[int]] = {}
        self._observed = self._fitted_at = 0
        self._refit_after = 1
        self._shift: list[tuple[Shape, int, int]] = []
        self._hearsay: dict[Shape, int] = {}
        """Restored run times of shapes that have not run since."""

    def table(self, length: int) -> Sequence[int]:
        """See RunTimes.table. With the margin. For length 0 see Surface: where lengths are known, it is no shorter than they are."""
        table = self._tables.get(length)
        if table is None:
            table = [round(run_ns * self.margin) for run_ns in self._row(length)[: self._max_batch_size + 1]]
            self._tables[length] = table
        return table

    def predicted(self, size: int, length: int) -> int:
        """The run time in ns that is as likely too long as too short: without the margin. 0 while nothing is known."""
        return self._row(length)[size]

    def observe(self, size: int, length: int, run_ns: int) -> None:
        """See RunTimes.observe. A size that no batch can have is left out."""
        if not 0 < size < len(self._place):
            return
        run_ns = min(max(1, run_ns), LONGEST_NS)
        shape = (self._sizes[self._place[size]], length)
        predicted_ns = self.predicted(size, length)
        runs = self._shapes.get(shape)
        if runs is None:
            runs = self._shapes[shape] = _Runs(predicted_ns)
        runs.add(run_ns, self._observed)
        self._observed += 1
        if shape in self._hearsay and len(runs.recent) == 3:
            self._check_hearsay(self._hearsay.pop(shape), max(run_ns, runs.recent[1]))
        if runs.is_known:
            self._compare(shape, run_ns, predicted_ns)
        else:
            runs.is_known = len(runs.sorted) > 1 or (run_ns <= COLD * predicted_ns if predicted_ns else self._observed > 1)
        if self._is_due(runs):
            if runs.fitted_ns and not 1 / SHIFTED <= runs.median / runs.fitted_ns <= SHIFTED:
                self._next_margin.restate(runs.median / runs.fitted_ns, shape)
            self._refit()
        elif abs(self._next_margin.value - self.margin) > MARGIN_MOVED:
            self._publish()

    def seed(self, size: int, length: int, run_ns: Sequence[int]) -> None:
        """Run times that were measured beforehand, none of them cold. They weigh as much as observations. A size that no batch can have is left out."""
        if not 0 < size < len(self._place):
            return
        runs = self._shapes.setdefault((self._sizes[self._place[size]], length), _Runs())
        for value in run_ns:
            runs.add(min(max(1, value), LONGEST_NS), self._observed)
        runs.is_known = bool(runs.sorted)
        self._refit()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known yet: all tables are 0."""
        return self._surface is None

    def to_dict(self) -> dict[str, Any]:
        """What is known, for `restore`; of types that JSON has."""
        shapes = [[*shape, runs.median] for shape, runs in self._shapes.items() if runs.is_known]
        return {"format": FORMAT, "margin": self.margin, "shapes": shapes}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes over what another model knew (to_dict): one vote for each shape, which two observations outvote (or a shorter one). Raises ValueError
        if it is no such thing."""
        try:
            if saved["format"] != FORMAT:
                raise ValueError(f"run times have format {saved['format']}, not {FORMAT}")
            shapes = [(int(size), int(length), int(run_ns)) for size, length, run_ns in saved["shapes"]]
            margin = float(saved["margin"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"these are no saved run times: {error!r}") from None
        for size, length, run_ns in shapes[:MOST_SHAPES]:
            if size in self._sizes and 0 <= length <= LONGEST_NS and 0 < run_ns <= LONGEST_NS:
                self._shapes.setdefault((size, length), _Runs()).restart([run_ns])
                self._hearsay[size, length] = run_ns
        self._next_margin.restart([margin])
        self._refit()

    def _row(self, length: int) -> list[int]:
        row = self._predicted.get(length)
        if row is None:
            by_place = [round(run_ns) for run_ns in self._surface.row(length).tolist()] if self._surface else [0] * len(self._sizes)
            row = [0, *(by_place[place] for place in self._place[1:])]
            self._predicted[length] = row
        return row

    def _check_hearsay(self, restored_ns: int, observed_ns: int) -> None:
        """One shape has run twice since. If what was restored of it is wrong, so is the rest, by the same factor: it might never run, and so never be corrected."""
        factor = observed_ns / restored_ns
        if not 1 / SHIFTED <= factor <= SHIFTED:
            for shape, run_ns in self._hearsay.items():
                if shape in self._shapes:
                    self._hearsay[shape] = max(round(run_ns * factor), 1)
                    self._shapes[shape].restart([self._hearsay[shape]])
            self._refit()

    def _compare(self, shape: Shape, run_ns: int, predicted_ns: int) -> None:
        """Learns from how far a prediction was off."""
        ratio = run_ns / predicted_ns
        self._next_margin.observe(ratio, self.margin, shape)
        if 1 / SHIFTED <= ratio <= SHIFTED:
            self._shift.clear()
            return
        if self._shift and (self._shift[-1][1] > self._shift[-1][2]) != (ratio > 1):
            self._shift.clear()
        self._shift.append((shape, run_ns, predicted_ns))
        if len(self._shift) == SHIFT_RUNS:
            self._follow_shift()

    def _follow_shift(self) -> None:
        """Everything is slower or faster than it was. What ran lately is replaced by its latest runs, the rest moves by the same factor; or by the same time
        where that makes it less slow (a guess that is too low is corrected by the next batch, see Surface)."""
        ratios = sorted(run_ns / predicted_ns for _, run_ns, predicted_ns in self._shift)
        factor = ratios[len(ratios) // 2]
        added_ns = sorted(run_ns - predicted_ns for _, run_ns, predicted_ns in self._shift)[len(ratios) // 2]
        latest: dict[Shape, list[int]] = {}
        for shape, run_ns, _ in self._shift:
            latest.setdefault(shape, []).append(run_ns)
        self._shapes = {shape: runs for shape, runs in self._shapes.items() if runs.is_known}
        for shape, runs in self._shapes.items():
            scaled_ns = max(1, round(runs.median * factor))
            runs.restart(latest.get(shape, [min(scaled_ns, runs.median + added_ns) if factor > 1 else scaled_ns]))
        self._next_margin.restart(ratio / factor for ratio in ratios)
        self._shift.clear()
        self._refit_after = 1

    def _is_due(self, runs: _Runs) -> bool:
        moved_ns = abs(runs.median - runs.fitted_ns) if runs.is_known else 0
        return self._observed - self._fitted_at >= self._refit_after or moved_ns > (MOVED + 0.25 / len(runs.sorted)) * runs.fitted_ns

    def _refit(self) -> None:
        self._fitted_at = self._observed
        self._refit_after = min(2 * self._refit_after, max(REFIT_EVERY, len(self._shapes)))
        self._forget()
        known = {shape: runs for shape, runs in self._shapes.items() if runs.is_known}
        for runs in known.values():
            runs.fitted_ns = runs.median
        fitted = {shape: (runs.median, len(runs.sorted)) for shape, runs in known.items()}
        if fitted != self._fitted:
            self._fitted = fitted
            medians = {shape: float(median) for shape, (median, _) in fitted.items()}
            self._surface = Surface(medians, {shape: count for shape, (_, count) in fitted.items()}, self._sizes) if fitted else None
            self._predicted.clear()
            self._publish()
        elif self._next_margin.value != self.margin:
            self._publish()

    def _forget(self) -> None:
        """Drops shapes that are too many, and those that are not to be believed."""
        longest_unseen = sorted(self._shapes, key=lambda shape: self._shapes[shape].last_seen)
        for shape in longest_unseen[: max(0, len(longest_unseen) - MOST_SHAPES)]:
            del self._shapes[shape]
        for shape in longest_unseen[-MOST_SHAPES:]:
            runs = self._shapes[shape]
            if self._surface is None or self._observed - runs.last_seen <= DOUBTED_AFTER:
                break
            if runs.median > COLD * self._surface.on_line(*shape):
                del self._shapes[shape]

    def _publish(self) -> None:
        self.margin = self._next_margin.value
        self._tables.clear()
        self.version += 1


class _Runs:
    """The last run times of one shape."""

    __slots__ = ("fitted_ns", "is_known", "last_seen", "recent", "sorted")

    def __init__(self, fitted_ns: int = 0) -> None:
        self.recent: deque[int] = deque()
        self.sorted: list[int] = []
        self.is_known = False
        self.fitted_ns = fitted_ns
        self.last_seen = 0

    @property
    def median(self) -> int:
        """The lower one of two: of a good run and an interrupted one, the good one."""
        return self.sorted[(len(self.sorted) - 1) // 2]

    def add(self, run_ns: int, now: int) -> None:
        if len(self.recent) == WINDOW:
            del self.sorted[bisect_left(self.sorted, self.recent.popleft())]
        self.recent.append(run_ns)
        insort(self.sorted, run_ns)
        self.last_seen = now

    def restart(self, run_ns: Sequence[int]) -> None:
        self.recent = deque(run_ns)
        self.sorted = sorted(run_ns)
        self.is_known = True
