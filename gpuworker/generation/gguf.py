"""GGUF files, as llama.cpp has them: turned once into a directory as transformers saves it, which loads ten times as fast and is then served like any other.

The directory is kept in the user's cache. Weights are unpacked to float32, which every quantisation of them fits into exactly; so it is several times as large as
the file. It may be deleted at any time when no worker is starting.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpuworker.worker.cost_file import cache_directory

log = logging.getLogger("gpuworker")

MAGIC = b"GGUF"
NEEDED = ("torch", "transformers", "tokenizers", "gguf", "accelerate")
_FORMAT = 1
"""Of what is kept: another one has another name."""
_SAID = "gguf: "
"""Before what a conversion says to whoever started it."""
_PR_SET_PDEATHSIG = 1


def converted(file: str | os.PathLike[str]) -> str:
    """-> the directory that is made of the file, by a process of its own if there is none yet; torch is not imported here.

    Of two that ask at once, one makes it and the other waits. Raises OSError or ValueError for a file that cannot be turned into one, ModuleNotFoundError
    naming what is lacking.
    """
    path, directory = _check(file), directory_of(file)
    if directory.is_dir():
        log.info("%s was converted earlier: %s", path, directory)
        return str(directory)
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"a GGUF file is converted with {package}: pip install 'gpuworker[llm]'", name=package)
    log.info("converting %s once, into %s", path, directory)
    began_s = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-m", __name__, str(path), str(directory), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
    )
    if run.returncode:
        words = run.stderr.decode(errors="replace").strip()
        said = words.rpartition("\n")[2]
        log.debug("the conversion said: %s", words)
        reason = said.removeprefix(_SAID) if said.startswith(_SAID) else f"the conversion ended with status {run.returncode}; {said}"
        raise ValueError(f"{path} cannot be served: {reason}")
    log.info("converted in %.0f s; the next start takes it from %s", time.monotonic() - began_s, directory)
    return str(directory)


def directory_of(file: str | os.PathLike[str]) -> Path:
    """Where the file's directory is, or will be: it depends on where the file is, its size and when it was written. Raises OSError where there is no file."""
    path = os.path.realpath(file)
    status = os.stat(path)
    told = f"{_FORMAT}\0{path}\0{status.st_size}\0{status.st_mtime_ns}"
    return cache_directory().parent / "gguf" / hashlib.sha256(told.encode()).hexdigest()[:24]


def _check(file: str | os.PathLike[str]) -> Path:
    path = Path(os.path.abspath(file))
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; serve one that save_pretrained has written with --hf")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file (nothing is downloaded)")
    with path.open("rb") as opened:
        start = opened.read(len(MAGIC))
    if start != MAGIC:
        raise ValueError(f"{path} is no GGUF file: it begins with {start!r}")
    return path


def convert(path: Path, directory: Path) -> None:
    """Makes the directory, unless it is there by now. It appears when it is whole. Raises what transformers raises."""
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _only_one(directory):
        if directory.is_dir():
            return
        partial = directory.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of one that was killed: nobody else is here
        try:
            _save(path, partial)
            os.rename(partial, directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """One process at a time. The lock goes with whoever holds it, however that ends."""
    with open(directory.with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _save(path: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False  # its weights are plain by now, and it would refuse to be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _main(path: str, directory: str, parent: str) -> int:
    """In the process that converts: ends with the one that waits for it. Its last line says what has gone wrong."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return 1
    try:
        convert(Path(path), Path(directory))
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"\n{_SAID}{reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
