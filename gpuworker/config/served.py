"""What a worker serves: a handler of the user's own, or what makes one of a directory or file of a model. Imports neither torch nor transformers: that is
for the owner."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from gpuworker.config.keys import MODEL, SERVED, Setting
from gpuworker.errors import ConfigError
from gpuworker.execution.encoder_files import EncoderFiles, buckets
from gpuworker.execution.model_directory import DECODER, DTYPES, ENCODER, Recipe
from gpuworker.generation import gguf
from gpuworker.generation.files import check_directory
from gpuworker.worker import WorkerOptions

GENERATION = ("kv_cache_bytes", "max_model_tokens", "prefix_caching")
"""Options of GenerationHandler."""
FLAGS = {"handler": "a handler, MODULE:ATTR,", "hf_encoder": "--hf-encoder DIR", "hf": "--hf DIR", "gguf": "--gguf FILE"}
"""As the command line has them, in words."""


def words(key: str, setting: Setting) -> str:
    """A setting as whoever made it wrote it."""
    return setting.origin if setting.origin.startswith(("--", "GPUWORKER_")) else f"{setting.origin}: {key}"


def check(settings: Mapping[str, Setting]) -> None:
    """Raises ConfigError for what does not go together, or is not there."""
    given = [key for key in SERVED if key in settings]
    if not given:
        raise ConfigError([f"nothing to serve: set {', '.join(SERVED[:-1])} or {SERVED[-1]}"])
    if len(given) > 1:
        said = [FLAGS[key] if settings[key].origin.startswith("--") else f"{key} ({settings[key].origin})" for key in given]
        raise ConfigError([f"give {' or '.join(said)}{', not both' if len(said) == 2 else ': one of them'}"])
    dtype = settings.get("dtype")
    if dtype is not None and given == ["handler"]:
        raise ConfigError([f"{words('dtype', dtype)} is for --hf-encoder, --hf and --gguf; a handler of your own says itself what it uses"])
    if dtype is not None and dtype.value not in DTYPES:
        raise ConfigError([f"{words('dtype', dtype)}={dtype.value!r}: choose one of {', '.join(map(repr, DTYPES))}"])
    for key in GENERATION:
        if key not in settings:
            continue
        value = settings[key].value
        if given[0] not in ("hf", "gguf"):
            raise ConfigError([f"{words(key, settings[key])} is for --hf and --gguf"])
        if not isinstance(value, bool) and value < 1:
            raise ConfigError([f"{words(key, settings[key])} {value}: give at least 1"])


def handler_of(settings: Mapping[str, Setting], options: dict[str, Any]) -> Any:
    """The handler to start a worker with; for an encoder, adds length_buckets to options that bound no length.

    Raises OSError, ValueError, ModuleNotFoundError or ConfigError for what cannot be served.
    """
    key = next(key for key in SERVED if key in settings)
    about = settings[key].value
    more = {name: settings[name].value for name in MODEL if name in settings}
    if key == "hf_encoder":
        return _encoder(about, options, more.get("dtype"))
    if key == "hf":
        _need("--hf", "hf")
        return Recipe(DECODER, check_directory(about), more)
    if key == "gguf":
        _need("--gguf", "llm")
        return Recipe(DECODER, check_directory(gguf.converted(about)), more)
    return about


def _encoder(directory: str, options: dict[str, Any], dtype: str | None) -> Recipe:
    _need("--hf-encoder", "hf")
    limits = (EncoderFiles.read(directory).max_length, WorkerOptions.of(options).longest)
    longest = min(limit for limit in limits if limit)
    if not {"length_buckets", "max_length"} & options.keys():
        options["length_buckets"] = buckets(longest)
    return Recipe(ENCODER, directory, {"dtype": dtype, "max_length": longest})


def _need(what: str, extra: str) -> None:
    for package in ("torch", "transformers", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError([f"{what} needs {package}: pip install 'gpuworker[{extra}]'"])
