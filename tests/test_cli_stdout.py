"""Where a command's output cannot go: a full disk, a closed descriptor, a reader that has gone."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

from gpuworker import cli

READERS = ["list", "list --json", "stats NAME", "stats NAME --json", "metrics NAME", "top NAME --once --interval 0.01", "config check FILE",
           "config show --config FILE", "config show --config FILE --json"]  # fmt: skip
DOERS = ["pause NAME", "resume NAME", "health NAME"]
CLI = pathlib.Path(cli.__file__).parent
RUN = "import sys; from gpuworker.cli import main; sys.exit(main())"


def command(line, name, file, **streams):
    words = [{"NAME": name, "FILE": file}.get(word, word) for word in line.split()]
    return subprocess.run([sys.executable, "-c", RUN, *words], stderr=subprocess.PIPE, text=True, timeout=60, **streams)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "w.toml"
    path.write_text("[workers.a]\nhandler = 'm:f'\n")
    return str(path)


@pytest.fixture
def worker(in_process, gate):
    return in_process(gate)


@pytest.mark.parametrize("line", READERS)
def test_a_full_disk_is_one_line(line, worker, file):
    with open("/dev/full", "wb") as full:
        done = command(line, worker.name, file, stdout=full)
    assert (done.returncode, done.stderr) == (1, "gpuworker: stdout cannot be written: No space left on device\n")


@pytest.mark.parametrize("line", DOERS)
def test_what_is_done_is_done_though_nobody_hears_of_it(line, worker, file):
    with open("/dev/full", "wb") as full:
        done = command(line, worker.name, file, stdout=full)
    assert (done.returncode, done.stderr) == (0, "")
    done = command(line, worker.name, file, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stdout_is_one_line(worker, file):
    done = command("stats NAME", worker.name, file, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (1, "gpuworker: stdout is closed\n")


@pytest.mark.parametrize("line", READERS)
def test_a_reader_that_has_gone_is_no_error(line, worker, file):
    reader, writer = os.pipe()
    os.close(reader)
    done = command(line, worker.name, file, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + 13, "")


def test_no_command_prints_by_itself():
    """Its words go through cli/stdout.py, which knows of all this; stderr is for everybody."""
    for source in CLI.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                assert "file" in {keyword.arg for keyword in node.keywords}, f"{source.name}:{node.lineno}"
