"""Owners that die in the middle of an answer, errors of theirs, and what others have written into the slot."""

import contextlib
import os
import random
import signal
import threading

import numpy as np
import pytest

import gpuworker
from gpuworker._native import ffi, lib
from gpuworker.payload import encode_error
from gpuworker.segment import Segment, State
from gpuworker.segment.wire import LINE
from tests.fake_generation import VOCABULARY, FakeOwner, client_fixture, directory_fixture, echo, owner_fixture, served  # noqa: F401
from tests.live_worker import side_by_side


def test_an_owner_that_is_killed_between_two_entries(owner, client):
    """The next one finds what was sent; the stream goes on without a repeated or a missing token."""
    stream = client.stream("a", max_tokens=6)
    answer = owner.admit_one()
    answer.send(5, 6)
    assert next(stream).tokens == [5, 6]
    answer.send(7)
    answer.write_uncounted(99)  # killed here
    assert owner.succeed() == 1
    again = owner.admit_one()
    assert (again.ticket, again.written) == (answer.ticket, 3)
    sent = np.empty(3, again.entry)
    lib.gw_stream_copy(owner.port, again.ticket, ffi.from_buffer(sent), 3, again.entry.itemsize)
    assert sent["token"].tolist() == [5, 6, 7]
    again.send(8)
    assert next(stream).tokens == [7, 8]
    assert owner.succeed() == 1  # and once more, before the reader looks
    third = owner.admit_one()
    third.send(9, 10)
    third.end()
    assert stream.result().tokens == [5, 6, 7, 8, 9, 10]
    assert owner.in_use == 0


def test_a_request_that_ends_owners_is_given_up_with_what_was_sent(owner, client):
    stream = client.stream("a", max_tokens=6)
    owner.admit_one().send(5)
    assert owner.succeed(max_attempts=1) == 0
    assert next(stream).tokens == [5]
    with pytest.raises(gpuworker.WorkerDied, match="it will not be tried again"):
        next(stream)
    assert owner.in_use == 0
    with pytest.raises(gpuworker.WorkerDied):
        stream.result()


def test_case_23_an_owner_that_is_killed_with_nobody_to_follow(name, directory):
    """vllm 39863: clients hung. Here each raises within a slice of 50 ms of the kernel's word."""
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            owner = FakeOwner(name, directory)
            os.write(told, b"x")
            answers = []
            while len(answers) < 4:
                answers += owner.admit(wait_s=0.05)
            for answer in answers:
                answer.send(5)
            os.write(told, b"y")
            signal.pause()
        os._exit(1)
    try:
        assert os.read(ready, 1) == b"x"
        client = gpuworker.connect(name)
        streams = [client.stream("a") for _ in range(4)]
        assert [next(stream).tokens for stream in streams] == [[5]] * 4
        assert os.read(ready, 1) == b"y"
        outcomes = []

        def read(stream):
            try:
                outcomes.append(stream.result())
            except gpuworker.WorkerDied as error:
                outcomes.append(error)

        killer = threading.Timer(0, os.kill, (pid, signal.SIGKILL))
        killer.start()
        side_by_side(read, streams)
        killer.join()
        assert [type(outcome) for outcome in outcomes] == [gpuworker.WorkerDied] * 4
        assert client._link.lost
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(told)
        assert Segment.discard(name, patience_s=3)


def test_a_worker_that_stops_or_refuses(owner, client):
    stream = client.stream("a")
    answer = owner.admit_one()
    answer.send(5)
    answer.respond(lib.GW_KIND_DRAINING)
    assert next(stream).tokens == [5]  # what was sent before comes before
    with pytest.raises(gpuworker.WorkerDraining):
        next(stream)
    stream = client.stream("a")
    owner.admit_one()
    lib.gw_set_state(owner.port, State.STOPPED)
    with pytest.raises(gpuworker.WorkerDraining):
        next(stream)
    lib.gw_set_state(owner.port, State.SERVING)


@pytest.mark.parametrize(
    ("kind", "raised", "complete"),
    [
        (lib.GW_KIND_DRAINING, gpuworker.WorkerDraining, "the worker stopped before the answer was complete; it was ended"),
        (lib.GW_KIND_EXPIRED, gpuworker.DeadlineExceeded, "the answer was not complete when its deadline passed; it was ended"),
    ],
)
def test_an_answer_that_is_ended_says_how_far_it_had_come(owner, client, kind, raised, complete):
    """All were told that they did not run."""
    for count, words in ((2, f"{complete} after 2 tokens"), (0, f"{complete} before its first token"), (None, "it did not run")):
        stream = client.stream("a")
        if count is None:
            lib.gw_refuse_all(owner.port, kind)
        else:
            answer = owner.admit_one()
            answer.send(*range(5, 5 + count))
            answer.respond(kind)
            assert [delta.tokens for delta in ([next(stream)] if count else [])] == [[5, 6]] * bool(count)
        with pytest.raises(raised, match=words) as caught:
            next(stream)
        if raised is gpuworker.DeadlineExceeded:
            assert caught.value.stage == ("queued" if count is None else "running")
    assert owner.in_use == 0


def test_a_timeout_says_how_far_the_answer_had_come(owner, client):
    for read in (list, lambda stream: stream.result()):
        stream = client.stream("a", timeout=0.5)
        owner.admit_one().send(5, 6)
        with pytest.raises(gpuworker.DeadlineExceeded, match="not complete within the timeout; it was ended after 2 tokens") as caught:
            read(stream)
        assert caught.value.stage == "running"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("row 3 is NaN"), ValueError),
        (gpuworker.InvalidRequest("no"), gpuworker.InvalidRequest),
        (RuntimeError("x" * 5000), RuntimeError),  # there is room for 512 bytes: its end is cut
    ],
)
def test_an_error_of_the_owner_is_raised_and_the_next_request_works(owner, client, error, kind):
    stream = client.stream("a")
    answer = owner.admit_one()
    answer.send(5)
    answer.end("error", error)
    assert next(stream).tokens == [5]
    with pytest.raises(kind, match=str(error)[:50]):
        next(stream)
    assert owner.in_use == 0
    with served(owner, echo):
        assert client.generate("ab").finish_reason == "stop"


def test_an_error_before_the_first_token(owner, client):
    """As any other request's: the response area then holds an error, and no log."""
    for call in (next, lambda stream: stream.result()):
        stream = client.stream("a")
        owner.admit_one().respond(lib.GW_KIND_ERROR, encode_error(gpuworker.InvalidRequest("no")))
        with pytest.raises(gpuworker.InvalidRequest, match="no"):
            call(stream)
    assert owner.in_use == 0


# Scribbles.


@pytest.mark.parametrize(
    "scribble",
    [
        lambda answer: setattr(answer.header, "written", 1 << 31),
        lambda answer: setattr(answer.header, "written", 5),
        lambda answer: answer.write_uncounted(1 << 30) or setattr(answer.header, "written", 2),
        lambda answer: answer.write_uncounted(-1) or setattr(answer.header, "written", 2),
        lambda answer: answer.write_uncounted(VOCABULARY) or setattr(answer.header, "written", 2),
    ],
)
def test_entries_of_odd_values_are_an_error_and_not_believed(owner, client, scribble):
    stream = client.stream("a", max_tokens=4)
    answer = owner.admit_one()
    answer.send(5)
    assert next(stream).tokens == [5]
    scribble(answer)
    with pytest.raises(gpuworker.SegmentError, match="malformed answer"):
        next(stream)
    assert answer.is_gone
    answer.finish()
    assert owner.in_use == 0


def test_odd_values_among_likely_tokens(owner, client):
    stream = client.stream("a", max_tokens=4, logprobs=1)
    owner.admit_one().send(5, logprob=-1.0, top=[(VOCABULARY, -1.0)])
    with pytest.raises(gpuworker.SegmentError, match="malformed answer: a likely token"):
        next(stream)


@pytest.mark.parametrize("field", ["finish", "counts", "error_bytes", "life", "error"])
def test_endings_of_odd_values(owner, client, field):
    stream = client.stream("a", max_tokens=4)
    answer = owner.admit_one()
    answer.send(5)
    assert next(stream).tokens == [5]
    if field == "finish":
        lib.gw_stream_end(owner.port, answer.ticket, 77, [1, 1, 0], b"", 0)
    elif field == "counts":
        lib.gw_stream_end(owner.port, answer.ticket, 2, [1, 3, 0], b"", 0)
    elif field == "error":
        lib.gw_stream_end(owner.port, answer.ticket, 3, [1, 1, 0], b"", 0)
    else:
        lib.gw_stream_end(owner.port, answer.ticket, 1, [1, 1, 0], b"", 0)
        setattr(answer.header, field, (1 << 31) + 7)
    answer.finish()
    kinds = {"life": (), "error": (gpuworker.RemoteError,)}.get(field, (gpuworker.SegmentError,))
    if kinds:
        with pytest.raises(kinds):
            stream.result()
    else:
        assert stream.result().tokens == [5]  # all had been read
    assert owner.in_use == 0


def test_another_kind_of_answer_is_malformed(owner, client):
    for kind, data in ((lib.GW_KIND_BYTES, b"abc"), (lib.GW_KIND_STR, b"abc"), (40, b"")):
        stream = client.stream("a", max_tokens=4)
        owner.admit_one().respond(kind, data)
        with pytest.raises(gpuworker.SegmentError, match="malformed"):
            next(stream)
        assert owner.in_use == 0


def test_more_entries_than_there_is_room_for(owner, client):
    stream = client.stream("a", max_tokens=4, logprobs=4)  # 40 bytes each, which the area is no multiple of
    owner.admit_one().header.written = 1 << 20
    with pytest.raises(gpuworker.SegmentError, match="larger than its slot"):
        next(stream)


def test_random_scribbles_raise_our_errors_or_nothing(owner, client):
    """Whatever stands in the log: an answer, or an error of ours; never a crash, a hang or a slot that is lost."""
    rng = random.Random(5)
    ours = (
        gpuworker.GpuWorkerError,
        *(kind for kind in vars(__import__("builtins")).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    )
    for _ in range(200):
        stream = client.stream("a", max_tokens=8, logprobs=rng.choice([None, 0, 2]), timeout=10)
        answer = owner.admit_one()
        answer.send(*[rng.randrange(3, 50) for _ in range(rng.randrange(4))], logprob=-1.0, top=[(1, -1.0)])
        for _ in range(rng.randrange(4)):
            answer.area[rng.choice([rng.randrange(LINE), rng.randrange(400), len(answer.area) - 1 - rng.randrange(512)])] = rng.randrange(256)
        answer.end(rng.choice(["stop", "length", "error"]), counts=(1, answer.written, 0))
        with contextlib.suppress(*ours):
            generation = stream.result()
            assert len(generation.tokens) <= 8
        assert owner.in_use == 0
