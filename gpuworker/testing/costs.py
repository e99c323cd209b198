"""How long a batch takes: functions cost_ns(size, length), length being what its requests are padded to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from gpuworker.scheduling.cost_model import CostModel

Cost = Callable[[int, int], int]
TERM = re.compile(r"(\d+\.?\d*|\.\d+)(?:\s*\*?\s*([bt]))?")


def formula(text: str) -> Cost:
    """From e.g. "5+0.25b+0.002t", in ms: what each batch costs, each request of it (b), each token of it with padding (t). Raises ValueError."""
    each = {"": 0.0, "b": 0.0, "t": 0.0}
    for term in text.split("+"):
        parsed = TERM.fullmatch(term.strip())
        if parsed is None:
            raise ValueError(f'a cost of {text!r}: write it like "5+0.25b" or "5+0.25b+0.002t", in ms: for a batch, each request (b), each token (t)')
        each[parsed[2] or ""] += float(parsed[1]) * 1e6
    fixed_ns, request_ns, token_ns = each.values()
    if not sum(each.values()):
        raise ValueError(f"a cost of {text!r}: a batch cannot take no time")
    return lambda size, length: max(1, round(fixed_ns + size * (request_ns + length * token_ns)))


def profile(path: str | Path, max_batch_size: int) -> Cost:
    """From a JSON file of measured run times in ms, {"8x128": 6.5, ...}: size x length (or size alone). Other shapes are predicted from them as the worker
    predicts them. Raises ValueError."""
    try:
        measured = {tuple(map(int, shape.split("x"))): float(run_ms) for shape, run_ms in json.loads(Path(path).read_text()).items()}
        shapes = [(*shape, 0)[:2] for shape in measured]
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f'{path}: not a profile, which is a JSON object like {{"1x128": 5.2, "8x128": 6.5}}: size x length, ms') from None
    model = CostModel(max(max_batch_size, *(size for size, _ in shapes)))
    for (size, length), run_ms in zip(shapes, measured.values(), strict=True):
        model.seed(size, length, [round(run_ms * 1e6)])
    lengths = {length for _, length in shapes}
    if len(lengths) == 1:  # nothing is known of what other lengths cost
        (only,) = lengths
        return lambda size, length: max(1, model.predicted(size, only))
    return lambda size, length: max(1, model.predicted(size, length))
