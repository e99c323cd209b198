"""The fenced blocks of README.md and docs/*.md, and what an HTML comment in front of one says about it.

A comment on the lines before a fence: `<!-- serves -->`: the worker that this command starts is there for the rest of the page, as a process of its own;
`<!-- run by tests/test_x.py -->`: that file reads the page and runs its blocks; `<!-- not run: why -->`. Blocks whose first line is a comment with
a file's name (`# model.py: ...`) are that file.
"""

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "console", "toml", "json", "yaml", "text"}
NOTES = re.compile(r"serves|run by tests/test_\w+\.py|not run: .+")
_FENCE = re.compile(r"( *)```(\w*)")
_NOTE = re.compile(r"<!-- (.*) -->")
_FILE = re.compile(r"# ([\w.]+\.(?:py|toml))(?:\s|:|$)")


@dataclasses.dataclass(frozen=True)
class Block:
    page: pathlib.Path
    line: int  # of its first line, from 1
    language: str
    text: str
    note: str  # "" where there is none

    @property
    def file(self):
        """The name of the file that this is, or None."""
        match = _FILE.match(self.text)
        return match[1] if match else None

    @property
    def where(self):
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self):
        """(command, the lines that it prints) of a console block; comments and continued lines are dealt with."""
        found = []
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found.append((re.sub(r"\s+#\s.*", "", line[2:]), []))
            elif line.strip():
                assert found, f"{self.where}: output without a command"
                found[-1][1].append(line)
        return found


def blocks_of(page):
    """In the page's order. A fence that is not closed, or that names no language, is an error."""
    found, note, lines = [], "", page.read_text().splitlines()
    at = 0
    while at < len(lines):
        fence, comment = _FENCE.match(lines[at]), _NOTE.fullmatch(lines[at])
        if fence:
            end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == "```"), None)
            assert end is not None, f"{page.name}:{at + 1}: a fence without an end"
            indent = len(fence[1])
            found.append(Block(page, at + 2, fence[2], "\n".join(line[indent:] for line in lines[at + 1 : end]) + "\n", note))
            at = end
        if comment:
            note = comment[1]
        elif lines[at].strip():
            note = ""
        at += 1
    return found
