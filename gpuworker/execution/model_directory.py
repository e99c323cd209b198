"""A directory that save_pretrained has written, as far as that can be told without torch and transformers; for encoders and decoders alike."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
"""Of weights and computation, by choice."""
ENCODER, DECODER = "gpuworker.execution.encoder:HFEncoder", "gpuworker.generation.handler:GenerationHandler"
"""Handlers that are made of a directory, as "module:class"."""


class Recipe:
    """Becomes a handler where it is unpickled, that is in the owner: whoever starts one with this has no need of torch."""

    def __init__(self, handler: str, directory: str | os.PathLike[str], options: dict[str, Any]) -> None:
        """handler: ENCODER or DECODER, which is made of the directory and these options."""
        self._made_of = handler, os.path.abspath(directory), options

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self._made_of == other._made_of

    def __hash__(self) -> int:
        return hash(self._made_of[:2])

    def __reduce__(self) -> tuple[Callable[[str, str, dict[str, Any]], Any], tuple[str, str, dict[str, Any]]]:
        return _make, self._made_of


def _make(handler: str, directory: str, options: dict[str, Any]) -> Any:
    module, _, name = handler.partition(":")
    return getattr(importlib.import_module(module), name)(directory, **options)


def check_files(root: Path) -> None:
    """FileNotFoundError for one that lacks what every model needs, with what to do."""
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no directory; give one that save_pretrained has written (nothing is downloaded)")
    if not (root / "config.json").is_file():
        raise FileNotFoundError(f"{root} has no config.json; give a directory that save_pretrained has written")
    check_weights(root)
    if not (root / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"{root} has no tokenizer.json, which is what clients tokenise with; AutoTokenizer.from_pretrained(...).save_pretrained({str(root)!r}) writes one, "
            "unless the model has a slow tokenizer only"
        )


def check_weights(root: Path) -> None:
    """FileNotFoundError where there are none, or not all files of them."""
    index = root / "model.safetensors.index.json"
    if index.is_file():
        parts = read_json(index).get("weight_map")
        names = sorted({str(name) for name in parts.values()}) if isinstance(parts, dict) else []
        absent = [name for name in names if not (root / name).is_file()]
        if absent:
            raise FileNotFoundError(f"{root} has not all of its weights: {absent[0]} is missing, of {len(names)} files that {index.name} names")
    elif not (root / "model.safetensors").is_file():
        pickled = "; pytorch_model.bin is a pickle, which may run any code: load it and save_pretrained it once"
        raise FileNotFoundError(f"{root} has no weights: there is no model.safetensors{pickled if (root / 'pytorch_model.bin').exists() else ''}")


def check_unquantised(root: Path, config: dict[str, Any]) -> None:
    """ValueError for weights that are kept in fewer bits: each way of that needs kernels and packages of its own. config: its config.json."""
    quantised = config.get("quantization_config")
    if quantised:
        how = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ValueError(
            f"{root} holds quantised weights ({how or 'quantization_config'}), which are not supported; give the directory of the model itself, or a GGUF file"
        )


def read_json(file: Path, kind: type = dict) -> Any:
    """The file's contents; empty where there is no such file. Raises ValueError for what is no JSON, or not of this kind."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return kind()
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"{file}: a JSON {'object' if kind is dict else 'list'} is needed")
    return value
