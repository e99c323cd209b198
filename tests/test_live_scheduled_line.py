"""What a scheduled line keeps from the plain one, and adds: priorities, fair shares, withdrawals, deaths, reloads, and a warm start."""

import logging
import os
import random
import re
import signal
import threading
import time

import pytest

import gpuworker
from gpuworker.scheduling.cost_model import CostModel
from gpuworker.worker.cost_file import CostFile
from tests import handlers
from tests.conftest import Gate, eventually, kill_owner, running
from tests.live_worker import LONG_MS, hold, known_costs, live_fixture, outcome, side_by_side  # noqa: F401

CALM = {"latency_budget_ms": LONG_MS, "cost_file": "off"}


# who goes first


def order(gate):
    """All requests in the order in which they ran, but for the one that was held."""
    return [request for batch in gate.batches[1:] for request in batch]


@pytest.mark.parametrize("budget_ms", [None, LONG_MS])
def test_higher_priorities_go_first_and_each_in_its_order(live, budget_ms):
    worker, gate = live(latency_budget_ms=budget_ms, priorities=True, max_batch_size=2)
    client = worker.connect()
    first = hold(client, gate)
    given = [0, 0, 5, 1, 255, 0, 5, 1]
    pending = [client.enqueue(f"{priority}-{i}", priority=priority) for i, priority in enumerate(given)]
    gate.open()
    assert [one.result(60) for one in (first, *pending)] == ["first", *(f"{priority}-{i}" for i, priority in enumerate(given))]
    assert order(gate) == ["255-4", "5-2", "5-6", "1-3", "1-7", "0-0", "0-1", "0-5"]


@pytest.mark.parametrize(("ageing_ms", "expected"), [(0, ["new high", "old low"]), (20, ["old low", "new high"])])
def test_a_low_priority_rises_as_it_waits(live, ageing_ms, expected):
    worker, gate = live(priorities=True, priority_ageing_ms=ageing_ms, max_batch_size=1)
    client = worker.connect()
    first = hold(client, gate)
    low = client.enqueue("old low")
    time.sleep(0.05)
    high = client.enqueue("new high", priority=1)
    gate.open()
    assert [one.result(60) for one in (first, low, high)] == ["first", "old low", "new high"]
    assert order(gate) == expected


@pytest.mark.parametrize("fair_share", [True, False])
def test_one_client_does_not_starve_another(live, fair_share):
    worker, gate = live(fair_share=fair_share, max_batch_size=4)
    greedy, modest = worker.connect(), worker.connect()
    first = hold(greedy, gate)
    pending = [greedy.enqueue(f"greedy {i}") for i in range(40)] + [modest.enqueue("modest")]
    gate.open()
    assert [one.result(60) for one in (first, *pending)] == ["first", *(f"greedy {i}" for i in range(40)), "modest"]
    assert order(gate).index("modest") < 4 if fair_share else order(gate)[-1] == "modest"


# withdrawals


def test_cancelled_requests_leave_the_scheduler(live):
    worker, _ = live(priorities=True, max_batch_size=8, capacity=256)
    scheduler = worker._session.owner.line._scheduler

    def cancels(seed):
        drawn, client = random.Random(seed), worker.connect()
        left = 125
        while left:
            sent = [client.enqueue(i, priority=drawn.randrange(3)) for i in range(min(left, drawn.randint(1, 20)))]
            left -= len(sent)
            drawn.shuffle(sent)
            for one in sent:
                one.cancel()
                if drawn.random() < 0.1:
                    time.sleep(0.0005)
        client.close()

    side_by_side(cancels, range(4))
    eventually(lambda: worker.stats().slots_in_use == 0)
    eventually(lambda: len(scheduler) == 0)
    client = worker.connect()
    assert [client.submit(i, timeout=30) for i in range(100)] == list(range(100))
    assert worker.stats().cancelled <= 500
    assert len(scheduler) == 0


def test_requests_that_wait_for_company_are_forgotten_when_they_are_withdrawn(live, tmp_path):
    costs = known_costs(tmp_path, 1, 64)
    worker, gate = live(wait="until_deadline", late="serve", priorities=True, length_buckets=(8, 16), max_batch_size=64, cost_file=costs)
    scheduler, client = worker._session.owner.line._scheduler, worker.connect(length=lambda request: 1 + request % 16)
    pending = [client.enqueue(i, priority=i % 3) for i in range(48)]
    eventually(lambda: len(scheduler) == 48)
    for one in pending:
        assert one.cancel()
    eventually(lambda: len(scheduler) == 0)
    assert gate.batches == []
    last = client.enqueue(1, latency_budget_ms=50)
    assert last.result(60) == 1
    assert gate.batches == [[1]]


# deaths, reloads, the end


def company(requests):
    """How many ran together; ends the owner if told to."""
    if "die" in requests:
        os.kill(os.getpid(), signal.SIGKILL)
    if "hold" in requests[0]:
        handlers.hold_while_file_exists([requests[0].removeprefix("hold ")])
    return [len(requests)] * len(requests)


def queued_behind(worker, client, held, requests):
    """-> Pendings: of a request that is held, and of those that wait for it."""
    first = client.enqueue(f"hold {held}")
    eventually(lambda: running(worker))
    return [first, *(client.enqueue(request) for request in requests)]


class Measures:
    """Requests of (index, what happens when its length is asked)."""

    def length(self, request):
        if request[1] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if request[1] == "exit":
            raise SystemExit("not a good idea")
        if request[1] == "hang":
            threading.Event().wait()
        return {"huge": 1 << 70, "float": 1.5}.get(request[1], 5)

    def run_batch(self, requests):
        return [index for index, _ in requests]


@pytest.mark.parametrize("harm", ["die", "hang"])
def test_a_request_whose_length_ends_owners_is_given_up_and_nobody_else(start, harm):
    options = {"run_timeout_s": 0.5} if harm == "hang" else {}
    worker = start(Measures, length_buckets=(10, 100), **options, **CALM)
    client = worker.connect()
    assert client.submit((0, "")) == 0
    culprit = client.enqueue((1, harm))
    others = [client.enqueue((i, "")) for i in range(2, 7)]
    assert [one.result(60) for one in others] == [2, 3, 4, 5, 6]
    with pytest.raises(gpuworker.WorkerDied):
        culprit.result(60)
    assert worker.stats().restarts == 2
    assert client.submit((7, "")) == 7
    eventually(lambda: worker.stats().slots_in_use == 0)


@pytest.mark.parametrize(("harm", "error"), [("exit", gpuworker.RemoteError), ("huge", gpuworker.RequestTooLong), ("float", TypeError)])
def test_a_length_that_is_none_is_that_callers_error(start, harm, error):
    worker = start(Measures, length_buckets=(10, 100), **CALM)
    client = worker.connect()
    with pytest.raises((error, SystemExit)):
        client.submit((1, harm))
    assert client.submit((2, "")) == 2
    assert worker.stats().restarts == 0


def test_a_client_follows_a_worker_that_comes_back_with_other_options(name):
    def echo(requests):
        return requests

    with gpuworker.Worker(echo, name=name, in_process=True, length_buckets=(20,)):
        client = gpuworker.connect(name, length=len)
        assert client.submit("x") == "x"
    with gpuworker.Worker(
        echo, name=name, in_process=True, latency_budget_ms=60_000, priorities=True, max_wait_ms=0, length_buckets=(9000,), cost_file="off"
    ):
        assert client.submit("x", latency_budget_ms=30_000) == "x"
        assert client.submit("x" * 100, priority=3) == "x" * 100
    with gpuworker.Worker(echo, name=name, in_process=True):
        with pytest.raises(ValueError, match="has no latency budget"):
            client.submit("x", latency_budget_ms=30_000)
        assert client.enqueue("x" * 100_000).result() == "x" * 100_000


def test_a_suspect_runs_alone(start, held):
    worker = start(company, max_batch_size=8, length_buckets=(100,), **CALM)
    client = worker.connect(length=len)
    pending = queued_behind(worker, client, held, ["a", "die", "b", "c"])
    held.unlink()
    found = [outcome(one) for one in pending]
    assert found[0] == 1
    assert isinstance(found[2], gpuworker.WorkerDied)
    assert [found[1], found[3], found[4]] == [1, 1, 1], "each of those that a death may be due to"
    assert worker.stats().restarts == 2
    assert client.submit("after") == 1


@pytest.mark.parametrize("budget_ms", [LONG_MS, 400])
def test_when_the_owner_is_killed_nothing_is_lost(start, held, budget_ms):
    worker = start(handlers.hold_while_file_exists, latency_budget_ms=budget_ms, cost_file="off", max_batch_size=2)
    client = worker.connect()
    pending = [client.enqueue(str(held)) for _ in range(10)]
    eventually(lambda: running(worker))
    kill_owner(worker)
    held.unlink()
    found = [outcome(one) for one in pending]
    answered = found.count(str(held))
    assert answered + sum(isinstance(one, gpuworker.BudgetExceeded) for one in found) == 10
    if budget_ms == LONG_MS:
        assert answered == 10
    eventually(lambda: worker.stats().slots_in_use == 0)
    stats = worker.stats()
    assert (stats.restarts, stats.on_time + stats.late, stats.rejected_late) == (1, answered, 10 - answered)
    assert client.submit("after", latency_budget_ms=LONG_MS) == "after"


def test_a_reload_leaves_the_queue_to_the_next_owner(start, held, tmp_path):
    worker = start(handlers.Loads(tmp_path), max_batch_size=2, priorities=True, **CALM)
    client, first = worker.connect(), worker.pid
    pending = [client.enqueue(["hold", str(held)]), *(client.enqueue(["pid"], priority=i % 3) for i in range(10))]
    eventually(lambda: running(worker))
    os.kill(worker.supervisor_pid, signal.SIGUSR1)
    eventually(lambda: len(list(tmp_path.glob("done-*"))) == 2)
    held.unlink()
    answers = [one.result(60) for one in pending]
    eventually(lambda: worker.stats().reloads == 1)
    assert worker.pid != first
    assert answers[0] == "held"
    assert set(answers[1:]) <= {first, worker.pid}
    assert client.submit(["pid"]) == worker.pid
    assert worker.stats().options["latency_budget_ms"] == LONG_MS


def test_draining_answers_what_is_queued(start, held):
    worker = start(company, max_batch_size=8, drain_timeout_s=60, wait="until_deadline", max_wait_ms=LONG_MS, **CALM)
    client = worker.connect()
    pending = [client.enqueue(f"hold {held}"), *(client.enqueue(f"{i}") for i in range(3))]
    eventually(lambda: worker.stats().slots_in_use == 4)
    os.kill(worker.supervisor_pid, signal.SIGTERM)
    eventually(lambda: worker.stats().state == "draining")
    held.unlink()
    assert all(one.result(30) >= 1 for one in pending), "and none waits for company that cannot come"
    eventually(lambda: worker.pid is None)


def test_what_does_not_fit_into_draining_is_told_so(start, held):
    worker = start(company, max_batch_size=1, drain_timeout_s=0.2, **CALM)
    client = worker.connect()
    pending = queued_behind(worker, client, held, ["a", "b"])
    os.kill(worker.supervisor_pid, signal.SIGTERM)
    eventually(lambda: worker.stats().state == "draining")
    time.sleep(0.3)
    held.unlink()
    found = [outcome(one) for one in pending]
    assert all(isinstance(one, (int, gpuworker.WorkerDraining)) for one in found)
    assert isinstance(found[-1], gpuworker.WorkerDraining)


# what is learned is kept


def test_the_next_start_is_warm(live, tmp_path):
    file = tmp_path / "folder" / "costs.json"
    for life in range(2):
        worker, _ = live(cost_file=str(file), length_buckets=None)
        client = worker.connect()
        client.submit("x")
        client.submit("x")
        eventually(lambda worker=worker: worker.stats().batches == 2)
        assert worker.stats().predicted_batches == (2 if life else 0), "nothing is known before something has run twice"
        worker.stop()
        assert file.exists()
    assert os.stat(file).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("contents", [b"", b'{"format": 1}', b'{"format":cut', "other boundaries"], ids=str)
def test_a_corrupt_file_is_one_line_in_the_log(live, tmp_path, caplog, contents):
    caplog.set_level(logging.WARNING, "gpuworker")
    file = tmp_path / "costs.json"
    if contents == "other boundaries":
        CostFile(str(file), "tests.conftest:Gate").save({"model": CostModel(32).to_dict(), "boundaries": "many"})
    else:
        file.write_bytes(contents)
    worker, _ = live(cost_file=str(file))
    assert [worker.connect().submit("x") for _ in range(3)] == ["x"] * 3
    worker.stop()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "run times" in caplog.text
    caplog.clear()
    worker, _ = live(cost_file=str(file))
    assert worker.connect().submit("x") == "x"
    assert caplog.text == "", "and the next start has a good one"


def test_learned_boundaries_are_there_at_the_next_start(live, tmp_path):
    class Ruled(Gate):
        length = staticmethod(len)

    file = tmp_path / "costs.json"
    model = CostModel(32)
    model.seed(1, 8, [1_000_000] * 3)
    CostFile(str(file), f"{Ruled.__module__}:{Ruled.__qualname__}").save({"model": model.to_dict(), "boundaries": [4, 8]})
    worker, gate = live(Ruled(), cost_file=str(file), length_buckets="learn")
    client = worker.connect()
    first = hold(client, gate)
    pending = [client.enqueue("x" * n) for n in (3, 7, 4, 8)]
    gate.open()
    assert [len(one.result(60)) for one in (first, *pending)] == [5, 3, 7, 4, 8]
    assert sorted(gate.batches[1:], key=str) == [["x" * 3, "x" * 4], ["x" * 7, "x" * 8]]


# options


WRONG = [
    ({"latency_budget_ms": 0}, "latency_budget_ms=0: give at least 0.001"),
    ({"latency_budget_ms": "5"}, "latency_budget_ms='5': give a number"),
    ({"latency_budget_ms": float("nan")}, "latency_budget_ms=nan: give a number"),
    ({"late": "never"}, "late='never': choose one of 'reject', 'serve'"),
    ({"wait": "long"}, "wait='long': choose one of 'auto', 'until_deadline'"),
    ({"admission": "yes"}, "admission='yes': choose one of"),
    ({"target_miss_rate": 1}, "target_miss_rate=1: give a number between 0 and 1"),
    ({"length_buckets": (512, 128)}, "length_buckets=(512, 128): give 1 to 16 integers in ascending order"),
    ({"length_buckets": "128,128"}, "length_buckets='128,128': give 1 to 16 integers in ascending order"),
    ({"length_buckets": "teach"}, 'or "learn"'),
    ({"length_buckets": (1.5,)}, "length_buckets=(1.5,): give"),
    ({"length_buckets": tuple(range(1, 18))}, "give 1 to 16 integers"),
    ({"length_buckets": ()}, "length_buckets=(): give"),
    ({"length_buckets": (128,), "max_length": 129}, "max_length=129: it is more than the last of length_buckets, 128"),
    ({"max_length_buckets": 0}, "max_length_buckets=0: give an integer from 1 to 16"),
    ({"max_length": 0}, "max_length=0: give an integer from 1"),
    ({"max_batch_tokens": 0}, "max_batch_tokens=0: give an integer from 1"),
    ({"allowed_batch_sizes": (4, 2)}, "allowed_batch_sizes=(4, 2): give"),
    ({"allowed_batch_sizes": "learn"}, "allowed_batch_sizes='learn': give"),
    ({"priorities": True, "priority_ageing_ms": -1}, "priority_ageing_ms=-1: give a number from 0"),
    ({"priority_ageing_ms": 5}, "there are no priorities; set priorities=True"),
    ({"late": "serve"}, "late='serve': it says what happens under a latency_budget_ms, and there is none"),
    ({"length_buckets": (128, 4096), "max_batch_tokens": 1024}, "max_batch_tokens=1024: one request padded to the last of length_buckets, 4096"),
    ({"allowed_batch_sizes": (1, 64), "max_batch_size": 48}, "max_batch_size=48: it is not the last of allowed_batch_sizes, 64"),
    ({"fair_share": 1}, "fair_share=1: give True or False"),
    ({"cost_file": ""}, "cost_file='': give a path"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(options) for options, _ in WRONG])
def test_a_wrong_option_is_explained(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        gpuworker.WorkerOptions(**options)


def test_options_that_are_lists_may_be_text_as_on_the_command_line():
    options = gpuworker.WorkerOptions(length_buckets="128,256", allowed_batch_sizes="1,4,8", max_batch_size=32)
    assert (options.length_buckets, options.allowed_batch_sizes, options.max_batch_size, options.longest) == ((128, 256), (1, 4, 8), 8, 256)
    assert gpuworker.WorkerOptions(allowed_batch_sizes=[1, 64]).max_batch_size == 64
    assert gpuworker.WorkerOptions(length_buckets="learn").longest == 0
    assert gpuworker.WorkerOptions(length_buckets=[128, 256], max_length=200).longest == 200
    assert gpuworker.WorkerOptions().is_plain
    assert not gpuworker.WorkerOptions(latency_budget_ms=5).is_plain
