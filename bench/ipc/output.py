"""What every bench leaves: on the terminal where it has got to, in a folder its tables, figures and picture."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def write(
    folder: Path, name: str, text: str, figures: dict[str, Any], draw: Callable[[Path], None] | None = None, said_on: TextIO | None = None
) -> None:
    """The files are called NAME-TIME. draw: of a PNG; without matplotlib (ImportError) there is none. said_on: what to tell of it on, in place of stdout."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / time.strftime(f"{name}-%Y%m%d-%H%M%S")
    stem.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text + "\n")
    written = [".json", ".md"]
    if draw is not None:
        try:
            draw(stem.with_suffix(".png"))
            written.append(".png")
        except ImportError as error:
            print(f"\nno picture: {error}", file=said_on)
    print(f"\nWritten: {stem}{', '.join(written)}", file=said_on)
