"""`gpuworker doctor`: is this machine fit for workers, and has anything been left behind?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from typing import Any

from gpuworker.cli.stdout import show
from gpuworker.cli.text import WIDTH, count


@dataclasses.dataclass(frozen=True)
class Check:
    """What one look found. `level`: "OK", "WARN" (works, but read the advice) or "FAIL" (a worker will not run)."""

    what: str
    level: str
    found: str
    advice: str = ""


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, and look for leftovers",
        description="Checks whether this machine is fit for workers, and looks for leftovers. Exit code 1 when something fails.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--clean", action="store_true", help="only remove what dead processes of this user have left in /dev/shm; what anybody may still use stays"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Checks everything, or cleans up."""
    if args.clean:
        return clean(args.json)
    from gpuworker.cli import checks  # not for the other commands: it needs more of the standard library than all of them

    found = checks.everything()
    failed = any(check.level == "FAIL" for check in found)
    if args.json:
        show(json.dumps({"ok": not failed, "checks": [dataclasses.asdict(check) for check in found]}, indent=2) + "\n")
    else:
        show("\n".join(report(found)) + "\n")
    return int(failed)


def clean(as_json: bool) -> int:
    """Removes leftovers, and says which."""
    from gpuworker.cli import cleaning

    removed, unknown = cleaning.clean()
    if as_json:
        show(json.dumps({"removed": [part._asdict() for part in removed], "unknown": unknown}, indent=2) + "\n")
    else:
        lines = [f"removed {part}" for part in removed] or ["nothing to remove"]
        show("\n".join(lines + [f"left alone: {line}" for line in unknown]) + "\n")
    return 0


def report(found: list[Check]) -> list[str]:
    """The checks as lines of 80 columns, and a summary."""
    lines = []
    wide = max(len(check.what) for check in found)
    for check in found:
        head = f"{check.level:4}  {check.what:{wide}}  "
        lines += textwrap.wrap(check.found, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
        if check.advice:
            indent = " " * len(head)
            lines += textwrap.wrap(check.advice, WIDTH, initial_indent=f"{indent}-> ", subsequent_indent=f"{indent}   ", break_on_hyphens=False)
    bad, doubtful = (sum(check.level == level for check in found) for level in ("FAIL", "WARN"))
    return [*lines, "", f"{count(bad, 'failure')}, {count(doubtful, 'warning')}" if bad or doubtful else "everything is fine"]
