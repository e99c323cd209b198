"""The commands, as a user meets them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpuworker
from gpuworker.cli import build_parser, inspect, main
from gpuworker.segment.stats import Stats
from tests.conftest import kill_served

pytest_plugins = ("tests.served_app",)


def command(*args, cwd=None, **options):
    """The command in a process of its own, to its end."""
    return subprocess.run([sys.executable, "-m", "gpuworker.cli", *args], cwd=cwd, capture_output=True, text=True, timeout=60, **options)


# serve


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_answers_and_drains_on_a_signal(serve, name, number):
    owner = serve("--max-batch-size", "4", "--max-wait-ms", "0.5", "--no-isolate-errors", "--client-quota", "7")
    for part in (name, str(owner.pid), "handlers:upper"):
        assert part in owner.ready_line
    with gpuworker.connect(name) as client:
        assert client.submit(b"question") == b"QUESTION"
    options = Stats.of(name).options
    assert (options["max_batch_size"], options["max_wait_ms"], options["isolate_errors"], options["client_quota"]) == (4, 0.5, False, 7)
    owner.send_signal(number)
    assert owner.wait(30) == 0
    assert name not in gpuworker.segment.worker_names()


def test_the_console_script_finds_modules_of_the_current_directory(serve):
    script = Path(sys.executable).with_name("gpuworker")
    if not script.exists():
        pytest.skip("the console script is not installed")
    serve(program=(script,))


MISTAKES = [
    (["handlers:uper"], "has no attribute 'uper'"),
    (["handler:upper"], "No module named 'handler'"),
    (["handlers"], "write it as 'module:attribute'"),
    (["handlers:os"], "has no run_batch"),
    (["handlers:upper", "--capacity", "0"], "capacity=0: give an integer from 1"),
    (["handlers:upper", "--wake", "sometimes"], "wake='sometimes': choose one of 'park'"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_a_mistake_is_one_clear_line(imported_app, name, args, message, capsys):
    assert main(["serve", "--name", name, *args]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
    assert name not in gpuworker.segment.worker_names()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-batch", "3"], "unknown option --max-batch; did you mean --max-batch-size?"),
        (["--nmae", "n"], "unknown option --nmae; did you mean --name?"),
        ([], "the following arguments are required: --name"),
        (["--name", "n", "--capacity", "many"], "argument --capacity: invalid int value: 'many'"),
        (["--name", "n/a"], "worker name 'n/a': use 1 to 100 letters"),
    ],
)
def test_wrong_usage_is_explained(args, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "handlers:upper", *args])
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("handler", "shown"),
    [
        ("handlers:Broken", ["RuntimeError: weights are missing", 'handlers.py", line 11']),
        ("lacks:run_batch", ["No module named 'nothing_of_this_name'", 'lacks.py", line 1']),
        ("garbled:run_batch", ["SyntaxError", 'garbled.py", line 1']),
    ],
)
def test_the_handlers_own_error_comes_with_its_traceback(app, name, handler, shown):
    done = command("serve", handler, "--name", name, cwd=app)
    assert done.returncode == 1
    for part in shown:
        assert part in done.stderr
    assert "gpuworker/worker/" not in done.stderr
    assert name not in gpuworker.segment.worker_names()


def test_a_name_that_is_taken_is_refused_with_the_pid(app, serve, name):
    owner = serve()
    done = command("serve", "handlers:upper", "--name", name, cwd=app)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"already running in process {owner.pid}" in done.stderr


def test_every_worker_option_is_a_flag_with_help(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    for option in gpuworker.WorkerOptions.__dataclass_fields__:
        assert "--" + option.replace("_", "-") in shown
    for part in ("Most requests that run_batch is given at once (default: 32)", "--on-full {reject,block}", "--max-wait-ms MS", "(default: true)"):
        assert part in shown
    given = vars(build_parser().parse_args(["serve", "m:f", "--name", "n", "--allow-pickle", "--drain-timeout-s", "1.5"]))
    assert {option: given[option] for option in given.keys() & gpuworker.WorkerOptions.__dataclass_fields__} == {
        "allow_pickle": True,
        "drain_timeout_s": 1.5,
    }


# list


def test_list_shows_the_living_the_dead_and_the_unusable(app, serve, name, in_process, gate, capsys):
    kill_served(serve(), name)
    alive, junk = in_process(gate, capacity=16), Path(f"/dev/shm/gpuworker-{name}-junk")
    fifo = Path(f"/dev/shm/gpuworker-{name}-fifo")
    junk.touch(0o600)
    os.mkfifo(fifo)
    serving = Stats.of(name)
    assert main(["list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows[alive.name]["state"], rows[alive.name]["capacity"], rows[alive.name]["pid"]) == ("serving", 16, os.getpid())
    assert rows[name]["state"] == "dead"
    assert rows[name]["pid"] == serving.owner_pid
    assert "not a gpuworker segment" in rows[f"{name}-junk"]["problem"]
    assert rows[f"{name}-fifo"]["state"] == "unusable"
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^{alive.name} +serving +{os.getpid()} .* 0/16 ", shown, re.MULTILINE)
    assert re.search(rf"^{name} +dead ", shown, re.MULTILINE)
    assert re.search(rf"^{name}-junk: .*not a gpuworker segment", shown, re.MULTILINE)


def test_a_segment_of_another_user_is_listed_as_unusable(app, name, capsys):
    if os.geteuid():
        pytest.skip("only root can give a file away")
    theirs = Path(f"/dev/shm/gpuworker-{name}")
    theirs.touch(0o600)
    os.chown(theirs, 12345, -1)
    assert main(["list"]) == 0
    assert "it belongs to user id 12345" in capsys.readouterr().out
    assert main(["stats", name]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_no_workers_at_all(monkeypatch, capsys):
    monkeypatch.setattr(inspect, "worker_names", list)
    assert main(["list"]) == 0
    assert capsys.readouterr() == ("", "no workers on this machine\n")


def test_a_reader_that_goes_away_is_no_error(app):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "gpuworker.cli", "list", "--json"], stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_reading_commands_import_no_torch(app):
    program = "import sys; from gpuworker.cli import main; main(['list']); main(['stats', 'nobody']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


# stats


def test_stats_shows_and_prints_what_happened(in_process, gate, capsys):
    worker = in_process(gate, max_batch_size=4, capacity=16)
    with worker.connect() as client:
        assert list(client.map([b"x"] * 20)) == [b"x"] * 20
        assert main(["stats", worker.name, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["submitted"], document["completed"], document["state"]) == (20, 20, "serving")
        assert document["clients"] == [{"pid": os.getpid(), "slots_held": 0}]
        assert main(["stats", worker.name]) == 0
        shown = capsys.readouterr().out
    assert f"worker {worker.name}: serving, process {os.getpid()}, up " in shown
    assert re.search(r"submitted +20 +completed +20", shown)
    assert "of 4\n" in shown
    assert "0 of 16 in use by 1 client process\n" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_watch_shows_rates_of_the_interval_until_interrupted(in_process, gate, capsys, monkeypatch):
    worker, clock_s = in_process(gate), iter([0.0, 2.0])
    with worker.connect() as client:
        client.submit(b"before the first reading")
        naps = iter([lambda: list(client.map([b"x"] * 6)), None])

        def sleep(seconds):
            assert seconds == 7.0
            nap = next(naps)
            if nap is None:
                raise KeyboardInterrupt
            nap()

        monkeypatch.setattr(inspect, "time", SimpleNamespace(monotonic=lambda: next(clock_s), sleep=sleep))
        assert main(["stats", worker.name, "--watch", "7"]) == 0
    first, second = capsys.readouterr().out.split("\n\nworker ")
    assert re.search(r"completed +1\n", first)
    assert re.search(r"completed +7  3.0/s\n", second)
    assert "waits in the last 2 s" in second
    assert re.search(r"wake .* 6\n", second)


def test_watch_ends_when_the_worker_is_gone(in_process, gate, capsys, monkeypatch):
    worker = in_process(gate)
    monkeypatch.setattr(inspect, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: worker.stop()))
    assert main(["stats", worker.name, "--watch", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["name"] == worker.name
    assert err == f"gpuworker: worker {worker.name!r} is gone\n"


def test_an_unknown_name_suggests_the_nearest(in_process, gate, capsys):
    worker = in_process(gate)
    for asked in ("stats", "stop"):
        assert main([asked, worker.name + "s"]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert f"no worker named '{worker.name}s' is running" in err
        assert f"did you mean {worker.name!r}?" in err


# the rest


def test_doctor_reports_on_this_machine(app, serve, name):
    torch = app / "fakes" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("import types\nversion = types.SimpleNamespace(cuda='13.0')\n")
    (torch / "cuda.py").write_text("is_available = lambda: True\ndevice_count = lambda: 1\nget_device_name = lambda i: f'Fake {i}'\n")
    with (torch / "__init__.py").open("a") as file:
        file.write("from . import cuda\n")
    info = app / "fakes" / "torch-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    kill_served(serve(), name)
    Path(f"/dev/shm/gpuworker-{name}-gone.spill-0-1-q").write_bytes(b"x" * 5000)
    done = command("doctor", "--json", env={**os.environ, "PYTHONPATH": str(app / "fakes")})
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    assert done.stderr == ""
    checks = {check["what"]: check for check in report["checks"]}
    for what in ("kernel", "C library", "Python", "native part", "self-test", "torch"):
        assert checks[what]["level"] == "OK", checks[what]
    assert checks["torch"]["found"] == "9.9, CUDA 13.0: Fake 0"
    assert {"/dev/shm", "cores", "CPU quota"} <= checks.keys()
    leftovers = [check for check in report["checks"] if check["what"] == "leftovers"]
    assert any(f"{name} (" in check["found"] and "the next start of the same name takes it over" in check["advice"] for check in leftovers)
    assert any(check["found"] == f"1 file of 8 KiB that worker '{name}-gone' no longer needs" for check in leftovers)


def test_version_and_usage(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"gpuworker {gpuworker.__version__}\n"
    for wrong in ([], ["stat", "x"], ["stats"], ["stats", "x", "--watch", "0"], ["stop", "x", "--timeout-s", "-1"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
