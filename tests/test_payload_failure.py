"""Exceptions of the owner arrive as what the frontend can catch, with the owner's traceback."""

from __future__ import annotations

import contextlib
import random

import msgspec
import numpy as np
import pytest

from gpuworker import errors
from gpuworker.errors import RemoteError, SegmentError
from gpuworker.payload import decode_error, encode_error


def cross(exception: BaseException) -> Exception:
    try:
        raise exception
    except BaseException as caught:
        return decode_error(encode_error(caught))


BUILTINS = [
    ValueError("bad"),
    ValueError(),
    ValueError("several", 2, 3.5, None, b"x", (1, [2]), {"a": 1}),
    KeyError("key"),
    KeyError(np.int64(3)),
    IndexError("index"),
    MemoryError(),
    RecursionError("deep"),
    NotImplementedError("later"),
    RuntimeError("lone \ud800 surrogate"),
    OverflowError(1 << 80),
    FileNotFoundError(2, "No such file", "name.txt"),
    PermissionError(13, "no"),
    OSError("only a message"),
    OSError(123456, "strange number"),
    BlockingIOError(11, "again"),
    TimeoutError("slow"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range"),
    DeprecationWarning("old"),
]


@pytest.mark.parametrize("exception", BUILTINS, ids=lambda e: repr(e).encode("ascii", "replace").decode())
def test_builtins_come_back_as_themselves(exception: Exception) -> None:
    got = cross(exception)
    assert type(got) is type(exception)
    assert got.args == exception.args
    assert str(got) == str(exception)
    assert getattr(got, "filename", None) == getattr(exception, "filename", None)
    assert isinstance(got.__cause__, RemoteError)
    assert got.__cause__.type == type(exception).__name__
    assert "raise exception" in got.__cause__.traceback
    assert "In the owner" in str(got.__cause__)


OURS = [
    errors.BatchSizeMismatch(3, 2),
    errors.BatchSizeMismatch(3, None, "a generator"),
    errors.PayloadTooLarge(10, 5, "response"),
    errors.QueueFull("full", 12.5),
    errors.DeadlineExceeded("late", "queued"),
    errors.UnsupportedPayload("set"),
    errors.SegmentError("malformed"),
    errors.RemoteError("pkg.Error", "message", "trace"),
    errors.WorkerAlreadyRunning("name", 5),
    errors.WorkerDied("gone"),
]


@pytest.mark.parametrize("exception", OURS, ids=repr)
def test_ours_come_back_as_themselves(exception: Exception) -> None:
    returned = decode_error(encode_error(exception))
    for got in (returned, cross(exception)):
        assert type(got) is type(exception)
        assert str(got) == str(exception)
        assert vars(got) == vars(exception)
    assert returned.__cause__ is None
    assert isinstance(cross(exception).__cause__, RemoteError)


class CustomError(Exception):
    pass


class SubclassedError(ValueError):
    pass


class SilentError(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class ImpostorError(Exception):
    pass


ImpostorError.__module__, ImpostorError.__qualname__ = "builtins", "ValueError"


@pytest.mark.parametrize(
    ("exception", "type_", "message"),
    [
        (CustomError("text"), f"{__name__}.CustomError", "text"),
        (SubclassedError("text"), f"{__name__}.SubclassedError", "text"),
        (SilentError("text"), f"{__name__}.SilentError", "<SilentError whose str() raised RuntimeError>"),
        (ImpostorError("text"), "ValueError", "text"),
        (ValueError(object), "ValueError", "<class 'object'>"),
        (ValueError(np.zeros(3)), "ValueError", "[0. 0. 0.]"),
        (ValueError(b"x" * 100_000, 1), "ValueError", None),
        (KeyboardInterrupt(), "KeyboardInterrupt", ""),
        (SystemExit(3), "SystemExit", "3"),
        (StopIteration("would end the caller's loop"), "StopIteration", "would end the caller's loop"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_everything_else_is_a_remote_error(exception: BaseException, type_: str, message: str | None) -> None:
    got = cross(exception)
    assert type(got) is RemoteError
    assert got.type == type_
    assert message is None or got.message == message
    assert "raise exception" in got.traceback


def test_long_messages_and_tracebacks_are_cut() -> None:
    def fall(depth: int) -> None:
        if depth % 2:
            fall(depth - 1)
        elif depth:
            exec(compile(f"fall({depth - 1})", "x" * 300, "exec"), {"fall": fall})
        else:
            raise CustomError("y" * 1_000_000)

    with pytest.raises(CustomError) as caught:
        fall(100)
    blob = encode_error(caught.value)
    got = decode_error(blob)
    assert isinstance(got, RemoteError)
    assert len(got.message) == 2000
    assert got.message.endswith("(1,000,000 characters)")
    assert len(got.traceback) == 6000
    assert "line" in got.traceback
    assert len(blob) < 10_000
    builtin = cross(ValueError("z" * 5000))
    assert type(builtin) is ValueError
    assert len(str(builtin)) == 2000
    assert "raise exception" in str(builtin.__cause__)


def test_errors_shrink_to_a_small_response_area() -> None:
    with pytest.raises(ValueError, match="words") as caught:
        raise ValueError("words " * 50) from KeyError("cause")
    whole = encode_error(caught.value)
    assert type(decode_error(encode_error(caught.value, len(whole) - 1))) is ValueError
    for limit in (2000, 800, 256):
        blob = encode_error(caught.value, limit)
        assert len(blob) <= limit
        got = decode_error(blob)
        assert isinstance(got, (ValueError, RemoteError))
        assert "words" in str(got)


@pytest.mark.parametrize(
    "exception",
    [
        ValueError("words " * 500),
        KeyError("words " * 90),
        FileNotFoundError(2, "No such file", "/words " * 400),
        errors.InvalidRequest("words " * 500),
        ValueError("words " + "\U0001f469" * 3000),
        errors.WorkerDied("words " + "\ud800" * 500),
    ],
    ids=lambda x: type(x).__name__,
)
def test_where_there_is_little_room_an_error_keeps_its_class_and_the_beginning_of_its_words(exception: Exception) -> None:
    """The end of an answer that comes piece by piece has 512 bytes for it."""
    blob = encode_error(exception, 512)
    assert len(blob) <= 512
    got = decode_error(blob)
    assert type(got) is type(exception)
    assert "words" in str(got)
    assert "characters)" in str(got)


def test_where_there_is_hardly_any_room_it_keeps_its_name() -> None:
    blob = encode_error(CustomError("words " * 500), 512)
    assert len(blob) <= 512
    got = decode_error(blob)
    assert type(got) is RemoteError
    assert got.type == f"{__name__}.CustomError"
    assert len(got.message) == 400
    kind = type("\U0001f469" * 300, (Exception,), {})
    for message in ("words", "\U0001f469" * 300):
        blob = encode_error(kind(message), 512)
        assert len(blob) <= 512
        assert isinstance(decode_error(blob), RemoteError)


@pytest.mark.parametrize(
    "blob", [b"", b"\xc1", b"\x94\xa1x\xa0\xa0", b"\x93\x01\x02\x03", b"\x94\xa1\xff\xa0\xa0\xc0", b"\x94\xaaValueError\xa0\xa0\xc4\x01\xc1"]
)
def test_nonsense_is_a_segment_error(blob: bytes) -> None:
    with pytest.raises(SegmentError, match="malformed payload"):
        decode_error(memoryview(blob))


@pytest.mark.parametrize("name", ["print", "eval", "exit", "BaseException", "SystemExit", "__import__", "errors", "Exception.mro", "StopIteration"])
def test_no_other_name_is_ever_called(name: str) -> None:
    arguments = msgspec.msgpack.decode(encode_error(ValueError("x")))[3]
    assert type(decode_error(msgspec.msgpack.encode((name, "message", "", arguments)))) is RemoteError


def test_patched_errors_never_escape() -> None:
    chance = random.Random(0)
    blobs = [encode_error(e) for e in (*BUILTINS, *OURS)]
    for _ in range(500):
        blob = bytearray(chance.choice(blobs))
        for _ in range(chance.choice((1, 2, 8))):
            blob[chance.randrange(len(blob))] = chance.randrange(256)
        with contextlib.suppress(SegmentError):
            assert isinstance(decode_error(bytes(blob)), Exception)
