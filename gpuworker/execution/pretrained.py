"""A model from its directory, by transformers: whole, or not at all."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

log = logging.getLogger("gpuworker")


def load_whole(kind: str, directory: str, dtype: Any, is_unused: Callable[[str], bool] = lambda name: False) -> Any:
    """In eval mode, on the CPU. Nothing is downloaded, no pickle is read, and no code of the model's own is run.

    kind: "AutoModel", "AutoModelForCausalLM". dtype: a torch.dtype, or "auto": as saved. is_unused: parameters that may be missing, as nobody looks at them.
    transformers would give the others random values, and say so. Raises ImportError without transformers, OSError or ValueError for files that make no whole model.
    """
    try:
        import transformers
        from safetensors import SafetensorError
    except ImportError as error:
        raise ImportError(f"a model's directory is read by transformers: pip install 'gpuworker[hf]' ({error})") from error
    with _quietly():
        try:
            model, report = getattr(transformers, kind).from_pretrained(
                directory,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # and refused below, in words of ours
            )
        except SafetensorError as error:
            raise ValueError(f"{directory}: its weights cannot be read ({error}); is the file whole?") from error
    what = f"parameters of {type(model).__name__}"
    missing = sorted(name for name in report["missing_keys"] if not is_unused(name))
    if missing:
        raise ValueError(f"{directory} has no weights for {len(missing)} {what}: {_some(missing)}")
    mismatched = sorted(f"{name} is {list(saved)} and should be {list(wanted)}" for name, saved, wanted in report["mismatched_keys"])
    if mismatched:
        raise ValueError(f"{directory} has weights of other shapes for {len(mismatched)} {what}: {_some(mismatched)}")
    unexpected = sorted(report["unexpected_keys"])
    if unexpected:
        log.warning("%s has weights that %s has no use for, %d of them: %s", directory, type(model).__name__, len(unexpected), _some(unexpected))
    return model.eval()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without bars of progress, and without a report on stderr of what we read ourselves."""
    from transformers.utils import logging as said

    voice: Any = said
    has_bar, level = voice.is_progress_bar_enabled(), voice.get_verbosity()
    voice.disable_progress_bar()
    voice.set_verbosity_error()
    try:
        yield
    finally:
        voice.set_verbosity(level)
        if has_bar:
            voice.enable_progress_bar()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
