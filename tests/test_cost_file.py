"""Run times on disk: private, replaced in one step, and never a reason not to start."""

import json
import logging
import os
import stat
import sys
import types

import pytest

from gpuworker.worker import cost_file
from gpuworker.worker.cost_file import CostFile, device_name, file_name

COSTS = {"format": 1, "margin": 1.25, "shapes": [[8, 0, 7_000_000]]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="gpuworker")
    return lambda: [record.getMessage() for record in caplog.records]


def test_what_is_saved_is_loaded_by_the_same_handler_only(cache, lines):
    assert CostFile("auto", "app:model").load() is None
    CostFile("auto", "app:model").save(COSTS)
    assert CostFile("auto", "app:model").load() == COSTS
    assert CostFile("auto", "app:other").load() is None
    assert CostFile("auto", "app/model").load() is None
    assert lines() == []


def test_a_file_is_private_and_the_only_thing_left(cache):
    file = CostFile("auto", "app:model")
    for _ in range(3):
        file.save(COSTS)
    (path,) = (cache / "gpuworker" / "costs").iterdir()
    assert path == file.path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_path_is_taken_as_it_is_and_off_means_nothing(tmp_path, cache):
    path = tmp_path / "somewhere" / "costs.json"
    CostFile(str(path), "app:model").save(COSTS)
    assert CostFile(str(path), "app:model").load() == COSTS
    off = CostFile("off", "app:model")
    off.save(COSTS)
    assert off.load() is None
    assert off.path is None
    assert not cache.exists()


def test_without_xdg_it_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for not_a_directory in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", not_a_directory)
        assert CostFile("auto", "app:model").path.parent == tmp_path / ".cache" / "gpuworker" / "costs"


def valid(**changes):
    return json.dumps({"format": 1, "handler": "app:model", "device": device_name(), "costs": COSTS, **changes}).encode()


BAD = {
    "empty": b"",
    "cut off": valid()[:-10],
    "binary": bytes(range(256)),
    "a list": b"[1, 2]",
    "a number": b"7",
    "deep": b"[" * 200_000,
    "other format": valid(format=2),
    "other handler": valid(handler="app:other"),
    "other device": valid(device="abacus"),
    "no costs": valid(costs=None),
    "too large": valid() + b" " * cost_file.MOST_BYTES,
}


FOREIGN = {"binary", "a list", "a number", "deep"}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_line_in_the_log_and_then_replaced_if_it_is_one_of_ours(tmp_path, lines, kind):
    content = BAD[kind]
    path = tmp_path / "costs.json"
    path.write_bytes(valid())
    file = CostFile(str(path), "app:model")
    assert file.load() == COSTS
    path.write_bytes(content)
    assert file.load() is None
    (line,) = lines()
    assert str(path) in line
    assert "\n" not in line
    file.save(COSTS)
    if kind in FOREIGN:
        assert path.read_bytes() == content
        assert "is something else" in lines()[1]
    else:
        assert file.load() == COSTS


def test_a_home_directory_may_be_meant(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    CostFile("~/costs.json", "app:model").save(COSTS)
    assert (tmp_path / "costs.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")
def test_a_device_is_not_replaced(tmp_path, lines):
    null = tmp_path / "null"
    os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    CostFile(str(null), "app:model").save(COSTS)
    assert stat.S_ISCHR(null.stat().st_mode)
    assert len(lines()) == 1


def test_scripts_of_different_places_have_different_files():
    assert CostFile("auto", "__main__:run_batch", "/a.py").path != CostFile("auto", "__main__:run_batch", "/b.py").path


def test_a_directory_or_a_pipe_in_its_place_neither_stops_nor_breaks_it(tmp_path, lines):
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for number, name in enumerate(("directory", "pipe"), 1):
        assert CostFile(str(tmp_path / name), "app:model").load() is None
        assert len(lines()) == number
        assert str(tmp_path / name) in lines()[-1]


def test_an_unwritable_directory_is_one_line_however_often(tmp_path, lines):
    (tmp_path / "a file").write_text("")  # permissions would not stop root
    file = CostFile(str(tmp_path / "a file" / "costs.json"), "app:model")
    for _ in range(3):
        file.save(COSTS)
    (line,) = lines()
    assert "cannot be saved" in line


def test_no_home_directory_is_one_line(monkeypatch, lines):
    monkeypatch.setenv("XDG_CACHE_HOME", "")

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cost_file.Path, "home", home)
    file = CostFile("auto", "app:model")
    file.save(COSTS)
    assert len(lines()) == 1
    assert file.load() is None
    assert len(lines()) == 2


def test_what_is_too_large_leaves_the_file_as_it_was(tmp_path, lines):
    path = tmp_path / "costs.json"
    file = CostFile(str(path), "app:model")
    file.save(COSTS)
    file.save({"shapes": [[1, 0, 10**9]] * 100_000})
    assert len(lines()) == 1
    assert file.load() == COSTS
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "cache"] == ["costs.json"]


def test_a_failing_disk_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, lines):
    path = tmp_path / "costs.json"
    file = CostFile(str(path), "app:model")
    file.save(COSTS)

    def replace(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    file.save({"other": 1})
    assert file.load() == COSTS
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "cache"] == ["costs.json"]
    assert len(lines()) == 1


def test_names_of_files_are_safe_and_different():
    names = {file_name(handler, device) for handler in ("a:b", "a/b", "a-b", "../../a", "e" * 300, "\ud800") for device in ("cpu", "gpu")}
    assert len(names) == 12
    assert all(len(name) < 200 and "/" not in name and name.isascii() and not name.startswith(".") for name in names)


def test_the_device_is_the_gpu_only_where_torch_already_uses_it(monkeypatch):
    def torch(is_initialized, name="H100"):
        def get_device_name():
            if not name:
                raise RuntimeError("the device was lost")
            return name

        return types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: is_initialized, get_device_name=get_device_name))

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    processor = device_name()
    assert processor
    assert "torch" not in sys.modules
    for module, expected in ((torch(False), processor), (torch(True), "H100"), (torch(True, ""), processor), (types.SimpleNamespace(), processor)):
        monkeypatch.setitem(sys.modules, "torch", module)
        assert device_name() == expected


def test_another_device_is_another_file(monkeypatch):
    file = CostFile("auto", "app:model")
    file.save(COSTS)
    monkeypatch.setattr(cost_file, "device_name", lambda: "another")
    assert file.load() is None
    file.save({"format": 2})
    assert file.load() == {"format": 2}
    monkeypatch.undo()
