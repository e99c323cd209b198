"""What the small files of a decoder's directory say, read without torch and transformers: `gpuworker serve` checks a directory by it."""

from __future__ import annotations

import numbers
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuworker.execution.model_directory import DTYPES, check_files, check_unquantised, read_json
from gpuworker.sampling import shown

if TYPE_CHECKING:
    from gpuworker.generation.handler import GenerationHandler

GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""What the names of classes end in that generate text. ("ForConditionalGeneration" is a decoder with eyes or ears too, unless is_encoder_decoder.)"""


def check_directory(directory: str | os.PathLike[str]) -> str:
    """-> its absolute path. Raises OSError or ValueError, with what is wrong and what to do, for one that GenerationHandler cannot serve; whether the model's
    attention can be paged is seen when it is loaded."""
    root = Path(os.path.abspath(directory))
    if root.is_file() and root.suffix == ".gguf":
        raise NotADirectoryError(f"{root} is a file of weights, not a directory; serve it with --gguf")
    check_files(root)
    config = read_json(root / "config.json")
    check_kind(root, config)
    return str(root)


def check_kind(root: Path, config: dict[str, Any]) -> None:
    """ValueError for a model that generates no text, or whose weights are quantised. config: its config.json."""
    check_unquantised(root, config)
    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    kind = ", ".join(names) or config.get("model_type")
    if config.get("is_encoder_decoder") is True:
        raise ValueError(f"{root} is an encoder with a decoder ({kind}); a decoder alone is needed")
    if names and not any(name.endswith(GENERATING) for name in names):
        raise ValueError(f"{root} holds {kind}, which generates no text; an encoder is served with --hf-encoder")


def check_given(handler: GenerationHandler) -> None:
    """TypeError or ValueError for what a GenerationHandler cannot be made with: the argument, its value, and what to give."""
    if not isinstance(handler.directory, (str, os.PathLike)) or not os.fspath(handler.directory):
        raise TypeError(f"directory={shown(handler.directory)}: give the path of a model's directory, as a str or a pathlib.Path")
    if handler.dtype not in (None, *DTYPES):
        raise ValueError(f"dtype={shown(handler.dtype)}: give one of {', '.join(map(repr, DTYPES))}, or None: as saved")
    if handler.device is not None and not isinstance(handler.device, str):
        raise TypeError(f"device={shown(handler.device)}: give a str, as in 'cpu', 'cuda' or 'cuda:1', or None: cuda if there is one")
    for name, wanted in (("max_model_tokens", "how many tokens"), ("kv_cache_bytes", "how many bytes, e.g. 2 * 1024**3")):
        value = getattr(handler, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1):
            raise ValueError(f"{name}={shown(value)}: give {wanted}, as an integer of at least 1, or None")
    for name in ("prefix_caching", "cuda_graphs"):
        if not isinstance(getattr(handler, name), bool):
            raise ValueError(f"{name}={shown(getattr(handler, name))}: give True or False")
