"""`gpuworker serve`: this process supervises an owner. Every field of WorkerOptions is an option, with the help text that follows it in the source."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import inspect
import logging
import os
import re
import sys
import textwrap
import typing
from typing import Any

from gpuworker.cli.target import CommandError, worker_name
from gpuworker.execution.encoder_files import EncoderFiles, EncoderRecipe, buckets
from gpuworker.generation import gguf
from gpuworker.generation.files import DecoderRecipe, check_directory
from gpuworker.worker import WorkerOptions, logs
from gpuworker.worker.job import Job
from gpuworker.worker.supervisor import Supervisor

log = logging.getLogger("gpuworker")

SERVED = {"handler": "a handler, MODULE:ATTR,", "hf_encoder": "--hf-encoder DIR", "hf": "--hf DIR", "gguf": "--gguf FILE"}
"""What can be served, by the parsed argument that says so, in words."""
GENERATION = {"kv_cache_bytes": "--kv-cache-bytes", "max_model_tokens": "--max-model-tokens", "prefix_caching": "--no-prefix-caching"}
"""Options of GenerationHandler, as flags."""


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a handler until SIGTERM or Ctrl-C",
        usage="%(prog)s (MODULE:ATTR | --hf-encoder DIR | --hf DIR | --gguf FILE) --name NAME [options]",
        description="Serves a handler as worker NAME until SIGTERM or Ctrl-C, then drains; a second signal stops at once. This process starts the owner, and "
        "starts it again when it dies.",
        allow_abbrev=False,
    )
    handler = parser.add_argument(
        "handler", metavar="MODULE:ATTR", help="a function run_batch(requests: list) -> list, or a class or object with that method; "
        "looked for in the current directory too",
    )  # fmt: skip
    handler.required = False  # not nargs="?": before Python 3.12 that is looked for in front of the first option only
    parser.add_argument("--name", required=True, type=worker_name, help="what clients connect to")
    parser.add_argument("-v", "--verbose", action="store_true", help="more logs, of other libraries too; full tracebacks")
    add_models(parser.add_argument_group("serving a model from a directory"))
    add_options(parser.add_argument_group("options of the worker"))
    parser.set_defaults(run=run, refuse=parser.error)


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
        choices=("float32", "bfloat16", "float16"),
        help="of its weights and computation (default: float32; with --hf: as saved)",
    )
    parser.add_argument(
        "--kv-cache-bytes",
        type=int,
        metavar="BYTES",
        help="generation: memory for keys and values (default: most of what is free on a GPU, 1 GiB on the CPU)",
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
    if name in ("length_buckets", "allowed_batch_sizes"):
        return "N,..."
    if name in ("cost_file", "device"):
        return {"cost_file": "PATH", "device": "DEVICE"}[name]
    choices = re.findall(r'"(\w+)"', doc) if kind is str else []
    if choices:
        return f"{{{','.join(choices)}}}"
    return next((unit for suffix, unit in (("_ms", "MS"), ("_s", "SECONDS"), ("_bytes", "BYTES")) if name.endswith(suffix)), "N")


def run(args: argparse.Namespace) -> int:
    """Serves. A mistake in the command is one line; an error of the handler's own code is shown with its traceback."""
    check(args)
    if args.verbose:
        os.environ[logs.LEVEL] = "DEBUG"
    logs.set_up("INFO")
    options = {field.name: getattr(args, field.name) for field in dataclasses.fields(WorkerOptions) if hasattr(args, field.name)}
    handler: Any = args.handler
    try:
        if args.hf_encoder is not None:
            handler = encoder(args.hf_encoder, options, args.dtype)
        elif args.handler is None:
            handler = decoder(args)
        log.debug("options: %s", WorkerOptions.of(options))
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise CommandError(str(error)) from None
    failure: list[str] = []

    def report(*, pid: int = 0, error: str = "", traceback: str = "", words: str = "") -> None:
        if error:
            sys.stderr.write(traceback or words)
            failure.append(error)

    status = Supervisor(Job.of(handler, args.name, options), report).run()
    if failure:
        raise CommandError(failure[0])
    return status


def check(args: argparse.Namespace) -> None:
    """Refuses options that do not go together."""
    given = [words for name, words in SERVED.items() if getattr(args, name) is not None]
    if not given:
        args.refuse(f"give {', or '.join(SERVED.values()).replace(',,', ',')}")
    if len(given) > 1:
        args.refuse(f"give {' or '.join(given)}{', not both' if len(given) == 2 else ': one of them'}")
    if args.handler is not None and args.dtype:
        args.refuse("--dtype is for --hf-encoder, --hf and --gguf; a handler of your own says itself what it uses")
    for name, flag in GENERATION.items():
        value = getattr(args, name)
        if value is not None and args.hf is args.gguf:
            args.refuse(f"{flag} is for --hf and --gguf")
        if value is not None and value is not False and value < 1:
            args.refuse(f"{flag} {value}: give at least 1")


def encoder(directory: str, options: dict[str, Any], dtype: str | None) -> EncoderRecipe:
    """The handler for an encoder's directory; adds length_buckets to options that bound no length. Imports neither torch nor transformers: that is for the owner.

    Raises OSError or ValueError for a directory that cannot be served, CommandError where a package is missing.
    """
    need("--hf-encoder", "hf")
    limits = (EncoderFiles.read(directory).max_length, WorkerOptions.of(options).longest)
    longest = min(limit for limit in limits if limit)
    if not {"length_buckets", "max_length"} & options.keys():
        options["length_buckets"] = buckets(longest)
    return EncoderRecipe(directory, {"dtype": dtype, "max_length": longest})


def decoder(args: argparse.Namespace) -> DecoderRecipe:
    """The handler for a decoder's directory or its GGUF file, which is converted first, if that has not been done. Imports as little as `encoder`.

    Raises OSError, ValueError or ModuleNotFoundError for what cannot be served, CommandError where a package is missing.
    """
    need("--hf" if args.gguf is None else "--gguf", "hf" if args.gguf is None else "llm")
    directory = check_directory(args.hf if args.gguf is None else gguf.converted(args.gguf))
    options = {name: getattr(args, name) for name in ("dtype", *GENERATION)}
    return DecoderRecipe(directory, {name: value for name, value in options.items() if value is not None})


def need(flag: str, extra: str) -> None:
    """Raises CommandError where a package is missing."""
    for package in ("torch", "transformers", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise CommandError(f"{flag} needs {package}: pip install 'gpuworker[{extra}]'")
