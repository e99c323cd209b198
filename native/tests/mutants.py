"""Is killstep worth anything? Puts the mistakes of mutants.txt, one after the other, into a copy of the ring, and requires that killstep finds each.

python3 mutants.py [WORD ...]    only those whose name has the word in it
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
# As shipped but for the debugger's symbols; and who is stuck is found out sooner.
COMPILE = [*shlex.split(os.environ.get("CC", "cc")), "-std=c11", "-O2", "-g", "-pthread", "-static", "-w", "-DPATIENCE_NS=3000000000ull"]


class Mutant(NamedTuple):
    """`only`: where killstep must find it. `edits`: lines replaced, and by which."""

    name: str
    only: str
    file: str
    edits: list[tuple[list[str], list[str]]]


def read_mutants(text: str) -> list[Mutant]:
    """The contents of mutants.txt."""
    mutants = []
    for block in text.split("\n== ")[1:]:
        head, _, body = block.partition("\n")
        edits = []
        for hunk in body.strip().split("\n\n"):
            lines = hunk.splitlines()
            edits.append(([line[2:] for line in lines if line.startswith("- ")], [line[2:] for line in lines if line.startswith("+ ")]))
        name, only, file = head.split(" | ")
        mutants.append(Mutant(name, only, file, edits))
    return mutants


def mutate(text: str, mutant: Mutant) -> str:
    """The source with the mistake in. Raises SystemExit when an edit does not fit it."""
    text = re.sub(r"^ *GW_POINT\(\w+\);\n", "", text, flags=re.MULTILINE)
    for old, new in mutant.edits:
        pattern = r"\s*".join(map(re.escape, old))
        found = re.findall(pattern, text)
        if len(found) != 1:
            raise SystemExit(f"mutants.txt, {mutant.name!r}: this is {len(found)} times in {mutant.file}:\n" + "\n".join(old))
        text = re.sub(pattern, lambda _, new=new: "\n".join(new), text)
    return text


def build(mutant: Mutant, directory: pathlib.Path) -> pathlib.Path:
    """A killstep of the mutated ring."""
    shutil.copytree(HERE.parent, directory, ignore=shutil.ignore_patterns("build", "model", "*.py"))
    source = directory / mutant.file
    source.write_text(mutate(source.read_text(), mutant))
    program = directory / "killstep"
    subprocess.run([*COMPILE, "-o", program, directory / "tests/killstep.c", *directory.glob("*.c")], check=True)
    return program


def main(words: list[str]) -> int:
    """Runs them. -> how many survived."""
    survivors = 0
    for mutant in read_mutants((HERE / "mutants.txt").read_text()):
        if words and not any(word in mutant.name for word in words):
            continue
        with tempfile.TemporaryDirectory() as directory:
            program = build(mutant, pathlib.Path(directory) / "native")
            start_s = time.monotonic()
            run = subprocess.run([program, "--only", mutant.only], capture_output=True, text=True)
        found = re.search(r"FAILED in (\S+ at step \d+)", run.stderr)
        survivors += found is None
        print(f"{mutant.name}: {f'found in {found[1]}' if found else 'NOT FOUND'}, {time.monotonic() - start_s:.1f} s", flush=True)
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
