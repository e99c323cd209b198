"""`gpuworker config check` and `gpuworker config show`: is a file right, and what does a worker get from where?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import Any

from gpuworker.cli.stdout import show
from gpuworker.cli.target import CommandError, worker_name
from gpuworker.cli.text import count, setting, table
from gpuworker.config import file, layers
from gpuworker.config.keys import Setting
from gpuworker.config.settings import Settings, settings
from gpuworker.errors import ConfigError
from gpuworker.worker import WorkerOptions


def add_to(commands: Any) -> None:
    """Adds the commands to the parser."""
    about = "check a configuration file, or show what a worker gets"
    parser = commands.add_parser("config", help=about, description=f"{about.capitalize()}: docs/configuration.md", allow_abbrev=False)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, parser_class=type(parser))
    check = actions.add_parser(
        "check",
        help="check a file",
        description="Checks a configuration file as it is, without the environment: form, names, types, ranges, options that contradict each other. Prints "
        "every mistake with its line. Exit code 1 when there is one. Files of models and the handler's code are not looked at.",
        allow_abbrev=False,
    )
    check.add_argument("file", metavar="FILE")
    check.set_defaults(run=run_check)
    shower = actions.add_parser(
        "show",
        help="show all options of a worker, and where each comes from",
        description="Shows all options that `gpuworker serve` would start a worker with, and where each comes from: environment, file or default.",
        allow_abbrev=False,
    )
    name = shower.add_argument("name", metavar="NAME", type=worker_name, help="which worker (default: GPUWORKER_NAME, or the file's only one)")
    name.required = False
    shower.add_argument("--config", metavar="FILE", help="the file (default: the one in GPUWORKER_CONFIG)")
    shower.add_argument("--json", action="store_true", help="print one JSON document")
    shower.set_defaults(run=run_show)


def run_check(args: argparse.Namespace) -> int:
    """Checks a file."""
    workers = file.read(args.file)
    problems: list[str] = []
    for name, table_ in workers.items():
        try:
            Settings(name, table_).checked()
        except ConfigError as error:
            problems += [problem if problem.startswith(args.file) else f"{args.file}: worker {name!r}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    show(f"{args.file}: {count(len(workers), 'worker')}: {', '.join(workers)}\n")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Shows a worker's settings."""
    if not args.config and not os.environ.get(layers.FILE):
        raise CommandError(f"which file? give --config FILE, or set {layers.FILE}")
    found = settings(args.config, args.name, {}, os.environ).checked()
    values = everything(found)
    if args.json:
        show(json.dumps({"name": found.name, "settings": {key: one._asdict() for key, one in values.items()}}, indent=2) + "\n")
    else:
        rows = [("SETTING", "VALUE", "FROM"), *((key, setting(one.value), one.origin) for key, one in values.items())]
        show("\n".join([f"worker {found.name!r}", "", *table(rows, "<<<")]) + "\n")
    return 0


def everything(found: Settings) -> dict[str, Setting]:
    """What is set, first; then the defaults."""
    defaults = {field.name: Setting(field.default, "default") for field in dataclasses.fields(WorkerOptions)}
    return {**found.values, **{key: default for key, default in defaults.items() if key not in found.values}}
