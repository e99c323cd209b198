"""What to say of an error that kept an owner from getting ready: whose fault is it, and which part of the traceback helps?"""

from __future__ import annotations

import os
import traceback
from types import TracebackType

import gpuworker
from gpuworker.errors import GpuWorkerError

_LIBRARY = os.path.dirname(os.__file__)
_OURS = (os.path.dirname(gpuworker.__file__) + os.sep, "<frozen ", f"{_LIBRARY}/importlib/", f"{_LIBRARY}/multiprocessing/", f"{_LIBRARY}/runpy")


def explain(error: BaseException, handler: object) -> dict[str, str]:
    """`error`: one line. `traceback`: of the user's own code; empty where there is none, as for a mistyped handler."""
    part = users_part(error)
    line = "".join(traceback.format_exception_only(error)[-1:]).strip()
    if part is not None or isinstance(error, SyntaxError):
        return {"error": line, "traceback": "".join(traceback.format_exception(type(error), error, part))}
    if isinstance(error, GpuWorkerError):
        return {"error": str(error), "traceback": ""}
    if isinstance(error, (ValueError, TypeError, ImportError, AttributeError)):
        return {"error": str(error) if not isinstance(handler, str) or handler in str(error) else f"handler {handler!r}: {error}", "traceback": ""}
    return {"error": line, "traceback": traceback.format_exc()}


def users_part(error: BaseException) -> TracebackType | None:
    """The traceback from the first frame on that is neither ours nor the import system's."""
    part = error.__traceback__
    while part is not None and part.tb_frame.f_code.co_filename.startswith(_OURS):
        part = part.tb_next
    return part
