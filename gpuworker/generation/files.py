"""What the small files of a decoder's directory say, read without torch and transformers: `gpuworker serve` checks a directory by it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuworker.execution.encoder_files import _check_files, _json

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
    _check_files(root)
    config = _json(root / "config.json")
    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    kind = ", ".join(names) or config.get("model_type")
    if config.get("is_encoder_decoder") is True:
        raise ValueError(f"{root} is an encoder with a decoder ({kind}); a decoder alone is needed")
    if names and not any(name.endswith(GENERATING) for name in names):
        raise ValueError(f"{root} holds {kind}, which generates no text; an encoder is served with --hf-encoder")
    return str(root)


class DecoderRecipe:
    """Becomes a GenerationHandler where it is unpickled, that is in the owner: whoever starts one with this has no need of torch."""

    def __init__(self, directory: str | os.PathLike[str], options: dict[str, Any]) -> None:
        """options: those of GenerationHandler."""
        self._made_of = os.path.abspath(directory), options

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecoderRecipe) and self._made_of == other._made_of

    def __hash__(self) -> int:
        return hash(self._made_of[0])

    def __reduce__(self) -> tuple[Callable[[str, dict[str, Any]], GenerationHandler], tuple[str, dict[str, Any]]]:
        return _make, self._made_of


def _make(directory: str, options: dict[str, Any]) -> GenerationHandler:
    from gpuworker.generation.handler import GenerationHandler

    return GenerationHandler(directory, **options)
