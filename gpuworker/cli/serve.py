"""`gpuworker serve`: this process becomes the owner. Every field of WorkerOptions is an option, with the help text that follows it in the source."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import logging
import os
import re
import textwrap
import traceback
import typing
from types import TracebackType
from typing import Any, NoReturn

import gpuworker
from gpuworker.cli.target import CommandError, worker_name
from gpuworker.errors import GpuWorkerError
from gpuworker.worker import WorkerOptions
from gpuworker.worker.handler import Handler
from gpuworker.worker.session import serve as become_owner

log = logging.getLogger("gpuworker")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"

_OURS = (os.path.dirname(gpuworker.__file__) + os.sep, "<frozen importlib", os.path.dirname(os.__file__) + "/importlib/")


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a handler until SIGTERM or Ctrl-C",
        usage="%(prog)s MODULE:ATTR --name NAME [options]",
        description="Serves a handler as the owner of worker NAME until SIGTERM or Ctrl-C, then drains; a second signal stops at once.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "handler", metavar="MODULE:ATTR", help="a function run_batch(requests: list) -> list, or a class or object with that method; "
        "looked for in the current directory too",
    )  # fmt: skip
    parser.add_argument("--name", required=True, type=worker_name, help="what clients connect to")
    parser.add_argument("-v", "--verbose", action="store_true", help="more logs, of other libraries too; full tracebacks")
    add_options(parser.add_argument_group("options of the worker"))
    parser.set_defaults(run=run)


def add_options(parser: Any) -> None:
    """A flag for each field of WorkerOptions; those not given are absent from the parsed arguments."""
    docs, hints = field_docs(WorkerOptions), typing.get_type_hints(WorkerOptions)
    for field in dataclasses.fields(WorkerOptions):
        doc = docs.get(field.name, "")
        kind = next(kind for kind in (*typing.get_args(hints[field.name]), hints[field.name]) if kind is not type(None))
        about: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text(doc, field.default)}
        if kind is bool:
            about["action"] = argparse.BooleanOptionalAction
        else:
            about.update(type=kind, metavar=metavar(field.name, kind, doc))
        parser.add_argument("--" + field.name.replace("_", "-"), dest=field.name, **about)


def field_docs(cls: type) -> dict[str, str]:
    """The docstring that follows each field of a dataclass; nothing where there is no source to read."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except OSError:
        return {}
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: doc.value.value
        for field, doc in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    }


def help_text(doc: str, default: Any) -> str:
    """An option's help, with its default where the doc does not explain one."""
    if default is None:
        return doc.replace("%", "%%")
    shown = str(default).lower() if isinstance(default, bool) else f"{default:g}" if isinstance(default, float) else f"{default}"
    return f"{doc.rstrip('.')} (default: {shown})".replace("%", "%%")


def metavar(name: str, kind: type, doc: str) -> str:
    """What the help calls an option's value: its choices, its unit, or N."""
    choices = re.findall(r'"(\w+)"', doc) if kind is str else []
    if choices:
        return f"{{{','.join(choices)}}}"
    return next((unit for suffix, unit in (("_ms", "MS"), ("_s", "SECONDS"), ("_bytes", "BYTES")) if name.endswith(suffix)), "N")


def run(args: argparse.Namespace) -> int:
    """Serves. A mistake in the command is one line; an error of the handler's own code is shown with its traceback."""
    logging.basicConfig(format=LOG_FORMAT, level=logging.INFO if args.verbose else logging.WARNING)
    log.setLevel(logging.DEBUG if args.verbose else logging.INFO)
    options = {field.name: getattr(args, field.name) for field in dataclasses.fields(WorkerOptions) if hasattr(args, field.name)}
    try:
        log.debug("options: %s", WorkerOptions.of(options))
    except ValueError as error:
        raise CommandError(str(error)) from None
    try:
        Handler(args.handler)
    except Exception as error:
        if isinstance(error, (ValueError, TypeError, ImportError, AttributeError)) and not isinstance(error, SyntaxError) and not users_part(error):
            raise CommandError(str(error) if args.handler in str(error) else f"handler {args.handler!r}: {error}") from None
        show(error, "importing the handler failed")
    try:
        become_owner(args.handler, name=args.name, **options)
    except GpuWorkerError as error:
        if args.verbose or users_part(error):
            show(error, "the handler failed")
        raise
    except Exception as error:
        show(error, "the handler failed" if users_part(error) else "the owner failed")
    return 0


def show(error: Exception, what: str) -> NoReturn:
    """Prints the traceback, without our frames above the user's, and raises CommandError."""
    part = users_part(error)
    traceback.print_exception(type(error), error, error.__traceback__ if part is None and not isinstance(error, SyntaxError) else part)
    raise CommandError(what) from None


def users_part(error: BaseException) -> TracebackType | None:
    """The traceback from the first frame on that is neither ours nor the import system's."""
    part = error.__traceback__
    while part is not None and part.tb_frame.f_code.co_filename.startswith(_OURS):
        part = part.tb_next
    return part
