"""An exception of the owner as bytes, and back as an exception the frontend can catch by its class.

Builtin exceptions and our own come back as themselves when their arguments are plain data, everything else as RemoteError. No class is ever
looked up outside `builtins` and gpuworker.errors, and nothing is pickled.
"""

from __future__ import annotations

import builtins
import traceback
from typing import Any

from msgspec import MsgspecError, msgpack

from gpuworker import errors
from gpuworker.errors import GpuWorkerError, RemoteError, SegmentError, UnsupportedPayload
from gpuworker.payload import tree

MAX_MESSAGE_CHARS = 2000
MAX_TRACEBACK_CHARS = 6000
MAX_NAME_CHARS = 200
LEAST_CHARS = 40
SIZES = (
    (MAX_TRACEBACK_CHARS, MAX_MESSAGE_CHARS),
    (1000, MAX_MESSAGE_CHARS),
    *((0, chars) for chars in (MAX_MESSAGE_CHARS, 800, 400, 200, 100, LEAST_CHARS)),
)
"""How much of the traceback and of each text is kept, the most first. A builtin error's message is there twice: as its words and as its argument."""
_MAX_ARGS_BYTES = 8192
_pack = msgpack.Encoder().encode
_unpack = msgpack.Decoder(tuple[str, str, str, bytes | None]).decode


def encode_error(exception: BaseException, limit_bytes: int = 1 << 20) -> bytes:
    """At most some 40 KiB, or what fits `limit_bytes` if that is possible: the traceback goes first, then the ends of its texts; its class stays. Never raises."""
    kind = _qualified_name(type(exception))
    name, trace = _text(kind[:MAX_NAME_CHARS]), _traceback(exception)
    for trace_chars, message_chars in SIZES:
        left = trace[-trace_chars:] if trace_chars else ""
        blob = _pack((name, _message(exception, message_chars), left, _arguments(exception, kind, message_chars)))
        if len(blob) <= limit_bytes:
            return blob
    return _pack((name[:LEAST_CHARS], _message(exception, LEAST_CHARS), "", None))


def decode_error(blob: bytes | memoryview) -> Exception:
    """The exception to raise in the frontend; its __cause__ is a RemoteError with the owner's traceback. Raises SegmentError for nonsense."""
    try:
        name, message, trace, arguments = _unpack(bytes(blob))
    except (MsgspecError, UnicodeDecodeError) as error:
        raise SegmentError(f"malformed payload (error: {error})") from error
    remote = RemoteError(name, message, trace)
    if arguments is None:
        return remote
    args = tree.decode_tree(0, len(arguments), memoryview(arguments), True)
    kind = _local_class(name)
    if kind is None or type(args) is not tuple:
        return remote
    try:
        exception = kind(*args)
    except Exception:  # arguments that this class does not take
        return remote
    if type(exception) is not kind:  # OSError(2, ...) is a FileNotFoundError, so its name lied
        return remote
    if trace or not isinstance(exception, GpuWorkerError):
        exception.__cause__ = remote
    return exception


def _qualified_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ in ("builtins", errors.__name__) else f"{kind.__module__}.{kind.__qualname__}"


def _local_class(name: str) -> type[Exception] | None:
    """The exception class of this name that may come back as itself."""
    kind = getattr(errors, name, None) if name in errors.__all__ else vars(builtins).get(name)
    # Raised out of `next()`, these two would end a loop silently instead of failing it.
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind in (StopIteration, StopAsyncIteration):
        return None
    return kind


def _message(exception: BaseException, most: int) -> str:
    try:
        message = str(exception)
    except Exception as error:
        message = f"<{type(exception).__name__} whose str() raised {type(error).__name__}>"
    return _text(_shortened(message, most))


def _traceback(exception: BaseException) -> str:
    if exception.__traceback__ is None and exception.__cause__ is None:
        return ""  # returned, not raised: nothing to show
    try:
        text = "".join(map(_shortened, traceback.format_exception(exception)))
    except Exception:  # attributes of strange classes
        text = "".join(traceback.format_tb(exception.__traceback__))
    return _text(text[-MAX_TRACEBACK_CHARS:])


def _arguments(exception: BaseException, name: str, most: int) -> bytes | None:
    """What to call the class with, as a document, or None when it is not a class of ours or the arguments are no plain data. most: characters of a text."""
    if _local_class(name) is not type(exception):
        return None
    try:
        args: Any = exception.__reduce__()[1]  # not .args: OSError keeps its file name elsewhere, our own classes their fields
        if len(args) == 1 or most < MAX_MESSAGE_CHARS:
            args = tuple(_shortened(arg, most) if type(arg) is str else arg for arg in args)
        document, arrays, _ = tree.dump(args)
    except (UnsupportedPayload, TypeError, IndexError):
        return None
    return None if arrays or len(document) > _MAX_ARGS_BYTES else document


def _shortened(text: str, most: int = MAX_MESSAGE_CHARS) -> str:
    if len(text) <= most:
        return text
    ending = f"... ({len(text):,} characters)"
    return text[: most - len(ending)] + ending


def _text(text: str) -> str:
    """Plain `str`, without lone surrogates, which msgpack cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()
