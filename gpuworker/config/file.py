"""The TOML file: a table [workers.NAME] for each worker, its keys those of keys.py. Mistakes are named with their line, all of them at once."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from gpuworker.config.keys import KEYS, Setting, nearest, of_toml
from gpuworker.errors import ConfigError
from gpuworker.segment.names import shm_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST_BYTES = 1 << 20
"""Of a file of settings; what is larger is something else, or has no end."""
_POSITION = re.compile(r"(.*) \(at line (\d+), column \d+\)", re.DOTALL)


def read(path: str | os.PathLike[str]) -> dict[str, dict[str, Setting]]:
    """The settings of each worker in the file, by name. Raises ConfigError with every mistake of form, unknown key and wrong type."""
    file = os.fspath(path)
    try:
        with open(file, "rb") as stream:
            raw = stream.read(LARGEST_BYTES + 1)
        if len(raw) > LARGEST_BYTES:
            raise ConfigError([f"{file}: it is larger than {LARGEST_BYTES:,} bytes: not a file of settings"])
        text = raw.decode("utf-8-sig")
        document = tomllib.loads(text)
    except OSError as error:
        raise ConfigError([f"{file}: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{file}: it is not UTF-8 ({error.reason})"]) from None
    except tomllib.TOMLDecodeError as error:
        found = _POSITION.fullmatch(str(error))
        raise ConfigError([f"{file}:{found[2]}: {found[1]}" if found else f"{file}: {error}"]) from None
    except RecursionError:
        raise ConfigError([f"{file}: lists or tables lie too deep within each other"]) from None
    except ValueError as error:  # a path with a null byte in it; a number of more digits than Python converts
        raise ConfigError([f"{str(file)!r}: {error}"]) from None
    return _workers(file, text, document)


def _workers(file: str, text: str, document: dict[str, Any]) -> dict[str, dict[str, Setting]]:
    problems: list[str] = []
    for key in document:
        if key != "workers":
            hint = "; an option belongs under [workers.NAME]" if key in KEYS else "; did you mean 'workers'?" if nearest(key, ["workers"]) else ""
            problems.append(f"{place(file, text, '', key)}: unknown key {key!r}{hint}")
    tables = document.get("workers", {})
    if not isinstance(tables, dict) or not tables:
        problems.append(f"{file}: no worker; begin one with [workers.NAME]")
        tables = {}
    workers: dict[str, dict[str, Setting]] = {}
    for name, table in tables.items():
        try:
            shm_name(name)
        except ValueError as error:
            problems.append(f"{place(file, text, name)}: {error}")
        if not isinstance(table, dict):
            near = nearest(name, KEYS)
            hint = f"; {near!r} belongs under [workers.NAME]" if near else ""
            problems.append(f"{place(file, text, name)}: workers.{name} is no table: begin it with [workers.{name}]{hint}")
            continue
        workers[name] = {}
        for key, value in table.items():
            where = place(file, text, name, key)
            if key not in KEYS:
                near = nearest(key, KEYS)
                problems.append(f"{where}: unknown key {key!r} of worker {name!r}" + (f"; did you mean {near!r}?" if near else ""))
                continue
            try:
                workers[name][key] = Setting(of_toml(key, value), where)
            except ValueError as error:
                problems.append(f"{where}: {error}")
    if problems:
        raise ConfigError(problems)
    return workers


def place(file: str, text: str, worker: str, key: str = "") -> str:
    """FILE:LINE of a worker's key, or of its table; without a line where it is written in a way that this does not follow (a key inline, or dotted).

    The TOML reader of the standard library keeps no positions, so the text is looked through: a line counts if it is the only one of its kind.
    """
    inside, heads, keys = worker == "", [], []
    head = re.compile(rf"\s*\[\s*workers\s*\.\s*([\"']?){re.escape(worker)}\1\s*\]")
    assignment = re.compile(rf"\s*([\"']?){re.escape(key)}\1\s*=") if key else None
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[", line) and not line.strip().endswith(","):  # a list's inner lines may begin so too
            inside = head.match(line) is not None if worker else False
            if inside:
                heads.append(number)
        elif inside and assignment is not None and assignment.match(line):
            keys.append(number)
    for lines in (keys, heads):
        if len(lines) == 1:
            return f"{file}:{lines[0]}"
    return file
