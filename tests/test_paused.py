"""A worker that somebody has paused: nothing begins, deadlines go on, and everything is there when it goes on."""

import pytest

import gpuworker
from gpuworker.cli import main
from gpuworker.cli.pausing import set_paused
from gpuworker.frontends import health
from gpuworker.segment.stats import Stats
from tests import handlers, tiny_llama
from tests.conftest import eventually, kill_all, kill_owner


def test_what_has_begun_is_finished_and_nothing_else_begins(in_process, gate):
    gate.shut()
    worker = in_process(gate, max_batch_size=1)
    client = worker.connect()
    first = client.enqueue("begun")
    gate.wait_entered()
    assert set_paused(worker.name, True) is False
    second, late = client.enqueue("queued"), client.enqueue("in vain", 0.2)
    gate.open()
    assert first.result() == "begun"
    with pytest.raises(gpuworker.DeadlineExceeded) as expired:
        late.result()
    assert expired.value.stage == "queued"
    assert gate.batches == [["begun"]]
    assert set_paused(worker.name, False) is True
    assert second.result() == "queued"
    assert gate.batches == [["begun"], ["queued"]], "what expired meanwhile does not run"


def test_a_queue_with_a_latency_budget_is_held_too(in_process, gate):
    worker = in_process(gate, latency_budget_ms=60_000)
    client = worker.connect()
    set_paused(worker.name, True)
    with pytest.raises(gpuworker.DeadlineExceeded):
        client.submit("in vain", timeout=0.2)
    assert gate.batches == []
    set_paused(worker.name, False)
    assert client.submit("now") == "now"


def test_draining_is_not_held_up(in_process, gate):
    worker = in_process(gate)
    client = worker.connect()
    set_paused(worker.name, True)
    pending = client.enqueue("queued")
    worker.stop()
    assert pending.result() == "queued"


def test_an_owner_that_is_started_again_stays_paused_and_a_new_start_is_not(start):
    worker = start(handlers.identity)
    client = worker.connect()
    assert client.submit(1) == 1
    set_paused(worker.name, True)
    killed = kill_owner(worker)
    eventually(lambda: worker.pid not in (None, killed) and worker.stats().state == "serving")
    assert worker.stats().paused
    assert main(["reload", worker.name]) == 0
    assert worker.stats().paused
    with pytest.raises(gpuworker.DeadlineExceeded):
        client.submit(2, timeout=0.2)
    kill_all(worker)
    again = start(handlers.identity)
    assert not again.stats().paused
    assert client.submit(3) == 3


def test_no_step_of_generation_begins(tmp_path, in_process):
    from gpuworker.generation.handler import GenerationHandler

    worker = in_process(GenerationHandler(tiny_llama.save(tmp_path), dtype="float32"), max_batch_size=4)
    client = worker.connect()
    ids = list(range(10, 20))
    whole = client.generate(ids, max_tokens=5, ignore_eos=True).tokens
    set_paused(worker.name, True)
    with pytest.raises(gpuworker.DeadlineExceeded):
        client.generate(ids, max_tokens=5, ignore_eos=True, timeout=0.2)
    set_paused(worker.name, False)
    assert client.generate(ids, max_tokens=5, ignore_eos=True).tokens == whole


def test_the_commands_say_what_they_did(in_process, gate, capsys):
    name = in_process(gate).name
    for command, said in (
        ("pause", "is paused; what has begun"),
        ("pause", "was paused already"),
        ("resume", "goes on"),
        ("resume", "was not paused"),
    ):
        assert main([command, name]) == 0
        assert said in capsys.readouterr().out
    main(["pause", name])
    stats = Stats.of(name)
    assert stats.paused
    assert health.judge(stats, 5, 30) == "paused"
    capsys.readouterr()
    main(["list"])
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith(name)] == ["paused"]


def test_there_must_be_something_to_pause(start, capsys):
    worker = start(handlers.identity)
    name = worker.name
    assert main(["pause", name + "x"]) == 1
    assert f"did you mean {name!r}?" in capsys.readouterr().err
    kill_all(worker)
    assert main(["pause", name]) == 1
    assert "is not running: its process has died" in capsys.readouterr().err
