"""Whoever only looks at a segment (list, stats, top, metrics, the status page, probes) comes to an end and says something, whatever has been written there."""

import json

import numpy as np
import pytest

import gpuworker
from gpuworker._native import lib
from gpuworker.cli import board, inspect, screen
from gpuworker.cli.interval import Interval
from gpuworker.cli.rates import Rates
from gpuworker.segment import Segment
from gpuworker.segment.segment import Geometry
from gpuworker.segment.stats import Stats

from .exposed import samples
from .test_hostile import Layout, values

frontends = pytest.importorskip("gpuworker.frontends.page"), pytest.importorskip("gpuworker.frontends.health")
ROUNDS = 60
INFOS = [
    b'{"handler": "\\ud800\\u001b[31m\\n\\u202e%s %d \\" \\\\", "options": {"max_batch_size": "x", "latency_budget_ms": NaN, "\\ud800": "\\u001b[2J"}}',
    b'{"handler": 3, "options": {"max_batch_size": Infinity, "latency_budget_ms": 1e999, "drain_timeout_s": -Infinity}}',
    b'{"handler": "a", "options": {"max_batch_size": [1], "latency_budget_ms": true, "length_buckets": [1, [2]]}}',
    b'{"options": {"x": ' + b'{"a":' * 400 + b"1" + b"}" * 400 + b', "max_batch_size": {}}}',
    b'{"handler": null, "options": {"max_batch_size": 1e300, "latency_budget_ms": 1e300, "capacity": ' + b"9" * 400 + b"}}",
    b'{"options": {"max_batch_size": -1, "latency_budget_ms": -3}}',
    b"[" * 4000, b"[1]", b"null", b"\xff", b'{"options": []}',
]  # fmt: skip


@pytest.fixture
def segment(name):
    """One that lives: this process owns it."""
    segment = Segment.own(name, Geometry(8, 4096, 4096, 8))
    yield segment
    Layout(segment).control[:] = 0  # whatever it says, it is ours to remove
    segment.unlink()
    segment.close()


def look(name, before):
    """All that there is to look with. -> the statistics; None where the segment is refused."""
    try:
        stats = Stats.of(name)
    except gpuworker.GpuWorkerError:
        stats = None
    page, health = frontends
    assert json.dumps(page.snapshot([name]), allow_nan=False)
    assert health.check(name, 5, 30)["status"]
    samples(gpuworker.render_metrics([name]))
    written = inspect.listing([inspect.look(name)])
    if stats is not None:
        rates = Rates.between(before or stats, stats, 1.0)
        json.dumps([stats.to_dict(), rates.to_dict()], allow_nan=False)
        for recent in (None, Interval.between(before or stats, stats, 1.0)):
            written += screen.lines(stats, recent)
        written += board.plain(board.lines(rates, {"submitted": [0, 1.0, 2e19]}, 80, 24))
        assert stats.condition()
    for line in written:
        assert line.isprintable(), line
        line.encode()
    return stats


def test_numbers_that_cannot_be(segment):
    layout, dice, before = Layout(segment), np.random.default_rng(3), None
    good, seen = layout.control.copy(), 0
    for _ in range(ROUNDS):
        layout.control[:] = good
        at = dice.integers(8, len(layout.header) if dice.random() < 0.5 else len(good), int(dice.choice([3, 60, 600])))
        layout.control[at] = values(dice, len(at))
        stats = look(segment.name, before)
        before, seen = stats if dice.random() < 0.3 else before, seen + (stats is not None)
    layout.control[:] = good
    assert seen > ROUNDS // 4


@pytest.mark.parametrize("info", INFOS)
def test_words_that_nobody_of_ours_writes(segment, info):
    note = np.random.default_rng(len(info)).bytes(300) + b"\x1b[2J \xed\xa0\x80. Its last words"
    lib.gw_set_info(segment.port, info, len(info))
    lib.gw_set_note(segment.port, note, len(note))
    for state in range(9):
        lib.gw_set_state(segment.port, state)
        stats = look(segment.name, None)
        assert stats.note
    assert all(isinstance(value, (str, int, float, bool, type(None), list)) for value in stats.options.values())
