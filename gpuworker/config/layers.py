"""The one rule of precedence: flags (or a program's own arguments) before the environment, that before the file, that before the defaults.

Key by key. What is served (handler, hf_encoder, hf or gguf) is one setting: a nearer layer that names one of them sets aside the others of layers behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuworker.config.keys import KEYS, SERVED, Setting, nearest, of_text
from gpuworker.errors import ConfigError

PREFIX = "GPUWORKER_"
FILE, NAME = PREFIX + "CONFIG", PREFIX + "NAME"
OTHERS = ("CONFIG", "NAME", "LOG", "LOG_FORMAT", "TRACING", "SANITIZE", "FAILPOINT", "FAILPOINTS")
"""Variables that are no setting of a worker."""
MISTYPED = 0.85
"""How like a setting an unknown variable has to be to be refused. Kubernetes sets GPUWORKER_SERVICE_HOST and more, for a service of that name."""


def environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    """The settings in GPUWORKER_<KEY>; an empty one is none. Raises ConfigError with every value that is not right and every name that is nearly right."""
    settings: dict[str, Setting] = {}
    problems: list[str] = []
    names = [*map(str.upper, KEYS), *OTHERS]
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or not text:
            continue
        name = variable[len(PREFIX) :]
        if name in OTHERS:
            continue
        if name.lower() in KEYS and name.isupper():
            try:
                settings[name.lower()] = Setting(of_text(name.lower(), text), variable)
            except ValueError as error:
                problems.append(f"{variable}={error}")
        elif near := nearest(name, names, MISTYPED):
            problems.append(f"unknown environment variable {variable}; did you mean {PREFIX}{near}?")
    if problems:
        raise ConfigError(problems)
    return settings


def layered(*layers: Mapping[str, Setting]) -> dict[str, Setting]:
    """All settings; `layers` from the farthest to the nearest."""
    settings: dict[str, Setting] = {}
    for layer in layers:
        if any(key in layer for key in SERVED):
            settings = {key: setting for key, setting in settings.items() if key not in SERVED}
        settings.update(layer)
    return settings
