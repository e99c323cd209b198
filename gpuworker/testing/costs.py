"""How long a batch takes: functions cost_ns(size, length), length being what its requests are padded to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuworker.scheduling.cost_model import LONGEST_NS, MOST_SHAPES, CostModel
from gpuworker.scheduling.sizes import MAX_BATCH_SIZE, MAX_LENGTH

Cost = Callable[[int, int], int]
TERM = re.compile(r"(\d+\.?\d*|\.\d+)(?:\s*\*?\s*([bt]))?")
SHAPE = re.compile(r"\s*([0-9]{1,9})\s*(?:x\s*([0-9]{1,9})\s*)?")
MOST_DIGITS = 60
"""Of a formula that is repeated in a message."""


def formula(text: str) -> Cost:
    """From e.g. "5+0.25b+0.002t", in ms: what each batch costs, each request of it (b), each token of it with padding (t). Raises ValueError."""
    shown = repr(text if len(text) <= MOST_DIGITS else text[: MOST_DIGITS - 3] + "...")
    each = {"": 0.0, "b": 0.0, "t": 0.0}
    for term in text.split("+"):
        parsed = TERM.fullmatch(term.strip())
        if parsed is None:
            raise ValueError(f'a cost of {shown}: write it like "5+0.25b" or "5+0.25b+0.002t", in ms: for a batch, each request (b), each token (t)')
        each[parsed[2] or ""] += float(parsed[1]) * 1e6
    fixed_ns, request_ns, token_ns = each.values()
    if not sum(each.values()):
        raise ValueError(f"a cost of {shown}: a batch cannot take no time")
    if sum(each.values()) > LONGEST_NS:
        raise ValueError(f"a cost of {shown}, in ms: a batch may take at most a day")
    return lambda size, length: max(1, round(fixed_ns + size * (request_ns + length * token_ns)))


def profile(path: str | Path, max_batch_size: int) -> Cost:
    """From a JSON file of measured run times in ms, {"8x128": 6.5, ...}: size x length (or size alone). Other shapes are predicted from them as the worker
    predicts them. Raises ValueError."""
    try:
        runs_ns = _measured(json.loads(Path(path).read_text(encoding="utf-8-sig")))
    except (ValueError, RecursionError) as error:
        about = str(error) if type(error) is ValueError else "not a profile"
        raise ValueError(f'{path}: {about}; write it as JSON like {{"1x128": 5.2, "8x128": 6.5}}: size x length, ms') from None
    model = CostModel(max(max_batch_size, *(size for size, _ in runs_ns)))
    model.restore({**model.to_dict(), "shapes": [(*shape, run_ns) for shape, run_ns in runs_ns.items()]})
    lengths = {length for _, length in runs_ns}
    if len(lengths) == 1:  # nothing is known of what other lengths cost
        (only,) = lengths
        return lambda size, length: max(1, model.predicted(size, only))
    return lambda size, length: max(1, model.predicted(size, length))


def _measured(profile: Any) -> dict[tuple[int, int], int]:
    """Run times in ns by (size, length)."""
    if not isinstance(profile, dict) or not 1 <= len(profile) <= MOST_SHAPES:
        raise ValueError(f"not a profile, which is a JSON object of 1 to {MOST_SHAPES} shapes")
    runs_ns = {}
    for shape, run_ms in profile.items():
        found = SHAPE.fullmatch(shape)
        size, length = (int(found[1]), int(found[2] or 0)) if found else (0, 0)
        if not 1 <= size <= MAX_BATCH_SIZE or not 0 <= length <= MAX_LENGTH:
            raise ValueError(f"{shape[:MOST_DIGITS]!r} is no shape: give a size from 1 to {MAX_BATCH_SIZE:,}, and a length of at most {MAX_LENGTH:,}")
        if isinstance(run_ms, bool) or not isinstance(run_ms, (int, float)) or not 0 < run_ms <= LONGEST_NS / 1e6:
            raise ValueError(f"{shape!r} takes {str(run_ms)[:MOST_DIGITS]} ms: give a number above 0, and at most a day")
        runs_ns[size, length] = max(1, round(run_ms * 1e6))
    return runs_ns
