"""`gpuworker health`: what a probe is told."""

import pytest

from gpuworker import Stats
from gpuworker.cli import main
from tests.conftest import eventually, kill_served

pytest_plugins = ("tests.served_app",)


def test_a_worker_that_serves_is_well_and_one_that_is_not_there_is_not(in_process, gate, name, capsys):
    worker = in_process(gate)
    assert main(["health", worker.name]) == 0
    assert capsys.readouterr().out == f"worker {worker.name!r} is serving\n"
    assert main(["health", name]) == 1
    assert "no worker named" in capsys.readouterr().err


def test_a_batch_that_takes_too_long(in_process, gate, capsys):
    worker = in_process(gate)
    gate.shut()
    pending = worker.connect().enqueue(1)
    gate.wait_entered()
    assert main(["health", worker.name, "--long-batch-s", "1000"]) == 0
    eventually(lambda: main(["health", worker.name, "--long-batch-s", "0.01"]) == 1)
    assert "is stuck: its batch has run for" in capsys.readouterr().err
    gate.open()
    assert pending.result() == 1


@pytest.mark.parametrize(
    ("condition", "is_ready", "is_live"),
    [
        ("starting", False, True), ("serving", True, True), ("paused", False, True), ("restarting", False, True), ("draining", False, True),
        ("silent", False, False), ("stopped", False, False), ("dead", False, False), ("failed", False, False),
    ],
)  # fmt: skip
def test_what_each_condition_means(in_process, gate, monkeypatch, condition, is_ready, is_live):
    worker = in_process(gate)
    monkeypatch.setattr(Stats, "condition", lambda stats: condition)
    assert main(["health", worker.name]) == int(not is_ready)
    assert main(["health", worker.name, "--live"]) == int(not is_live)


def test_a_dead_worker(serve, name, capsys):
    kill_served(serve(), name)
    assert main(["health", name, "--live"]) == 1
    assert f"worker {name!r} is dead" in capsys.readouterr().err
