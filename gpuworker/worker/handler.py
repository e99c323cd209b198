"""The user's code: a function, a class, or the name of either."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from gpuworker.scheduling.sizes import doubling
from gpuworker.worker.options import WorkerOptions

log = logging.getLogger("gpuworker")


class Handler:
    """`run_batch` and what may come with it, whatever form the user gave it in. Made in the owner; `load` makes an instance of a class."""

    def __init__(self, source: Any) -> None:
        self._target = locate(source) if isinstance(source, str) else source
        self.name = source if isinstance(source, str) else name_of(source)
        self.is_generating = hasattr(self._target, "make_loop")
        is_runnable = self.is_generating or callable(getattr(self._target, "run_batch", None))
        if not is_runnable and (inspect.isclass(self._target) or not callable(self._target)):
            raise TypeError(
                f"handler {self.name} has no run_batch(requests: list) -> list; give a function, a class with that method, an instance, or 'module:attr'"
            )
        self.source = getattr(sys.modules.get(getattr(self._target, "__module__", "") or ""), "__file__", None) or ""
        self._loaded = False
        self.run_batch: Callable[[list[Any]], Any] = self._not_loaded
        self.length: Callable[[Any], int] | None = None
        self.examples: list[Any] = []
        self.make_runner: Callable[..., Any] | None = None
        """Of a TensorHandler that has loaded: makes the Runner of its batches."""
        self.make_loop: Callable[..., Any] | None = None
        """Of a GenerationHandler that has loaded: makes the Loop that serves its requests."""
        self.contract: dict[str, Any] | None = None
        """Of a TensorHandler that has loaded: what its clients have to know."""

    def suited(self, options: WorkerOptions) -> WorkerOptions:
        """The options with defaults that are this handler's: a TensorHandler pads its batches."""
        if hasattr(self._target, "make_runner") and not options.sizes:
            return dataclasses.replace(options, allowed_batch_sizes=tuple(doubling(options.max_batch_size)))
        return options

    def load(self, options: WorkerOptions | None = None) -> None:
        """Instantiates a class, calls its `load()`, and runs its `warmup()` examples once. Raises ValueError where the options are not for this handler."""
        target: Any = self._target() if inspect.isclass(self._target) else self._target
        self._target = target
        is_tensor_handler = callable(getattr(target, "make_runner", None))
        if is_tensor_handler or self.is_generating:
            target.configure(options)
        elif options is not None and options.device_options:
            raise ValueError(f"{options.device_options[0]}: {self.name} runs its batches by itself; this option is for a gpuworker.TensorHandler")
        if callable(getattr(target, "load", None)):
            target.load()
        self._loaded = True
        if is_tensor_handler:
            target.prepare()
            self.make_runner, self.contract = target.make_runner, target.contract()
        if self.is_generating:
            target.prepare()
            self.make_loop, self.contract = target.make_loop, target.contract()
            return
        self.run_batch = getattr(target, "run_batch", None) or target
        length = getattr(target, "length", None)
        self.length = length if callable(length) else None
        if callable(getattr(target, "warmup", None)):
            examples = target.warmup()
            if examples is not None:
                self.examples = list(examples)
                self.run_batch(self.examples[:])

    def close(self) -> None:
        """Calls the `close()` of a handler that has one and was loaded. An error in it is logged: it must not hide why the owner ends."""
        if self._loaded and callable(getattr(self._target, "close", None)):
            try:
                self._target.close()
            except Exception:
                log.exception("close() of %s failed", self.name)

    def _not_loaded(self, requests: list[Any]) -> Any:
        raise RuntimeError("the handler has not been loaded")


def locate(path: str) -> Any:
    """The object that "package.module:attribute" names. Raises ValueError, ImportError or AttributeError saying what is wrong."""
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise ValueError(f"handler {path!r}: write it as 'module:attribute', e.g. 'myapp.model:run_batch'")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a console script does not look in the current directory
    target = importlib.import_module(module_name)
    for part in attribute.split("."):
        target = getattr(target, part)
    return target


def name_of(source: Any) -> str:
    """How to call a handler in messages."""
    named = source if hasattr(source, "__qualname__") else type(source)
    return f"{named.__module__}:{named.__qualname__}"
