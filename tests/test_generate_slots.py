"""Whatever becomes of a request that generates, its slot goes back, and nobody else is concerned."""

import contextlib
import os
import random
import signal
import threading
import time

import pytest

import gpuworker
from gpuworker._native import lib
from gpuworker.segment import Geometry
from gpuworker.segment.board import Board
from gpuworker.segment.generation import COUNTERS, FIRST_WORD
from gpuworker.segment.wire import SLOT_MASK
from tests.byte_tokenizer import END
from tests.conftest import eventually
from tests.fake_generation import BYTES, GEOMETRY, client_fixture, directory_fixture, fake_owner, owner_fixture, serve, served  # noqa: F401
from tests.live_worker import side_by_side
from tests.test_fork import in_child, succeeded


def test_case_20_cancelled_while_it_waits(owner, client):
    """mini-sglang 15, llama.cpp 24496: generation went on after the client had left."""
    stream = client.stream("a")
    assert stream.cancel()
    assert owner.admit() == []
    assert owner.in_use == 0
    with pytest.raises(gpuworker.RequestCancelled):
        next(stream)
    assert not stream.cancel()


@pytest.mark.parametrize("how", ["cancel", "close", "drop", "block", "interrupt"])
def test_case_20_cancelled_while_it_runs(owner, client, how, monkeypatch):
    stream = client.stream("a")
    answer = owner.admit_one()
    answer.send(5)
    assert next(stream).tokens == [5]
    if how == "cancel":
        assert stream.cancel()
    elif how == "close":
        stream.close()
        stream.close()
    elif how == "drop":
        del stream
    elif how == "block":
        with stream:
            pass
    else:
        monkeypatch.setattr(stream._stops, "add", lambda text: (_ for _ in ()).throw(KeyboardInterrupt))
        answer.send(6)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        with pytest.raises(gpuworker.RequestCancelled, match="interrupted"):
            next(stream)
    assert answer.is_gone
    assert not answer.send(7)
    assert answer.finish()
    assert owner.in_use == 0


def test_case_20_a_frontend_that_is_killed(owner):
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            stream = gpuworker.connect(owner.segment.name).stream("a")
            os.write(told, b"%d" % stream._link.port.me)
            signal.pause()
        os._exit(1)
    answer = owner.admit_one(wait_s=30)
    participant = int(os.read(ready, 10))
    assert answer.send(5)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert lib.gw_reap(owner.port, participant) == 1
    assert answer.is_gone
    assert answer.finish()
    assert owner.in_use == 0
    os.close(ready)
    os.close(told)


def test_a_cancel_from_another_thread_ends_the_wait(owner, client):
    stream = client.stream("a")
    answer = owner.admit_one()
    errors = []

    def read():
        with pytest.raises(gpuworker.RequestCancelled) as caught:
            stream.result()
        errors.append(caught.value)

    reader = threading.Thread(target=read)
    reader.start()
    assert stream.cancel()
    reader.join(60)
    assert len(errors) == 1
    assert answer.finish()


def test_case_21_a_slot_is_used_again_at_once(owner, client):
    """tt-inference-server 3605: a late token of the cancelled request was counted to the next one."""
    first = client.stream("a", max_tokens=5)
    old = owner.admit_one()
    old.send(5)
    first.cancel()
    assert old.send(6) is False  # it was being computed
    old.finish()
    second = client.stream("b", max_tokens=3)
    new = owner.admit_one()
    assert new.ticket & SLOT_MASK == old.ticket & SLOT_MASK
    assert new.ticket != old.ticket
    assert old.send(7) is False
    new.send(8, 9)
    assert old.send(7) is False
    assert next(second).tokens == [8, 9]
    new.send(10)
    new.end()
    assert second.result().tokens == [8, 9, 10]
    with pytest.raises(gpuworker.RequestCancelled):
        next(first)


def test_what_an_earlier_request_has_left_in_the_slot_is_not_read(owner, client):
    first = client.stream("a", max_tokens=5)
    old = owner.admit_one()
    old.send(5, 6, 7)
    old.end()
    assert first.result().tokens == [5, 6, 7]
    second = client.stream("b", max_tokens=5, timeout=0.0)
    with pytest.raises(gpuworker.DeadlineExceeded):
        next(second)
    third = client.stream("b", max_tokens=5)
    lib.gw_refuse_all(owner.port, lib.GW_KIND_DRAINING)  # nobody has opened it for entries
    with pytest.raises(gpuworker.WorkerDraining):
        next(third)


def test_entries_are_not_believed_when_the_slot_went_to_somebody_else_meanwhile(owner, client):
    """Cancelled by another thread just after the wait, and the slot is in its next life when the entries are copied."""
    first = client.stream("a", max_tokens=5)
    old = owner.admit_one()
    old.send(5)
    buffers = first._link._response_bytes
    others = []

    class Slow:
        def __getitem__(self, slot):
            if not others:
                first.cancel()
                old.finish()
                others.append(client.stream("b", max_tokens=5))
                owner.admit_one().send(9)
            return buffers[slot]

    first._link._response_bytes = Slow()
    with pytest.raises(gpuworker.RequestCancelled):
        next(first)
    assert next(others[0]).tokens == [9]
    others[0].close()


def test_a_whole_answer_that_nobody_reads_gives_its_slot_back(owner, client):
    for way in ("close", "drop"):
        stream = client.stream("a", max_tokens=1)
        answer = owner.admit_one()
        answer.send(5)
        answer.end()
        assert owner.in_use == 1
        if way == "close":
            stream.close()
            assert owner.in_use == 0
            with pytest.raises(gpuworker.RequestCancelled):
                next(stream)
        del stream
        assert owner.in_use == 0


def test_a_full_ring_says_when_a_slot_should_be_free(name, directory):
    """Of slots that are each held for so long, one after the other gets free."""
    with fake_owner(name, directory, GEOMETRY._replace(capacity=4)) as owner:
        client = gpuworker.connect(name)
        streams = [client.stream("a", max_tokens=1) for _ in range(4)]
        retry_ms = []
        for answer_ms in (0, 2000, 2):
            Board(owner.port, FIRST_WORD, COUNTERS).show(dict.fromkeys(COUNTERS, 0) | {"block_tokens": 16, "answer_ns": answer_ms * 1_000_000})
            with pytest.raises(gpuworker.QueueFull) as caught:
                client.stream("a")
            retry_ms.append(caught.value.retry_after_ms)
        assert retry_ms == [1, 500, 1]  # at first nothing is known
        for stream in streams:
            stream.close()
    with fake_owner(name, directory, GEOMETRY._replace(capacity=4), quota=2) as owner:
        client = gpuworker.connect(name)
        streams = [client.stream("a", max_tokens=1) for _ in range(2)]
        Board(owner.port, FIRST_WORD, COUNTERS).show(dict.fromkeys(COUNTERS, 0) | {"block_tokens": 16, "answer_ns": 2_000_000_000})
        with pytest.raises(gpuworker.QueueFull, match="client_quota") as caught:
            client.stream("a")
        assert caught.value.retry_after_ms == 1000
        for stream in streams:
            stream.close()


def test_full_rings_follow_the_policy(name, directory):
    geometry = GEOMETRY._replace(capacity=2)
    with fake_owner(name, directory, geometry) as owner:
        rejecting, blocking = gpuworker.connect(name), gpuworker.connect(name, on_full="block")
        falling_back = gpuworker.connect(name, fallback=lambda request: "never")
        streams = [rejecting.stream("a", max_tokens=1) for _ in range(2)]
        for client in (rejecting, falling_back):
            with pytest.raises(gpuworker.QueueFull):
                client.stream("a")
        with pytest.raises(gpuworker.DeadlineExceeded) as caught:
            blocking.generate("a", timeout=0.01)
        assert caught.value.stage == "claiming"
        for answer in owner.admit():
            answer.send(5)
            answer.end()
        assert [stream.result().tokens for stream in streams] == [[5], [5]]
        for client in (rejecting, blocking, falling_back):
            client.close()


@pytest.mark.parametrize("policy", ["reject", "block"])
def test_more_samples_than_slots(name, directory, policy):
    """It waits for its own, rather than for ever or not at all."""
    with (
        fake_owner(name, directory, GEOMETRY._replace(capacity=3)) as owner,
        gpuworker.connect(name, on_full=policy) as client,
        served(owner, lambda request: [request.sampling.seed + 1]),
    ):
        samples = client.generate("a", n=10, seed=0, temperature=1.0, max_tokens=1)
        assert [sample.tokens for sample in samples] == [[k + 1] for k in range(10)]
        assert owner.in_use == 0


def test_one_failing_sample_withdraws_the_others(owner, client):
    answers = []

    def fail():
        while len(answers) < 3:
            answers.extend(owner.admit(wait_s=0.01))
        answers[0].end("error", RuntimeError("no"))

    thread = threading.Thread(target=fail)
    thread.start()
    with pytest.raises(RuntimeError, match="no"):
        client.generate("a", n=3, seed=0, temperature=1.0)
    thread.join(60)
    assert all(answer.is_gone for answer in answers)
    assert all(answer.finish() for answer in answers[1:])
    assert owner.in_use == 0


def test_a_client_that_is_closed_withdraws_its_streams(owner, client):
    stream = client.stream("a")
    answer = owner.admit_one()
    client.close()
    assert answer.is_gone
    with pytest.raises(gpuworker.RequestCancelled):
        next(stream)
    answer.finish()
    assert owner.in_use == 0


def test_a_stream_of_the_parent_is_nothing_to_a_forked_child(owner, client):
    stream = client.stream("a")
    answer = owner.admit_one()

    def child():
        with pytest.raises(gpuworker.SegmentError, match="before a fork"):
            next(stream)
        stream.close()
        return True

    assert succeeded([in_child(child)])
    answer.send(5)
    assert not answer.is_gone
    assert next(stream).tokens == [5]
    stream.close()
    answer.finish()


# Time.


def test_a_timeout_withdraws_the_request_also_while_tokens_come(owner, client, monkeypatch):
    stream = client.stream("a", timeout=1000, max_tokens=9)
    answer = owner.admit_one()
    answer.send(5)
    assert next(stream).tokens == [5]
    stream._deadline_ns = time.monotonic_ns()  # it passes
    answer.send(6)
    with pytest.raises(gpuworker.DeadlineExceeded) as caught:
        next(stream)
    assert caught.value.stage == "running"
    assert answer.is_gone
    answer.finish()
    assert owner.in_use == 0
    with pytest.raises(gpuworker.DeadlineExceeded):
        stream.result()


def test_an_answer_that_was_whole_in_time_is_read_after_it(owner, client):
    stream = client.stream("a", timeout=1000, max_tokens=2)
    answer = owner.admit_one()
    answer.send(5, 6)
    answer.end()
    stream._deadline_ns = time.monotonic_ns()
    assert stream.result().tokens == [5, 6]


def test_a_timeout_before_anybody_took_it(owner, client):
    with pytest.raises(gpuworker.DeadlineExceeded) as caught:
        client.generate("a", timeout=0.01)
    assert caught.value.stage == "queued"
    assert owner.admit() == []
    assert owner.in_use == 0
    with pytest.raises(ValueError, match="timeout"):
        client.generate("a", timeout=-1)


# Slow readers, many readers, Ctrl-C.


def test_case_24_a_reader_that_never_reads_costs_its_slot_and_nobody_else(owner, client):
    """vllm PR 56094: unread output grew without bound. Here there is room for all of it before it begins."""
    slow, quick = client.stream("a", max_tokens=300), client.stream("b", max_tokens=300)
    answers = owner.admit()
    sent = [k % 50 + 3 for k in range(300)]
    for token in sent:
        for answer in answers:
            assert answer.send(token)
        assert next(quick).tokens == [token]
    for answer in answers:
        answer.end()
    assert quick.result().tokens == sent
    (delta, *tail) = list(slow)  # all that waited, at once
    assert delta.tokens == sent
    assert delta.text + "".join(one.text for one in tail) == BYTES.decode(sent)
    assert slow.generation == quick.generation
    assert owner.in_use == 0


@pytest.mark.parametrize("seed", range(3))
def test_case_30_all_of_fifty_get_just_their_tokens(name, directory, seed):
    """TGI 345: outputs cut short under load."""
    rng = random.Random(seed)
    geometry = Geometry(capacity=64, max_request_bytes=4096, max_response_bytes=4096, max_participants=4)
    wanted = [(rng.randrange(1, 60), rng.randrange(1, 60)) for _ in range(50)]  # max_tokens, and where the model would end

    def tokens_of(request):
        index, end = request.ids
        return [3 + (index * 31 + k) % 200 for k in range(end - 1)] + [END]

    results = {}
    with fake_owner(name, directory, geometry) as owner, gpuworker.connect(name) as client:

        def ask(index):
            most, end = wanted[index]
            if index % 2:
                results[index] = client.generate([index, end], max_tokens=most).tokens
            else:
                results[index] = [token for delta in client.stream([index, end], max_tokens=most) for token in delta.tokens]

        over = threading.Event()
        thread = threading.Thread(target=serve, args=(owner, tokens_of, over.is_set, rng.shuffle))
        thread.start()
        side_by_side(ask, range(50))
        over.set()
        thread.join(60)
        for index, (most, end) in enumerate(wanted):
            whole = [3 + (index * 31 + k) % 200 for k in range(end - 1)] + [END]
            assert results[index] == whole[:most], index
            assert len(results[index]) == min(most, end)
        assert owner.in_use == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt may fall into a finalizer
@pytest.mark.parametrize("is_served", [False, True])
def test_nothing_is_lost_when_ctrl_c_comes_anywhere(owner, client, is_served):
    """Before the request is sent, while it waits or runs, and between any two lines: the slot goes back, and the next request works."""

    rng, interrupted = random.Random(1), []

    def interrupt(*_):
        interrupted.append(1)
        raise KeyboardInterrupt

    def ask(round_):
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.choice([rng.uniform(1e-5, 2e-3), rng.uniform(1e-4, 5e-4)]))
            if round_ % 2:
                client.generate("abc", max_tokens=100)
            else:
                list(client.stream("abc", max_tokens=100, stop="zz"))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, interrupt)
    with served(owner, lambda request: [5] * 100) if is_served else contextlib.nullcontext():
        client.stream("abc").close()
        try:
            for round_ in range(200):
                with contextlib.suppress(KeyboardInterrupt):
                    ask(round_)
                if is_served:
                    eventually(lambda: owner.in_use == 0)
                assert owner.in_use == 0
        finally:
            signal.signal(signal.SIGALRM, before)
        assert len(interrupted) > 50
        if is_served:
            assert client.generate("abc", max_tokens=3).tokens == [5, 5, 5]
