"""`gpuworker serve`: this process supervises an owner. Every field of WorkerOptions is an option, with the help text that follows it in the source."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import logging
import os
import re
import sys
import textwrap
import typing
from typing import Any

from gpuworker.cli.numbers import size_bytes
from gpuworker.cli.target import CommandError, worker_name
from gpuworker.cli.text import setting
from gpuworker.config import WorkerConfig, keys, layers, served
from gpuworker.config.keys import Setting
from gpuworker.config.settings import settings
from gpuworker.errors import ConfigError
from gpuworker.execution.model_directory import DTYPES
from gpuworker.worker import WorkerOptions, logs
from gpuworker.worker.job import Job
from gpuworker.worker.notify import Notifier
from gpuworker.worker.supervisor import Supervisor

log = logging.getLogger("gpuworker")


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a handler until SIGTERM or Ctrl-C",
        usage="%(prog)s (MODULE:ATTR | --hf-encoder DIR | --hf DIR | --gguf FILE) --name NAME [options]\n       %(prog)s --config FILE [NAME] [options]",
        description="Serves a handler as worker NAME until SIGTERM or Ctrl-C, then drains; a second signal stops at once. This process starts the owner, and "
        "starts it again when it dies.",
        allow_abbrev=False,
    )
    handler = parser.add_argument(
        "handler", metavar="MODULE:ATTR", help="a function run_batch(requests: list) -> list, or a class or object with that method; "
        "looked for in the current directory too; with --config, the name of the file's worker to serve",
    )  # fmt: skip
    handler.required = False  # not nargs="?": before Python 3.12 that is looked for in front of the first option only
    parser.add_argument("--name", type=worker_name, help="what clients connect to")
    add_settings(parser)
    parser.set_defaults(run=run, refuse=parser.error)


def add_settings(parser: Any) -> None:
    """The options that say what is served, and how, but for the name."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings from a TOML file with a table [workers.NAME] for each worker (default: the file in GPUWORKER_CONFIG). Flags come before the "
        "environment (GPUWORKER_MAX_BATCH_SIZE, ...), that before the file; see docs/configuration.md and `gpuworker config`",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="more logs, of other libraries too; full tracebacks")
    parser.add_argument(
        "--log-format", choices=logs.FORMATS, help=f"of stderr: text, or one JSON object a line (default: {logs.FORMAT} of the environment, or text)"
    )
    add_models(parser.add_argument_group("serving a model from a directory"))
    add_options(parser.add_argument_group("options of the worker"))


def add_models(parser: Any) -> None:
    """The options that take the place of a handler, and what belongs to them."""
    parser.add_argument(
        "--hf-encoder",
        metavar="DIR",
        help="serve the encoder (BERT, RoBERTa, MPNet, ...) that transformers or sentence-transformers have saved in DIR: clients submit texts, or int64 token "
        'ids as {"input_ids": ids}, and get float32 vectors. Texts are cut where the model, max_length, max_batch_tokens or the last of length_buckets ends; '
        "without max_length and length_buckets, the latter are 16,32,64,... up to the model's longest",
    )
    parser.add_argument(
        "--hf",
        metavar="DIR",
        help="serve the decoder (Llama, Qwen, Mistral, Gemma, GPT-2, ...) that transformers has saved in DIR: clients call generate and stream. "
        "--max-batch-size is how many sequences take part in a step of the model, --max-batch-tokens how many tokens (default: 512)",
    )
    parser.add_argument(
        "--gguf", metavar="FILE", help="the same for llama.cpp's file of a model; it is converted once, into a directory in ~/.cache/gpuworker"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of its weights and computation (default: float32; with --hf: as saved)",
    )
    parser.add_argument(
        "--kv-cache-bytes",
        type=size_bytes,
        metavar="BYTES",
        help="generation: memory for keys and values, e.g. 2GiB (default: most of what is free on a GPU, 1 GiB on the CPU)",
    )
    parser.add_argument(
        "--max-model-tokens", type=int, metavar="N", help="generation: longest prompt and answer together (default: what the model was made for)"
    )
    parser.add_argument(
        "--no-prefix-caching",
        dest="prefix_caching",
        action="store_false",
        default=None,
        help="generation: compute beginnings that requests share for each of them",
    )


def add_options(parser: Any) -> None:
    """A flag for each field of WorkerOptions; those not given are absent from the parsed arguments."""
    docs, hints = field_docs(WorkerOptions), typing.get_type_hints(WorkerOptions)
    for field in dataclasses.fields(WorkerOptions):
        doc = docs.get(field.name, "")
        kind = keys.kind_of(hints[field.name])
        about: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text(doc, field.default)}
        if kind is bool:
            about["action"] = argparse.BooleanOptionalAction
        else:
            about.update(type=size_bytes if field.name.endswith("_bytes") else kind, metavar=metavar(field.name, kind, doc))
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
    return f"{doc.rstrip('.')} (default: {setting(default)})".replace("%", "%%")


def metavar(name: str, kind: type, doc: str) -> str:
    """What the help calls an option's value: its choices, its unit, or N."""
    if name in ("length_buckets", "allowed_batch_sizes"):
        return "N,..."
    if name in ("cost_file", "device"):
        return {"cost_file": "PATH", "device": "DEVICE"}[name]
    choices = re.findall(r'"(\w+)"', doc) if kind is str else []
    if choices:
        return f"{{{','.join(choices)}}}"
    return next((unit for suffix, unit in (("_ms", "MS"), ("_s", "SECONDS"), ("_bytes", "BYTES")) if name.endswith(suffix)), "N")


def config_of(args: argparse.Namespace) -> WorkerConfig:
    """What the command line, the environment and the file say together; sets logs up, too. A mistake in the command is one line."""
    path = args.config or os.environ.get(layers.FILE)
    if path and args.handler is not None and ":" not in args.handler:
        if args.name not in (None, args.handler):
            args.refuse(f"give {args.handler} or --name {args.name}, not both")
        args.name, args.handler = args.handler, None  # looked at like any other name, by settings()
    if not path and args.name is None and not os.environ.get(layers.NAME):
        args.refuse("the following arguments are required: --name (or --config)")
    flags = {key: Setting(getattr(args, key), flag(key, getattr(args, key))) for key in keys.KEYS if getattr(args, key, None) is not None}
    found = settings(path, args.name, flags, os.environ)
    if not path and not any(key in found.values for key in keys.SERVED):
        args.refuse(f"give {', or '.join(served.FLAGS.values()).replace(',,', ',')}")
    try:
        served.check(found.values)
    except ConfigError as error:
        if path:
            raise
        args.refuse(str(error))
    if args.verbose:
        os.environ[logs.LEVEL] = "DEBUG"
    if args.log_format is not None:
        os.environ[logs.FORMAT] = args.log_format
    logs.set_up("INFO", found.name)
    config = found.checked().config()
    log.debug("options: %s", WorkerOptions.of(config.options))
    return config


def run(args: argparse.Namespace) -> int:
    """Serves. A mistake in the command is one line; an error of the handler's own code is shown with its traceback."""
    config = config_of(args)
    failure: list[str] = []

    def report(*, pid: int = 0, error: str = "", traceback: str = "", words: str = "") -> None:
        if error:
            if logs.is_json():
                log.critical("%s", error, extra={"traceback": traceback or words})
            else:
                sys.stderr.write(traceback or words)
            failure.append(error)

    status = Supervisor(Job.of(config.handler, config.name, config.options), report, None, Notifier()).run()
    if failure and logs.is_json():  # said already
        return 1
    if failure:
        raise CommandError(failure[0])
    return status


def flag(key: str, value: Any) -> str:
    """As it was given on the command line."""
    if key == "handler":
        return "--handler"
    return ("--no-" if value is False else "--") + key.replace("_", "-")
