"""The ring's own tests (native/tests, in C), each a program; `make sanitize` runs the same ones under the sanitizers."""

import pathlib
import shutil
import subprocess

import pytest

SOURCES = pathlib.Path(__file__).parent.parent / "native" / "tests"
PROGRAMS = [
    "transitions", "lives", "deaths", "edges", "batches", "rows", "decode", "streams", "stream_waits", "chimes", "hostile", "fork", "stress", "crash",
]  # fmt: skip


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    if shutil.which("make") is None or shutil.which("cc") is None:
        pytest.skip("needs make and a C compiler")
    folder = tmp_path_factory.mktemp("native")
    made = subprocess.run(["make", "-C", SOURCES, "programs", f"BUILD={folder}"], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return folder / "plain"


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(build, program):
    ran = subprocess.run([build / program], capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_program_is_run():
    assert {path.stem for path in SOURCES.glob("*.c")} - set(PROGRAMS) == {"killstep"}  # which `make killstep` runs
