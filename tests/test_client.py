"""Client against an owner in a thread: the same ring and loop, with the test's hand on the handler."""

import gc
import threading

import numpy as np
import pytest

import gpuworker
from tests.conftest import eventually


def test_submit_answers(in_process, gate):
    client = in_process(gate.run_batch).connect()
    for request in (b"bytes", "text", 7, None, {"a": [1, (2, 3)]}):
        assert client.submit(request) == request
    array = np.arange(12, dtype=">f8").reshape(3, 4)[:, ::2]
    answer = client.submit(array)
    assert answer.dtype == array.dtype
    np.testing.assert_array_equal(answer, array)


def test_threads_of_one_client_get_their_own_answers(in_process):
    client = in_process(lambda requests: [request * 2 for request in requests]).connect()
    wrong = []

    def caller(start):
        wrong.extend(i for i in range(start, start + 300) if client.submit(i) != i * 2)

    threads = [threading.Thread(target=caller, args=(i * 1000,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_map_keeps_the_order_and_runs_ahead(in_process, gate):
    worker = in_process(gate.run_batch, capacity=16, max_batch_size=4)
    client = worker.connect()
    assert list(client.map(range(500))) == list(range(500))
    assert worker.stats().mean_batch_size > 1.5


def test_map_lives_with_a_ring_smaller_than_its_window(in_process, gate):
    client = in_process(gate.run_batch, capacity=2, max_batch_size=32).connect()
    assert list(client.map(range(100))) == list(range(100))


def test_map_withdraws_the_rest_at_the_first_error(in_process):
    def fails_on_three(requests):
        return [ValueError("three") if request == 3 else request for request in requests]

    worker = in_process(fails_on_three, max_batch_size=1)
    client, seen = worker.connect(), []
    with pytest.raises(ValueError, match="three"):
        for answer in client.map(range(50)):
            seen.append(answer)
    assert seen == [0, 1, 2]
    eventually(lambda: worker.stats().slots_in_use == 0)


def test_pending(in_process, gate):
    gate.shut()
    client = in_process(gate.run_batch).connect()
    pending = client.enqueue("x")
    gate.wait_entered()
    assert not pending.done()
    gate.open()
    assert pending.result() == "x"
    assert pending.done()
    assert pending.result() == "x", "an answer can be read again"
    assert not pending.cancel(), "too late"


def test_cancelled_requests_never_run(in_process, gate):
    gate.shut()
    worker = in_process(gate.run_batch)
    client = worker.connect()
    running = client.enqueue("running")
    gate.wait_entered()
    queued = [client.enqueue(i) for i in range(5)]
    assert [queued[i].cancel() for i in (0, 2, 4)] == [True] * 3
    gate.open()
    assert running.result() == "running"
    assert [queued[i].result() for i in (1, 3)] == [1, 3]
    assert gate.batches == [["running"], [1, 3]]
    with pytest.raises(gpuworker.RequestCancelled):
        queued[0].result()
    assert worker.stats().cancelled == 3
    assert worker.stats().slots_in_use == 0


def test_cancel_wakes_a_thread_that_waits_for_the_answer(in_process, gate):
    gate.shut()
    client = in_process(gate.run_batch).connect()
    pending = client.enqueue("x")
    gate.wait_entered()
    failed = []

    def wait():
        with pytest.raises(gpuworker.RequestCancelled):
            pending.result()
        failed.append(True)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert pending.cancel()
    waiter.join(30)
    assert failed == [True]


def test_a_running_request_that_is_cancelled_gives_its_slot_back_at_its_end(in_process, gate):
    gate.shut()
    worker = in_process(gate.run_batch)
    pending = worker.connect().enqueue("x")
    gate.wait_entered()
    assert pending.cancel()
    assert worker.stats().slots_in_use == 1
    gate.open()
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert worker.stats().abandoned == 1


def test_a_dropped_pending_withdraws_its_request(in_process, gate):
    gate.shut()
    worker = in_process(gate.run_batch)
    client = worker.connect()
    running = client.enqueue("running")
    gate.wait_entered()
    client.enqueue("dropped")
    gate.open()
    running.result()
    client.submit("after")
    assert ["dropped"] not in gate.batches


def test_a_timeout_answers_while_another_batch_runs(in_process, gate):
    gate.shut()
    worker = in_process(gate.run_batch)
    client = worker.connect()
    running = client.enqueue("running")
    gate.wait_entered()
    with pytest.raises(gpuworker.DeadlineExceeded) as caught:
        client.submit("late", timeout=0.05)
    assert caught.value.stage == "queued"
    assert isinstance(caught.value, TimeoutError)
    assert worker.stats().slots_in_use == 1, "only the running one"
    gate.open()
    running.result()
    assert gate.batches == [["running"]]
    assert worker.stats().expired == 1


def test_a_timeout_of_result_withdraws_the_request(in_process, gate):
    gate.shut()
    worker = in_process(gate.run_batch)
    client = worker.connect()
    running = client.enqueue("running")
    gate.wait_entered()
    with pytest.raises(gpuworker.DeadlineExceeded):
        client.enqueue("late").result(timeout=0.02)
    with pytest.raises(gpuworker.DeadlineExceeded) as caught:
        running.result(timeout=0.02)
    assert caught.value.stage == "running"
    gate.open()
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert gate.batches == [["running"]]


def test_deadlines_nobody_waits_for_are_answered_by_the_owner_during_a_run(in_process, gate):
    gate.shut()
    worker = in_process(gate.run_batch)
    client = worker.connect()
    running = client.enqueue("running")
    gate.wait_entered()
    late = client.enqueue("late", timeout=0.01)
    eventually(late.done)
    with pytest.raises(gpuworker.DeadlineExceeded):
        late.result()
    gate.open()
    running.result()
    assert gate.batches == [["running"]]


def test_timeout_zero_is_zero_and_nonsense_is_refused(in_process, gate):
    client = in_process(gate.run_batch).connect()
    with pytest.raises(gpuworker.DeadlineExceeded):
        client.submit("x", timeout=0)
    for nonsense in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            client.submit("x", timeout=nonsense)
    assert client.submit("x", timeout=float("inf")) == "x"


def test_late_answers_never_reach_the_next_user_of_a_slot(in_process, gate):
    gate.shut()
    worker = in_process(gate.run_batch, capacity=1)
    client = worker.connect()
    with pytest.raises(gpuworker.DeadlineExceeded):
        client.submit("first", timeout=0.05)
    gate.open()
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert client.submit("second") == "second"


def test_connect_is_lazy_and_waits_for_a_worker_that_is_starting(name, gate):
    client = gpuworker.connect(name, connect_timeout_s=60)
    answers = []
    caller = threading.Thread(target=lambda: answers.append(client.submit("early")))
    caller.start()
    with gpuworker.Worker(gate.run_batch, name=name, in_process=True):
        caller.join(60)
        assert answers == ["early"]


def test_no_worker(name):
    with pytest.raises(gpuworker.WorkerNotFound, match=name):
        gpuworker.connect(name, connect_timeout_s=0.05).submit("x")
    with pytest.raises(gpuworker.DeadlineExceeded) as caught:
        gpuworker.connect(name).submit("x", timeout=0.05)
    assert caught.value.stage == "connecting"


def test_mistakes_at_connect():
    with pytest.raises(ValueError, match="worker name"):
        gpuworker.connect("no/slash")
    with pytest.raises(ValueError, match="wake='sleepy'"):
        gpuworker.connect("x", wake="sleepy")
    with pytest.raises(ValueError, match="fallback"):
        gpuworker.connect("x", on_full="fallback")
    with pytest.raises(ValueError, match="on_full='drop'"):
        gpuworker.connect("x", on_full="drop")


def test_a_client_survives_a_restart_of_its_worker(name, gate):
    client = gpuworker.connect(name)
    for capacity in (8, 8, 16):
        with gpuworker.Worker(gate.run_batch, name=name, in_process=True, capacity=capacity):
            assert client.submit("x") == "x"


def test_a_closed_client_says_so(in_process, gate):
    worker = in_process(gate.run_batch)
    with worker.connect() as client:
        client.submit("x")
    with pytest.raises(RuntimeError, match="closed"):
        client.submit("x")
    eventually(lambda: worker.stats().clients == ())


def test_clients_made_and_dropped_leave_their_places(in_process, gate):
    worker = in_process(gate.run_batch, max_clients=4)
    for _ in range(12):
        eventually(lambda: len(worker.stats().clients) < 4)
        assert worker.connect().submit("x") == "x"


def test_clients_and_requests_in_reference_cycles_are_collected_in_any_order(in_process, gate):
    worker = in_process(gate.run_batch, max_clients=64)
    for _ in range(20):
        client = worker.connect()
        cycle = [client, client.enqueue("dropped"), client.enqueue(b"x" * 100_000)]
        cycle.append(cycle)
        del client, cycle
        gc.collect()
    eventually(lambda: worker.stats().slots_in_use == 0)
    eventually(lambda: worker.stats().clients == ())


def test_reserve_fills_the_slot_in_place(in_process):
    seen = []

    def look(requests):
        seen.extend((r.flags.owndata, r.flags.writeable, r.ctypes.data % 64) for r in requests)
        return [float(r.sum()) for r in requests]

    worker = in_process(look)
    client = worker.connect()
    with client.reserve((10, 10), "float32") as array:
        array[:] = 2
        assert array.ctypes.data % 64 == 0
        assert client.submit(array) == 200.0
    assert seen == [(False, False, 0)]
    with client.reserve(4) as array:
        array[:] = 1
        assert client.enqueue(array).result() == 4.0
        with pytest.raises(RuntimeError, match="sent already"):
            client.submit(array)
    with client.reserve((300, 300)) as array:  # more than a slot holds
        array[:] = 1
        assert client.submit(array) == 90000.0
    with client.reserve(4):
        pass  # never sent
    assert worker.stats().slots_in_use == 0


def test_keyboard_interrupt_gives_the_slot_back(in_process, gate):
    import signal

    gate.shut()
    worker = in_process(gate.run_batch)
    client = worker.connect()
    main = threading.main_thread().ident
    threading.Thread(target=lambda: (gate.wait_entered(), signal.pthread_kill(main, signal.SIGINT))).start()
    with pytest.raises(KeyboardInterrupt):
        client.submit("x")
    gate.open()
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert client.submit("y") == "y"


def test_every_stage_of_a_requests_life_is_measured(in_process, gate):
    worker = in_process(gate.run_batch)
    client = worker.connect()
    for i in range(10):
        client.submit(i)
    stats = worker.stats()
    assert (stats.submitted, stats.completed, stats.failed, stats.batches) == (10, 10, 0, 10)
    assert [h.count for h in (stats.queue_wait, stats.batch_wait, stats.run, stats.wake)] == [10] * 4
    assert stats.run.p50_us > 0
    assert stats.batch_sizes == {"1": 10}
    assert sum(stats.dispatch_reasons.values()) == 10
    assert stats.state == "serving"
    assert stats.owner_alive
    assert stats.late_wakes == 0
