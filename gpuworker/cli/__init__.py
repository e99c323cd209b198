"""The command `gpuworker` and its parts. Exit codes: 0 done, 1 refused or failed (one line on stderr says why), 2 wrong usage."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any

from gpuworker import __version__
from gpuworker.cli import config, control, dashboard, doctor, health, http, inspect, metrics, pausing, run, serve, simulate, top, tune
from gpuworker.errors import GpuWorkerError

__all__ = ["main"]

KILLED_BY_SIGPIPE = 128 + 13


class CommandParser(argparse.ArgumentParser):
    """Parser of one command; a mistyped option is refused with the nearest right one, before anything else is found missing."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, but for what follows `--` where the command takes a command of its own (`command` among its defaults)."""
        args = sys.argv[1:] if args is None else list(args)
        command = args[args.index("--") + 1 :] if self.get_default("command") is not None and "--" in args else None
        if command is not None:
            args = args[: args.index("--")]
        flags = [flag for action in self._actions for flag in action.option_strings]
        for arg in args if self._subparsers is None else ():
            flag = arg.partition("=")[0]
            if flag == "--":
                break
            if flag.startswith("--") and flag not in flags:
                near = difflib.get_close_matches(flag, flags, n=1)
                self.error(f"unknown option {flag}" + (f"; did you mean {near[0]}?" if near else ""))
        parsed, unknown = super().parse_known_args(args, namespace)
        if command is not None:
            parsed.command = command
        return parsed, unknown


def build_parser() -> argparse.ArgumentParser:
    """Each command's parser sets `run`, a function from the parsed arguments to the exit code."""
    parser = argparse.ArgumentParser(
        "gpuworker",
        description="One GPU owner process, called from many Python processes.",
        epilog="Exit codes: 0 done, 1 refused or failed (a line on stderr says why), 2 wrong usage.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gpuworker {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    for module in (serve, run, http, config, inspect, top, dashboard, metrics, health, control, pausing, doctor, simulate, tune):
        module.add_to(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. -> the exit code."""
    try:
        args = build_parser().parse_args(argv)
        code: int = args.run(args)
        return code
    except GpuWorkerError as error:
        print(f"gpuworker: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `gpuworker list | head`
        return KILLED_BY_SIGPIPE
    except KeyboardInterrupt:
        return 130
