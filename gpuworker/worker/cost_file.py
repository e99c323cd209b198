"""Run times kept from one life of a worker to the next, in a small file per handler and device."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("gpuworker")

FORMAT = 1
MOST_BYTES = 1 << 20
START = b'{"format":'
"""Of every file of ours."""


class CostFile:
    """What a cost model knows (CostModel.to_dict), on disk. Neither a bad file nor a bad directory is an error: there is one line in the log, and the model
    starts cold.

    setting: a path, "off", or "auto": a file of its own per handler and device, in $XDG_CACHE_HOME or ~/.cache. Use it when the handler has been loaded:
    the device is known from then on. source: where the handler's code is: every script's own function is called __main__:run_batch. Whatever else lies at a
    path that is given stays: only a file of ours is ever replaced.
    """

    def __init__(self, setting: str, handler_name: str, source: str = "") -> None:
        self._setting, self._handler_name, self._source = setting, handler_name, source
        self._has_failed = False

    @property
    def path(self) -> Path | None:
        """Where the file is or would be; None when off. Raises RuntimeError if there is no home directory."""
        if self._setting == "off":
            return None
        if self._setting != "auto":
            return Path(self._setting).expanduser()
        return cache_directory() / file_name(self._handler_name, device_name(), self._source)

    def load(self) -> dict[str, Any] | None:
        """What was saved for this handler on this device, or None."""
        try:
            path = self.path
            data = _read(path) if path else None
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("the run times saved for %s are not used: %s", self._handler_name, error)
            return None
        if data is None:
            return None
        try:
            return self._contents(json.loads(data))
        except (ValueError, RecursionError) as error:
            log.warning("the run times in %s are not used: %s", path, error)
            return None

    def save(self, costs: Mapping[str, Any]) -> None:
        """Replaces the file by one with `costs`, in one step, readable by its owner only. The first failure is logged, later ones are not."""
        try:
            path = self.path
            if path:
                if self._setting != "auto" and not is_replaceable(path):
                    raise ValueError(f"{path} is something else; remove it, or name another cost_file")
                contents = {"format": FORMAT, "handler": self._handler_name, "device": device_name(), "costs": costs}
                _write(path, json.dumps(contents, separators=(",", ":")))
        except (OSError, ValueError, RuntimeError) as error:
            if not self._has_failed:
                log.warning("the run times of %s cannot be saved: %s", self._handler_name, error)
            self._has_failed = True

    def _contents(self, saved: Any) -> dict[str, Any]:
        if not isinstance(saved, dict) or not isinstance(saved.get("costs"), dict):
            raise ValueError("it is not a file of run times")
        wanted = {"format": FORMAT, "handler": self._handler_name, "device": device_name()}
        for name, value in wanted.items():
            if saved.get(name) != value:
                raise ValueError(f"its {name} is {str(saved.get(name))[:80]!r}, not {value!r}")
        costs: dict[str, Any] = saved["costs"]
        return costs


def is_replaceable(path: Path) -> bool:
    """Whether there is nothing yet, an empty file, or one of ours, be it broken, of another version or another handler's."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            start = file.read(len(START)) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b"?"
    except FileNotFoundError:
        return True
    return start in (b"", START)


def cache_directory() -> Path:
    """Where such files live by default. Raises RuntimeError if there is no home directory."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "gpuworker" / "costs"


def file_name(handler_name: str, device: str, source: str = "") -> str:
    """Readable, and no two the same for different handlers, devices or source files."""
    digest = hashlib.sha256(f"{handler_name}\0{device}\0{source}".encode(errors="surrogatepass")).hexdigest()[:12]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{handler_name} on {device}").strip(".-")
    return f"{readable[:120]}-{digest}.json"


def device_name() -> str:
    """The GPU that torch uses in this process, if it does; else the processor. torch is not imported, and CUDA not initialised, to find out."""
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):  # a half-imported or broken torch, a lost device: whatever it is, it must not stop a worker
        if torch is not None and torch.cuda.is_initialized():
            return str(torch.cuda.get_device_name())
    with contextlib.suppress(OSError, UnicodeError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "cpu"


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO in its place must not stop us
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not a file")
        data = os.read(descriptor, MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path} is larger than {MOST_BYTES} bytes")
    return data


def _write(path: Path, text: str) -> None:
    if len(text) > MOST_BYTES:
        raise ValueError(f"they take more than {MOST_BYTES} bytes")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")  # mode 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
