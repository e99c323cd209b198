"""From file, environment and arguments to what a worker is started with."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpuworker.config import file, layers, served
from gpuworker.config.keys import KEYS, OPTIONS, Setting, nearest
from gpuworker.errors import ConfigError
from gpuworker.segment.names import shm_name
from gpuworker.worker import WorkerOptions


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """What load_config has found: `gpuworker.Worker(config.handler, name=config.name, **config.options)`."""

    name: str
    handler: Any
    """"module:attr"; or, for a model from a directory, an object that becomes its handler in the owner."""
    options: dict[str, Any]
    """Those that are set, by their names in WorkerOptions."""
    origins: dict[str, str]
    """Where each setting came from: "gpuworker.toml:7", "GPUWORKER_WAKE", "argument"."""


class Settings(NamedTuple):
    """A worker's name and what is set about it, checked one by one and together, but without a look at the model's files."""

    name: str
    values: dict[str, Setting]

    @property
    def options(self) -> dict[str, Any]:
        """Those of WorkerOptions."""
        return {key: setting.value for key, setting in self.values.items() if key in OPTIONS}

    def checked(self) -> Settings:
        """Itself. Raises ConfigError where options are out of range or contradict each other."""
        served.check(self.values)
        try:
            WorkerOptions.of(self.options)
        except ValueError as error:
            raise ConfigError([self.blame(str(error))]) from None
        return self

    def blame(self, message: str) -> str:
        """An error of WorkerOptions with the place where the option was set that it begins with. (A flag needs no pointing at.)"""
        option = re.match(r"\w*", message)
        setting = self.values.get(option[0]) if option else None
        return message if setting is None or setting.origin.startswith("--") else f"{setting.origin}: {message}"

    def config(self) -> WorkerConfig:
        """What to start the worker with. Raises ConfigError for a model that cannot be served."""
        options = self.options
        try:
            handler = served.handler_of(self.values, options)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            raise ConfigError([str(error)]) from None
        return WorkerConfig(self.name, handler, options, {key: setting.origin for key, setting in self.values.items()})


def load_config(path: str | os.PathLike[str] | None = None, name: str | None = None, **arguments: Any) -> WorkerConfig:
    """A worker's settings from a file and the environment.

    path: a TOML file with a table [workers.NAME] for each worker; default: the one that GPUWORKER_CONFIG names, or none. name: which of them; default:
    GPUWORKER_NAME, or the only one. arguments: settings that come before the environment's (GPUWORKER_<OPTION>) and the file's.

    Raises ConfigError for whatever is wrong, with file and line where that is known (for a file that is not there, too), and TypeError for an unknown argument.
    """
    for key in arguments:
        if key not in KEYS:
            near = nearest(key, KEYS)
            raise TypeError(f"unknown setting {key!r}" + (f"; did you mean {near!r}?" if near else ""))
    return settings(path, name, {key: Setting(value, "argument") for key, value in arguments.items()}, os.environ).checked().config()


def settings(path: str | os.PathLike[str] | None, name: str | None, nearest_layer: Mapping[str, Setting], environ: Mapping[str, str]) -> Settings:
    """A worker's settings by the rule of layers.py, not yet checked together. Raises ConfigError."""
    path, name = path or environ.get(layers.FILE) or None, name or environ.get(layers.NAME) or None
    environment = layers.environment(environ)
    table: dict[str, Setting] = {}
    if path is not None:
        workers = file.read(path)
        if name is None and len(workers) == 1:
            (name,) = workers
        if name is None:
            raise ConfigError([f"{os.fspath(path)} has {len(workers)} workers: say which, {', '.join(workers)}"])
        if name not in workers:
            near = nearest(name, workers)
            raise ConfigError(
                [f"{os.fspath(path)}: no worker {name!r} in there" + (f"; did you mean {near!r}?" if near else f", but {', '.join(workers)}")]
            )
        table = workers[name]
    if name is None:
        raise ConfigError(["the worker has no name: give one, or a file that has"])
    try:
        shm_name(name)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    return Settings(name, layers.layered(table, environment, nearest_layer))
