"""`gpuworker top`: the figures of an interval, the screen in whatever room there is, and the live view as a person uses it."""

import asyncio
import dataclasses
import json

import pytest

from gpuworker.cli import board, main, top
from gpuworker.cli.rates import OCTAVES, Rates
from gpuworker.segment import Segment
from gpuworker.segment.execution import Execution
from gpuworker.segment.generation import Generation
from gpuworker.segment.stats import ClientView
from tests import handlers
from tests.conftest import kill_all
from tests.test_cli_text import BUSY, histogram, stats

NO_TENSORS = dict.fromkeys((field.name for field in dataclasses.fields(Execution)), 0)
RAN = NO_TENSORS | {"batches": 10, "device_ns": 50_000_000, "rows": 100, "padded_rows": 100}
HELD = dict.fromkeys((field.name for field in dataclasses.fields(Generation)), 0) | {"tokens": 100, "waste": 0.03, "blocks_free": 800}
BEFORE = stats(**BUSY, options={"max_batch_size": 32, "latency_budget_ms": 26.0}, execution=Execution(**RAN), generation=Generation(**HELD))
NOW = dataclasses.replace(
    BEFORE, submitted=2400, completed=2300, failed=13, batches=140, on_time=90, late=10, tokens=1000, padded_tokens=1250, slots_in_use=27,
    batch_sizes={str(i): 40 for i in range(1, 17)} | {"16": 115}, dispatch_reasons={"full": 60, "age": 80, "drain": 0},
    run=histogram(*[2000] * 43, 8000), queue_wait=histogram(*[45] * 90, *[5000] * 10), wake=histogram(45.0),
    clients=(*(ClientView(4000 + i, i) for i in range(7)), ClientView(4000, 6)),
    execution=Execution(**RAN | {"batches": 30, "device_ns": 450_000_000, "rows": 500, "padded_rows": 700, "graph_hits": 15, "graph_misses": 5,
                                 "memory_bytes": 3 << 30, "memory_total_bytes": 80 << 30, "to_device_bytes": 1000, "graphs": 4}),
    generation=Generation(**HELD | {"tokens": 300, "prompt_tokens": 4000, "running": 16, "waiting": 3, "blocks_used": 310}),
)  # fmt: skip


def rates(now=NOW, elapsed_s=2.0):
    return Rates.between(BEFORE, now, elapsed_s)


def text_of(found, width=80, height=24, history=None, glyphs=board.BLOCKS):
    return board.plain(board.lines(found, history or {}, width, height, glyphs))


# Figures.


def test_rates_are_of_the_interval_and_totals_are_not():
    found = rates()
    assert (found.per_s["submitted"], found.per_s["failed"], found.per_s["batches"]) == (600, 5, 20)
    assert found.totals["submitted"] == 2400
    assert found.mean_batch_size == pytest.approx(1210 / 40, abs=1e-3)
    assert found.reasons == {"full": 0.75, "age": 0.25}
    assert (found.goodput, found.latency_budget_ms, found.padding) == (0.9, 26.0, 1.25)
    assert found.clients == {4000: 6, 4006: 6, 4005: 5, 4004: 4, 4003: 3, 4002: 2, 4001: 1}, "a process that joined twice is one"
    assert rates(BEFORE).goodput is None


def test_percentiles_are_those_of_what_came_after():
    found = rates().waits
    assert found["queue"].count == 100
    assert (found["queue"].p50_us, found["queue"].p90_us) == (pytest.approx(45, rel=0.25), pytest.approx(45, rel=0.25))
    assert found["queue"].p99_us == pytest.approx(5000, rel=0.25)
    assert found["run"].count == 40, "those before do not count"
    assert found["run"].p99_us == pytest.approx(2000, rel=0.25)
    assert sum(found["queue"].octaves) == 100
    assert len(found["queue"].octaves) == OCTAVES
    assert found["queue"].octaves[7] == 90, "256 ns << 7 is 32.8 us"


def test_device_and_generation_are_of_the_interval_too():
    device = rates().device
    assert (device.busy, device.device_ms) == (0.2, 20.0), "30 * 15 ms - 10 * 5 ms, of 2 s and of 20 batches"
    assert (device.row_padding, device.graph_hits, device.to_device_bytes_per_s, device.memory_bytes) == (1.5, 0.75, 500, 3 << 30)
    generation = rates().generation
    assert (generation.per_s["tokens"], generation.per_s["prompt_tokens"], generation.running, generation.waste) == (100, 2000, 16, 0.03)
    assert rates(stats()).device is rates(stats()).generation is None


def test_another_owner_has_done_nothing_yet():
    found = rates(dataclasses.replace(NOW, owner_pid=1))
    assert set(found.per_s.values()) == {0}
    assert found.waits["queue"].count == 0
    assert (found.totals["submitted"], found.device.busy) == (2400, 0)


def test_options_that_somebody_has_scribbled_over_do_no_harm():
    for odd in ({}, {"max_batch_size": "many", "latency_budget_ms": []}, {"max_batch_size": -1, "latency_budget_ms": float("nan")}):
        found = rates(dataclasses.replace(NOW, options=odd))
        assert (found.max_batch_size, found.latency_budget_ms) == (0, 0)
        assert text_of(found)


# The screen.


@pytest.mark.parametrize(("width", "height"), [(80, 22), (120, 40), (76, 24), (75, 24), (40, 30), (12, 5), (1, 1), (200, 0)])
def test_the_screen_fits_whatever_room_there_is(width, height):
    history = {"submitted": [float(i) for i in range(500)], "completed": [1.0] * 3}
    shown = text_of(rates(), width, height, history)
    assert len(shown) <= height
    assert max(map(len, shown), default=0) <= width


def test_all_of_it_fits_80x24():
    shown = "\n".join(text_of(rates(), 80, 22))
    for part in (
        "embed serving", "submitted   600/s", "failed      5.0/s", "20/s, mean 30.2 of 32", "because full 75%, age 25%", "90.0% within 26 ms", "20.0% of tokens",
        "20% busy, 20 ms a batch", "75.0% of batches, 4 graphs", "3 GiB of 80 GiB", "100/s, prompts 2,000/s", "310 of 1,110 used",
        "27 of 256", "4006", "and 3 more with 6 slots",
    ):  # fmt: skip
        assert part in shown, part


def test_more_room_shows_more():
    shown = "\n".join(text_of(rates(), 120, 40))
    assert "more with" not in shown
    assert sum(line.split()[-2:-1] == ["7%"] for line in shown.splitlines()) == 15, "each batch size on a line of its own"


def test_what_is_remarkable_comes_first():
    assert "nothing begins until it is resumed" in text_of(rates(dataclasses.replace(NOW, paused=True)))[1]
    assert "last heard of" in text_of(rates(dataclasses.replace(NOW, alive=False, owner_alive=False)))[1]
    assert (
        text_of(rates(dataclasses.replace(NOW, alive=False, state="failed", note="its owner broke. Its last words:\nsecret")))[1] == "its owner broke"
    )
    assert "started again 2 times; last because it was killed" in text_of(rates(dataclasses.replace(NOW, restarts=2, note="it was killed")))[1]


# One look.


def test_one_look_in_plain_text_and_in_json(in_process, gate, capsys):
    worker = in_process(gate)
    worker.connect().submit(b"x")
    assert main(["top", worker.name, "--once", "--interval", "0.05"]) == 0
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert shown.startswith(f"{worker.name} serving  process ")
    assert len(shown.splitlines()) <= 24
    assert main(["top", worker.name, "--once", "--json", "--interval", "0.05"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["state"], found["totals"]["submitted"], found["per_s"]["submitted"]) == (worker.name, "serving", 1, 0)
    assert set(found["waits"]) == {"claim", "queue", "batch", "run", "wake"}


def test_what_cannot_be_is_a_clear_line(name, in_process, gate, capsys, monkeypatch):
    assert main(["top", name, "--once"]) == 1
    assert "no worker named" in capsys.readouterr().err
    worker = in_process(gate)
    assert main(["top", worker.name]) == 1
    assert "needs a terminal; use --once" in capsys.readouterr().err
    monkeypatch.setattr(top.importlib.util, "find_spec", lambda package: None)
    assert main(["top", worker.name]) == 1
    assert "pip install 'gpuworker[top]'" in capsys.readouterr().err
    assert main(["top", worker.name, "--once", "--interval", "0.01"]) == 0, "this needs nothing"
    with pytest.raises(SystemExit, match="2"):
        main(["top", worker.name, "--json"])


# The live view.


def live(name, script, size=(80, 24)):
    """Runs the app without a terminal, and `script(app, pilot)` in it."""
    from gpuworker.cli.live import Top

    async def play():
        app = Top(name, 0.05)
        async with app.run_test(size=size) as pilot:
            await script(app, pilot)
        return app

    return asyncio.run(play())


def shown_in(app):
    return "\n".join(str(widget.render()) for widget in app.screen.query("Static"))


async def until(pilot, condition):
    for _ in range(600):
        if condition():
            return
        await pilot.pause(0.05)
    raise AssertionError("it did not happen")


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_figures_move_and_the_window_may_change(in_process, gate, size):
    worker = in_process(gate)
    client = worker.connect()

    async def script(app, pilot):
        await until(pilot, lambda: "serving" in shown_in(app))
        for _ in range(5):
            client.submit(b"x")
        await until(pilot, lambda: app.rates.totals["completed"] == 5)
        await until(pilot, lambda: f"{5:>10}" in shown_in(app))
        for width, height in ((60, 20), (10, 3), (200, 50), (1, 1), size):
            await pilot.resize_terminal(width, height)
            await pilot.pause()
        await until(pilot, lambda: "batches" in shown_in(app))
        await pilot.press("q")

    assert live(worker.name, script, size).return_code == 0


def test_p_pauses_and_resumes(in_process, gate):
    worker = in_process(gate)

    async def script(app, pilot):
        await pilot.press("p")
        assert worker.stats().paused
        await until(pilot, lambda: "paused" in shown_in(app))
        await pilot.press("p")
        assert not worker.stats().paused
        await until(pilot, lambda: "serving" in shown_in(app) and "it goes on" in shown_in(app))

    live(worker.name, script)


def test_draining_and_reloading_ask_first(start):
    worker = start(handlers.identity)
    owner = worker.pid

    async def script(app, pilot):
        for key, question in (("d", "Drain worker"), ("r", "Reload worker")):
            await pilot.press(key)
            await until(pilot, lambda question=question: question in shown_in(app))
            await pilot.press("n")
            await until(pilot, lambda: "process" in shown_in(app))
        assert (worker.pid, worker.stats().reloads, worker.stats().state) == (owner, 0, "serving")
        await pilot.press("r", "y")
        await until(pilot, lambda: "has been reloaded" in shown_in(app))
        assert worker.pid != owner
        await until(pilot, lambda: f"process {worker.pid}" in shown_in(app))
        await pilot.press("d", "y")
        await until(pilot, lambda: "has stopped after" in shown_in(app))
        await until(pilot, lambda: "no worker named" in shown_in(app) and "waiting for it to come back" in shown_in(app))

    live(worker.name, script)


def test_a_worker_that_dies_and_one_that_takes_its_place(start):
    worker = start(handlers.identity)

    async def script(app, pilot):
        await until(pilot, lambda: "serving" in shown_in(app))
        kill_all(worker)
        await until(pilot, lambda: "dead" in shown_in(app) and "last heard of" in shown_in(app))
        await pilot.press("p")
        await until(pilot, lambda: "is not running" in shown_in(app))
        Segment.discard(worker.name)
        await until(pilot, lambda: "no worker named" in shown_in(app))
        again = await asyncio.to_thread(start, handlers.identity)
        await until(pilot, lambda: f"serving  process {again.pid}" in shown_in(app))

    live(worker.name, script)
