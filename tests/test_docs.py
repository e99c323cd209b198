"""The documentation is true: every block of README.md and docs/*.md runs, every page is in the site, every test that a page names exists."""

import json
import re
import sys

import pytest
import yaml

from tests.docs_blocks import LANGUAGES, NOTES, PAGES, ROOT, blocks_of
from tests.docs_world import World

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
MOST_NOT_RUN = 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    run_page(page, tmp_path, monkeypatch, capsys)


def run_page(page, tmp_path, monkeypatch, capsys):
    blocks = blocks_of(page)
    with World(page, blocks, tmp_path, monkeypatch) as world:
        for block in blocks:
            assert block.language in LANGUAGES, f"{block.where}: name the language of this block: {LANGUAGES}"
            if block.note in ("", "serves"):
                try:
                    run(block, world, capsys)
                except BaseException as error:
                    if sys.version_info >= (3, 11):
                        error.add_note(f"in the block at {block.where}")
                    raise


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("console", "$ gpuworker serve model:Embedder --max-wait 2"),
        ("console", "$ gpuworker health embed --nonsense"),
        ("console", "$ make sandwich"),
        ("console", "$ pip install 'gpuworker[nonsense]'"),
        ("console", "$ python bench/nonsense.py"),
        ("console", "$ nonsense"),
        ("console", '$ gpuworker simulate --cost "5+0.25b" --latency-budget-ms 26 --load 1.0 --policy ours --requests 200\nours 100.00'),
        ("python", "gpuworker.nonsense"),
        ("python", 'gpuworker.connect("embed").submit()'),
        ("python", 'async with gpuworker.AsyncClient("embed") as client:\n    await client.nonsense()'),
        ("python", 'if __name__ == "__main__":\n    raise SystemExit(3)'),
        ("toml", '[workers.embed]\nhandler = "model:Embedder"\nmax_batch = 3'),
        ("json", "{"),
        ("", "no language"),
    ],
)
def test_a_block_that_is_wrong_is_found(language, text, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n```{language}\n{text}\n```\n")
    with pytest.raises((Exception, SystemExit)):
        run_page(page, tmp_path, monkeypatch, capsys)


def run(block, world, capsys):
    if block.language == "python":
        world.python(block)
    elif block.language == "console":
        for command, output in block.commands:
            run_command(block, command, output, world, capsys)
    elif block.language == "toml":
        file = world.folder / (block.file or f"block_{block.line}.toml")
        file.write_text(block.text)
        world.command(f"gpuworker config check {file}", [], capsys)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        assert yaml.safe_load(block.text)


def run_command(block, command, output, world, capsys):
    program = next(word for word in command.split() if not re.fullmatch(r"[A-Z_]+=.*", word))
    if program == "gpuworker":
        if block.note == "serves":
            world.serve(command)
        else:
            world.command(command, output, capsys)
    elif program == "python" and (world.folder / command.split()[1]).exists():
        printed = world.program(command.split()[1]).splitlines()
        assert printed == output or not output, printed
    elif program == "python":
        assert (ROOT / command.split()[1]).is_file(), command
    elif program == "make":
        for target in command.split()[1:]:
            assert "=" in target or re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), f"no such target: {target}"
    elif program == "pip":
        extras = {extra for found in re.findall(r"gpuworker\[([\w,]+)\]", command) for extra in found.split(",")}
        assert extras <= PROJECT["optional-dependencies"].keys(), command
    else:
        raise AssertionError(f"{command}: nothing here knows how to check that")


def test_few_blocks_are_not_run_and_each_says_why_or_who_runs_it():
    noted = [block for page in PAGES for block in blocks_of(page) if block.note and NOTES.fullmatch(block.note)]
    assert len([block for block in noted if block.note.startswith("not run")]) <= MOST_NOT_RUN
    for block in noted:
        if block.note.startswith("run by "):
            assert block.page.name in (ROOT / block.note.removeprefix("run by ")).read_text(), block.where
    for page in PAGES:  # a comment with a slip in it would be one that nothing acts on
        for comment in re.findall(r"^<!-- (.*) -->$", page.read_text(), re.MULTILINE):
            assert NOTES.fullmatch(comment), f"{page.name}: {comment}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_is_in_fences_and_not_indented(page):
    outside = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"\n\n    +[^\s*-].*", outside)


def test_every_page_is_in_the_site():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages_in(nav)) == sorted(page.name for page in PAGES[1:])


def pages_in(nav):
    for entry in nav:
        for target in entry.values():
            if isinstance(target, str):
                yield target
            else:
                yield from pages_in(target)


def test_the_tests_that_pages_name_exist():
    tests = {
        f"{file.stem}.py::{name}"
        for file in (ROOT / "tests").glob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.M)
    }
    named = set(re.findall(r"`(test_\w+\.py::test_\w+)`", (ROOT / "docs" / "failures.md").read_text()))
    assert len(named) > 30
    assert named <= tests, named - tests
    for page in PAGES:
        files = re.findall(r"`(test_\w+)`", page.read_text())
        assert all((ROOT / "tests" / f"{file}.py").is_file() for file in files), (page.name, files)


def test_every_row_of_the_tables_of_failures_has_a_note_with_its_tests():
    text = (ROOT / "docs" / "failures.md").read_text()
    notes = dict(re.findall(r"^\[\^(\d+)\]: (.*)$", text, re.MULTILINE))
    rows = [line for line in text.splitlines() if re.match(r"\| (?!what happens)", line)]
    marks = [re.findall(r"\[\^(\d+)\] \|", row) for row in rows]
    assert [mark for found in marks for mark in found] == list(notes), "each row has one note of its own, and notes are in the order of rows"
    assert all(re.fullmatch(r"(`test_\w+\.py::test_\w+`(, |$))+", note) for note in notes.values())


def test_the_api_page_has_everything_that_is_exported():
    import gpuworker

    page = (ROOT / "docs" / "api.md").read_text()
    named = re.findall(r"^::: gpuworker\.(\w+)$", page, re.MULTILINE)
    assert sorted(named) == sorted(gpuworker.__all__)
    assert set(re.findall(r"^::: frontends\.(\w+)$", page, re.MULTILINE)) == {"asgi", "gunicorn", "metrics", "page", "wsgi"}
