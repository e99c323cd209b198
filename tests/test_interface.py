"""What is exported, and who may import what."""

import ast
import pathlib
import subprocess
import sys

import pytest

import gpuworker

ROOT = pathlib.Path(__file__).parent.parent


def test_all_names_what_is_exported_and_is_sorted_by_kind():
    assert len(set(gpuworker.__all__)) == len(gpuworker.__all__)
    assert [n for n in gpuworker.__all__ if n[0].isupper()] == sorted(n for n in gpuworker.__all__ if n[0].isupper())
    for exported in gpuworker.__all__:
        assert getattr(gpuworker, exported) is not None


def test_every_error_is_exported_and_derives_from_the_base():
    import gpuworker.errors as errors

    for exported in errors.__all__:
        assert getattr(gpuworker, exported) is getattr(errors, exported)
        assert issubclass(getattr(errors, exported), gpuworker.GpuWorkerError)


def test_the_design_names_every_room():
    rooms = {f"gpuworker/{path.parent.name}/" for path in ROOT.glob("gpuworker/*/__init__.py")} | {"native/", "frontends/", "deploy/"}
    design = (ROOT / "docs/design.md").read_text()
    assert [room for room in sorted(rooms) if room not in design] == []


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("scheduling", {"scheduling"}),
        ("payload", {"payload", "errors", "_native"}),
        ("segment", {"segment", "errors", "_native", "scheduling"}),
        ("client", {"client", "segment", "payload", "errors", "_native", "tensors", "generating", "sampling", "tracing"}),
        ("metrics", {"metrics", "segment", "errors"}),
        ("testing", {"testing", "scheduling"}),
        ("tuning", {"tuning", "testing", "scheduling", "payload", "worker"}),
        ("config", {"config", "worker", "execution", "generation", "segment", "errors"}),
        ("worker", {"worker", "client", "segment", "payload", "scheduling", "errors", "_native", "tracing"}),
    ],
)
def test_import_rules(room, allowed):
    for file in (ROOT / "gpuworker" / room).rglob("*.py"):
        for module in imports_of(file):
            parts = module.split(".")
            assert parts[0] not in {"torch", "transformers"}, f"{file} imports {module}"
            if parts[0] == "gpuworker" and len(parts) > 1:
                assert parts[1] in allowed, f"{file} imports {module}"


DECIDES = {"blocks", "engine", "files", "loop", "pacing", "prefix", "scheduler", "sequence", "stats", "tally", "waiting"}
"""Files of generation/ that know nothing of tensors."""


def test_what_generation_may_import():
    allowed = {"generation", "execution", "worker", "segment", "payload", "scheduling", "errors", "_native", "generating", "sampling"}
    for file in (ROOT / "gpuworker" / "generation").rglob("*.py"):
        for module in imports_of(file):
            parts = module.split(".")
            assert parts[0] != "gpuworker" or parts[1] in allowed, f"{file} imports {module}"


def test_what_decides_in_generation_knows_nothing_of_tensors():
    """So that it can be tested, and looked at, without them."""
    code = f"import importlib, sys; [importlib.import_module('gpuworker.generation.' + name) for name in {sorted(DECIDES)}]; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
    for name in DECIDES:
        for module in imports_of(ROOT / "gpuworker" / "generation" / f"{name}.py"):
            assert module.split(".")[0] not in {"torch", "transformers"}, f"generation/{name}.py imports {module}"


def test_what_both_sides_say_requests_with_needs_neither_of_them():
    """And no numpy, where a random number is all that is to be had."""
    for file, others in (("generating.py", {"numpy", "msgspec"}), ("sampling.py", {"msgspec"})):
        for module in imports_of(ROOT / "gpuworker" / file):
            parts = module.split(".")
            assert parts[0] in {*sys.stdlib_module_names, *others, "gpuworker"}, f"{file} imports {module}"
            assert parts[0] != "gpuworker" or parts[1] in {"errors", "sampling"}, f"{file} imports {module}"


def test_what_both_sides_declare_tensors_with_needs_neither_of_them():
    for file in ("tensors.py", "tensor_check.py"):
        for module in imports_of(ROOT / "gpuworker" / file):
            parts = module.split(".")
            assert parts[0] in {*sys.stdlib_module_names, "numpy", "gpuworker"}, f"{file} imports {module}"
            assert parts[0] != "gpuworker" or parts[1] in {"tensor_check", "payload", "errors"}, f"{file} imports {module}"


def test_the_library_never_imports_its_applications():
    for file in (ROOT / "gpuworker").rglob("*.py"):
        assert not any(module.startswith("gpuworker.frontends") for module in imports_of(file)), file


def test_frontends_import_only_what_is_exported():
    for file in (ROOT / "frontends").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "gpuworker":
                assert node.module in ("gpuworker", "gpuworker.errors"), f"{file} imports {node.module}"
                assert {alias.name for alias in node.names} <= set(gpuworker.__all__), file


def test_policies_import_only_the_standard_library_and_numpy():
    for file in (ROOT / "gpuworker" / "scheduling").rglob("*.py"):
        for module in imports_of(file):
            top = module.split(".")[0]
            assert top in sys.stdlib_module_names or top == "numpy" or module.startswith("gpuworker.scheduling"), f"{file} imports {module}"


def imports_of(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_a_frontend_loads_neither_torch_nor_the_worker():
    code = "import sys, gpuworker; gpuworker.connect('x'); print(sorted(m for m in sys.modules if m.split('.')[0] == 'torch' or m.startswith('gpuworker.worker')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_importing_costs_little_over_numpy():
    """As instructions are not to be counted here: modules. numpy alone brings some 150; we may add a few dozen, no web framework, no torch."""
    code = "import numpy, sys; before = len(sys.modules); import gpuworker; gpuworker.connect('x'); print(len(sys.modules) - before)"
    added = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert added < 100, f"{added} modules"


def test_limits_that_are_written_down_twice_agree():
    from gpuworker._native import lib
    from gpuworker.scheduling import sizes

    assert (sizes.MAX_BATCH_SIZE, sizes.MAX_LENGTH) == (lib.GW_MAX_CAPACITY, lib.GW_MAX_LENGTH)
