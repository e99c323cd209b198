"""What the owner does with handlers that behave and handlers that do not."""

import logging
import math
import threading

import numpy as np
import pytest

import gpuworker
from gpuworker.worker.batch import outcomes_of, run
from tests.conftest import Gate


def results_of(pending):
    """Each one's result, or the exception it raised."""
    results = []
    for one in pending:
        try:
            results.append(one.result())
        except Exception as error:
            results.append(error)
    return results


def batch_of(in_process, handler, requests, **options):
    """Runs `requests` as exactly one batch, behind a first one that is held until all are queued."""
    gate = Gate(is_open=False)
    first = [True]

    def run_batch(batch):
        if first[0]:
            first[0] = False
            return gate.run_batch(batch)
        return handler(batch)

    worker = in_process(run_batch, **options)
    client = worker.connect()
    held = client.enqueue("held")
    gate.wait_entered()
    pending = [client.enqueue(request) for request in requests]
    gate.open()
    held.result()
    return results_of(pending), worker


def test_one_poison_item_fails_alone(in_process):
    calls = []

    def run_batch(requests):
        calls.append(list(requests))
        if 3 in requests:
            raise ValueError("three is poison")
        return [r * 10 for r in requests]

    results, worker = batch_of(in_process, run_batch, range(8))
    assert [r for i, r in enumerate(results) if i != 3] == [i * 10 for i in range(8) if i != 3]
    assert type(results[3]) is ValueError
    assert results[3].args == ("three is poison",)
    assert isinstance(results[3].__cause__, gpuworker.RemoteError)
    assert "in run_batch" in results[3].__cause__.traceback
    assert len(calls) <= 1 + 2 * math.log2(8)
    stats = worker.stats()
    assert (stats.failed, stats.completed) == (1, 8)


def test_without_isolation_a_failing_batch_fails_whole(in_process):
    def run_batch(requests):
        raise KeyError("all of you")

    results, _ = batch_of(in_process, run_batch, range(4), isolate_errors=False)
    assert [type(r) for r in results] == [KeyError] * 4


@pytest.mark.parametrize("count", [1, 2, 3, 8, 31, 64])
@pytest.mark.parametrize("poison", [[], [0], [-1], [0, -1], "all"])
def test_isolation_is_exact_and_bounded(count, poison):
    bad = set(range(count)) if poison == "all" else {range(count)[i] for i in poison}
    calls = []

    def run_batch(requests):
        calls.append(len(requests))
        if bad & set(requests):
            raise RuntimeError(str(min(bad & set(requests))))
        return [r + 1 for r in requests]

    outcomes = run(run_batch, list(range(count)), True, lambda error, n: None)
    assert len(outcomes) == count
    assert len(calls) <= 1 + 4 * math.ceil(math.log2(count)) if count > 1 else len(calls) == 1
    for i, outcome in enumerate(outcomes):
        if i in bad:
            assert isinstance(outcome, RuntimeError)
        elif poison != "all":
            assert outcome == i + 1
    if len(bad) == 1:
        assert len(calls) <= 1 + 2 * math.ceil(math.log2(max(count, 2)))


def test_a_handler_may_return_one_exception_per_item(in_process):
    results, _ = batch_of(in_process, lambda rs: [r if r % 2 else LookupError(f"{r} is even") for r in rs], range(4))
    assert [str(r) if isinstance(r, Exception) else r for r in results] == ["0 is even", 1, "2 is even", 3]
    assert type(results[0]) is LookupError


class CustomError(Exception):
    pass


def test_an_exception_of_the_handlers_own_comes_back_as_remote_error(in_process):
    def run_batch(requests):
        raise CustomError("mine")

    (result,), _ = batch_of(in_process, run_batch, [1])
    assert type(result) is gpuworker.RemoteError
    assert result.type.endswith("CustomError")
    assert result.message == "mine"
    assert "raise CustomError" in str(result)


@pytest.mark.parametrize(
    ("returned", "got"),
    [([1, 2, 3], 3), ([1, 2, 3, 4, 5], 5), ([], 0), (None, None), ({"a": 1}, None), ("four", None), (7, None), (np.zeros(()), None)],
)
def test_a_wrong_number_of_results_fails_all_at_once_and_the_owner_goes_on(in_process, returned, got):
    answers = [returned, None]

    def run_batch(requests):
        return answers.pop(0) if len(answers) > 1 else requests

    results, worker = batch_of(in_process, run_batch, range(4))
    assert [type(r) for r in results] == [gpuworker.BatchSizeMismatch] * 4
    assert (results[0].expected, results[0].got) == (4, got)
    assert worker.connect().submit("next") == "next"


@pytest.mark.parametrize("returned", [(1, 2), iter([1, 2]), np.array([1, 2]), range(1, 3)])
def test_results_may_come_as_any_sequence_or_iterator(returned):
    assert list(outcomes_of(returned, 2)) == [1, 2]


def test_rows_of_an_array_are_results(in_process):
    results, _ = batch_of(in_process, lambda rs: np.arange(len(rs) * 3, dtype="f4").reshape(-1, 3), range(4))
    np.testing.assert_array_equal(results[2], np.array([6, 7, 8], "f4"))


def test_a_result_that_cannot_cross_is_that_items_error(in_process):
    results, _ = batch_of(in_process, lambda rs: [object() if r == 1 else r for r in rs], range(3))
    assert results[0] == 0
    assert results[2] == 2
    assert type(results[1]) is gpuworker.UnsupportedPayload


def test_memory_error_in_a_batch_leaves_the_owner_alive(in_process):
    def run_batch(requests):
        raise MemoryError("CUDA out of memory")

    results, worker = batch_of(in_process, run_batch, [1])
    assert type(results[0]) is MemoryError
    assert worker.stats().state == "serving"


def test_a_failure_is_logged_once_with_its_requests(in_process, caplog):
    def run_batch(requests):
        raise ValueError("bad weights")

    with caplog.at_level(logging.ERROR, "gpuworker"):
        batch_of(in_process, run_batch, range(4))
    failures = [record for record in caplog.records if "failed on a batch of" in record.message]
    assert len(failures) == 1
    assert "slot.generation" in failures[0].message
    assert failures[0].exc_info[1].args == ("bad weights",)


def test_requests_are_read_only_so_that_a_rerun_finds_them_as_they_were(in_process):
    def run_batch(requests):
        requests[0][0] = 5
        return requests

    results, _ = batch_of(in_process, run_batch, [np.zeros(3)])
    assert type(results[0]) is ValueError


def test_many_wait_and_leave_as_one_batch_when_the_device_is_free(in_process):
    gate = Gate(is_open=False)
    client = in_process(gate.run_batch, max_batch_size=8).connect()
    pending = [client.enqueue("first")]
    gate.wait_entered()
    pending += [client.enqueue(i) for i in range(4)]
    gate.open()
    for one in pending:
        one.result()
    assert [len(batch) for batch in gate.batches] == [1, 4]


def test_waiting_requests_fill_a_batch_to_its_size_and_no_further(in_process):
    gate = Gate()
    client = in_process(gate.run_batch, max_batch_size=4, max_wait_ms=60_000).connect()
    pending = [client.enqueue(i) for i in range(8)]
    assert [one.result() for one in pending] == list(range(8))
    assert [len(batch) for batch in gate.batches] == [4, 4]


def test_a_lone_request_leaves_by_age(in_process):
    worker = in_process(lambda requests: requests, max_batch_size=4, max_wait_ms=30)
    assert worker.connect().submit("x") == "x"
    stats = worker.stats()
    assert stats.dispatch_reasons["age"] == 1
    assert stats.queue_wait.mean_us + stats.batch_wait.mean_us >= 29_000


def test_draining_finishes_what_is_there_and_takes_nothing_new(in_process):
    gate = Gate(is_open=False)
    worker = in_process(gate.run_batch, max_batch_size=1)
    client = worker.connect()
    pending = [client.enqueue(i) for i in range(3)]
    gate.wait_entered()
    worker._session.owner.stop()
    with pytest.raises(gpuworker.WorkerDraining):
        client.submit("new")
    gate.open()
    assert [one.result() for one in pending] == [0, 1, 2]


def test_what_is_left_after_the_drain_timeout_is_refused(in_process):
    gate = Gate(is_open=False)
    worker = in_process(gate.run_batch, max_batch_size=1, drain_timeout_s=0)
    client = worker.connect()
    pending = [client.enqueue(i) for i in range(3)]
    gate.wait_entered()
    worker._session.owner.stop()
    gate.open()
    assert pending[0].result() == 0
    for left in pending[1:]:
        with pytest.raises(gpuworker.WorkerDraining):
            left.result()


def test_a_handler_that_leaves_ends_its_owner_with_its_callers_told(name):
    def run_batch(requests):
        raise SystemExit(3)

    worker = gpuworker.Worker(run_batch, name=name, in_process=True).start()
    with pytest.raises(gpuworker.RemoteError, match="SystemExit"):
        worker.connect().submit("x")
    worker.stop()


@pytest.mark.parametrize("shuffle", [lambda rs: rs[::-1], lambda rs: [rs[0]] * len(rs)])
def test_results_that_are_other_requests_arrays_arrive_whole(in_process, shuffle):
    """A response may be a view of another request's slot: that slot is not given back, and so not filled again, before all responses are written."""
    worker = in_process(shuffle, max_batch_size=8, capacity=16)

    def check(number):
        client = worker.connect()
        for i in range(300):
            answer = client.submit(np.full(2048, number * 1000 + i, "i4"))
            assert (answer == answer[0]).all()

    threads = [threading.Thread(target=check, args=(n,)) for n in range(6)]
    failures = []
    threading.excepthook, before = (lambda args: failures.append(args.exc_value)), threading.excepthook
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = before
    assert failures == []


def consume(requests):
    return [requests.pop(0) * 2 for _ in range(len(requests))]


def pad(requests):
    requests.extend([0] * (8 - len(requests)))
    return [r * 2 for r in requests][:4]


def clear(requests):
    results = [r * 2 for r in requests]
    requests.clear()
    return results


@pytest.mark.parametrize("handler", [consume, pad, clear])
def test_a_handler_may_do_what_it_likes_with_its_list(in_process, handler):
    results, worker = batch_of(in_process, handler, range(4))
    assert results == [0, 2, 4, 6]
    assert worker.stats().slots_in_use == 0


class Nasty(Exception):
    def __str__(self):
        raise KeyboardInterrupt


class Pretender:
    __class__ = bytes  # what a mock or a proxy does


ODD = {
    "str raises": lambda: Nasty("x"),
    "class lies": Pretender,
    "arguments that do not cross": lambda: ValueError(memoryview(b"x")),
    "too long for its slot": lambda: Exception("\N{SNOWMAN}" * 3000),
    "a raised GeneratorExit": GeneratorExit,
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_outcomes_are_their_callers_errors_and_not_the_owners_end(in_process, odd):
    def run_batch(requests):
        outcomes = [ODD[odd]() if r == "odd" else r for r in requests]
        if isinstance(outcomes[0], GeneratorExit):
            raise outcomes[0]
        return outcomes

    worker = in_process(run_batch, max_response_bytes=512)
    client = worker.connect()
    with pytest.raises(Exception):  # noqa: B017, PT011 (any: what matters is that it comes, and what follows)
        client.submit("odd", timeout=30)
    assert client.submit("even") == "even"
    assert worker.stats().slots_in_use == 0
