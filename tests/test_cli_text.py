"""What the commands print and conclude, from made-up facts."""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from gpuworker.cli import checks, leftovers, screen
from gpuworker.cli.doctor import Check, report
from gpuworker.cli.inspect import Row, listing
from gpuworker.cli.interval import COUNTERS, Interval
from gpuworker.cli.serve import field_docs, help_text, metavar
from gpuworker.cli.text import bar, count, rate, shorten, size, span, table
from gpuworker.segment.stats import ClientView, Histogram, Stats


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"), (2.56e-7, "0.256 us"), (45.13e-6, "45.1 us"), (999.4e-6, "999 us"), (999.6e-6, "1 ms"), (2.048e-3, "2.05 ms"),
        (0.9996, "1 s"), (3.21, "3.21 s"), (119, "119 s"), (119.6, "2 min"), (192, "3 min 12 s"), (11100, "3 h 5 min"),
        (10800, "3 h"), (3605, "1 h"), (90061, "1 d 1 h"), (86400 * 400, "400 d"),
    ],
)  # fmt: skip
def test_span(seconds, shown):
    assert span(seconds) == shown


@pytest.mark.parametrize(
    ("n", "shown"),
    [(0, "0 bytes"), (512, "512 bytes"), (1000, "0.977 KiB"), (64 << 20, "64 MiB"), (1023 << 20, "0.999 GiB"), (5 << 50, "5.12e+03 TiB")],
)
def test_size(n, shown):
    assert size(n) == shown


def test_small_formats():
    assert [rate(0), rate(0.04), rate(9.94), rate(1234.5)] == ["0/s", "0.0/s", "9.9/s", "1,234/s"]
    assert [count(1, "slot"), count(1200, "slot"), count(2, "process", "processes")] == ["1 slot", "1,200 slots", "2 processes"]
    assert [bar(0, 10, 4), bar(1, 1000, 4), bar(5, 10, 4), bar(10, 10, 4)] == ["", "#", "##", "####"]
    assert [shorten("abcdef", 6), shorten("abcdefghij", 7)] == ["abcdef", "ab...ij"]
    assert table([("a", "1"), ("bbb", "22")], "<>", "- ") == ["- a     1", "- bbb  22"]


def histogram(*spans_us):
    """As the segment would hold them; each lands in the bucket that starts at or below it."""
    starts_us = [0.256 * 2 ** (i // 4) * (1 + i % 4 / 4) for i in range(128)]
    buckets = [0] * 128
    for us in spans_us:
        buckets[max(i for i, start in enumerate(starts_us) if start <= us)] += 1
    return Histogram.of([*buckets, round(sum(spans_us) * 1e3), len(spans_us)])


def stats(**changes):
    nothing = histogram()
    made = Stats(
        name="embed", state="serving", owner_pid=4321, owner_alive=True, uptime_s=192.0, heartbeat_age_s=0.05, batch_running_s=0.0, capacity=256,
        slots_in_use=0, clients=(), submitted=0, completed=0, failed=0, cancelled=0, expired=0, rejected=0, fallbacks=0, abandoned=0,
        reaped_clients=0, reaped_slots=0, requeued=0, late_wakes=0, owner_spins=0, owner_parks=0,
        on_time=0, late=0, rejected_late=0, rejected_forecast=0, goodput=0.0, predicted_batches=0, predicted_run_ms=0.0, observed_run_ms=0.0,
        overruns=0, tokens=0, padded_tokens=0, padding=0.0,
        batches=0, mean_batch_size=0.0, batch_sizes={}, dispatch_reasons={},
        claim_wait=nothing, queue_wait=nothing, batch_wait=nothing, run=nothing, wake=nothing, handler="app.model:Embed",
        options={"max_batch_size": 32}, supervisor_pid=4320, alive=True, restarts=0, reloads=0, note="",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


BUSY = {
    "slots_in_use": 12, "clients": (ClientView(11, 2), ClientView(12, 10)),
    "submitted": 1200, "completed": 1100, "failed": 3, "rejected": 85, "requeued": 2,
    "batches": 100, "mean_batch_size": 11.03, "batch_sizes": {"1": 25, "16": 75}, "dispatch_reasons": {"full": 30, "age": 70, "drain": 0},
    "run": histogram(2000, 2000, 2000, 8000), "wake": histogram(45.0),
}  # fmt: skip


def test_a_screen():
    shown = screen.lines(stats(**BUSY))
    assert shown[:2] == ["worker embed: serving, process 4321, up 3 min 12 s", "handler app.model:Embed"]
    assert [line for line in shown if line.startswith("  submitted")] == ["  submitted  1,200      completed     1,100"]
    assert [line for line in shown if line.startswith("  requeued")] == ["  requeued       2      dead clients      0"]
    assert not [line for line in shown if "fallbacks" in line]
    assert [line.split()[-4:] for line in shown if line.startswith("  run ")] == [["ms", "3.5", "ms", "4"]]
    assert [line.split()[-4:] for line in shown if line.startswith("  claim ")] == [["-", "-", "-", "0"]]
    assert "batches: 100, mean size 11 of 32" in shown
    assert "  left because: age 70%, full 30%" in shown
    assert f"   1  25  25%  {'#' * 9}" in shown
    assert f"  16  75  75%  {'#' * 27}" in shown
    assert "slots: 12 of 256 in use by 2 client processes" in shown
    assert shown[-2].split() == ["12", "10", "#"]  # the greediest client first
    assert max(map(len, shown)) <= 80


def test_a_screen_of_nothing_and_of_very_much():
    assert "batches: none" in screen.lines(stats())
    many = {name: 10**9 for pair in COUNTERS for name in pair}
    before = stats()
    busy = stats(**many, clients=tuple(ClientView(4_000_000 + i, 3) for i in range(20)), run=histogram(*[1e8] * 3), batches=10**8)
    shown = screen.lines(busy, Interval.between(before, busy, 2e4))
    assert shown[-1] == "  and 12 more with 36 slots"
    assert max(map(len, shown)) <= 80


def test_many_batch_sizes_are_grouped_by_powers_of_two():
    sizes = screen.sizes(stats(batch_sizes={**{str(i): 1 for i in range(1, 64)}, "64-127": 5}, options={"max_batch_size": 100}))
    assert [line.split()[:2] for line in sizes] == [
        ["1", "1"], ["2-3", "2"], ["4-7", "4"], ["8-15", "8"], ["16-31", "16"], ["32-63", "32"], ["64-100", "5"],
    ]  # fmt: skip
    sizes = screen.sizes(stats(batch_sizes={str(i): 1 for i in range(1, 17)}, options={"max_batch_size": 16}))
    assert sizes[-1].split()[:2] == ["16", "1"]


def test_what_is_remarkable_comes_first():
    dead = screen.heading(stats(owner_alive=False, alive=False, heartbeat_age_s=61.5, batch_running_s=70))
    assert dead[0] == "worker embed: dead, process 4321"
    assert dead[2:] == ["it died while serving, last heard of 61.5 s ago", "the next start of this name takes its segment over"]
    assert screen.heading(stats(heartbeat_age_s=12))[2].startswith("no heartbeat for 12 s: its handler holds the GIL")
    assert screen.heading(stats(batch_running_s=1.5))[2:] == ["a batch has been running for 1.5 s"]
    note = "the owner was killed by SIGSEGV. Its last words:\nSegmentation fault"
    assert screen.heading(stats(owner_alive=False))[0] == "worker embed: restarting, process 4321, up 3 min 12 s"
    assert screen.heading(stats(restarts=2, note=note))[2:] == ["its owner was started again 2 times; last because the owner was killed by SIGSEGV"]
    failed = screen.heading(stats(alive=False, owner_alive=False, state="failed", restarts=5, note=note))
    assert failed[2:] == ["it is not started again, as:", *note.splitlines(), "the next start of this name takes its segment over"]
    assert screen.heading(stats(state="starting", heartbeat_age_s=12, handler=""))[1:] == ["handler (not known yet)"]


def test_an_interval_counts_from_the_reading_before():
    before = stats(**BUSY)
    now = dataclasses.replace(
        before, submitted=1300, completed=1150, batches=110, batch_sizes={"1": 25, "16": 84, "3": 1},
        dispatch_reasons={"full": 40, "age": 70, "drain": 0}, run=histogram(2000, 2000, 2000, 8000, 1000, 1000),
    )  # fmt: skip
    recent = Interval.between(before, now, 4.0)
    assert (recent.stats.submitted, recent.stats.failed, recent.stats.batches, recent.stats.mean_batch_size) == (100, 0, 10, 5.0)
    assert recent.stats.batch_sizes == {"16": 9, "3": 1}
    assert recent.stats.dispatch_reasons == {"full": 10}
    assert (recent.stats.run.count, round(recent.stats.run.mean_us)) == (2, 1000)
    assert "  submitted  1,300  25/s    completed     1,150  12/s" in screen.lines(now, recent)
    assert "batches in the last 4 s: 10 (2.5/s), mean size 5 of 32" in screen.lines(now, recent)
    assert Interval.between(before, dataclasses.replace(now, owner_pid=1), 4.0) is None
    assert Interval.between(now, before, 4.0) is None


def test_a_listing():
    rows = [Row("a", "serving", "", 7, True, 61, 3, 256, 2, "m:f"), Row("bb", "dead", "", 9, False, 0, 0, 4), Row("c", "unusable", "it is not ours")]
    assert listing(rows) == [
        "NAME  STATE     PID    UP  SLOTS  CLIENTS  HANDLER",
        "a     serving     7  61 s  3/256        2  m:f",
        "bb    dead       9*     -    0/4        0  -",
        "c     unusable    -     -      -        -  -",
        "c: it is not ours",
        "dead, failed: the next start of the same name takes the segment over, with the requests that were queued",
        "*: of another pid namespace",
    ]
    assert json.loads(json.dumps(dataclasses.asdict(rows[0])))["clients"] == 2


def test_options_are_described_by_the_docstrings_behind_the_fields():
    @dataclasses.dataclass
    class Options:
        limit_ms: float = 2.0
        """Longest wait, 5 % more or less."""
        bare: int = 3
        mode: str = "a"
        """How: "a" or "b"."""

    docs = field_docs(Options)
    assert docs == {"limit_ms": "Longest wait, 5 % more or less.", "mode": 'How: "a" or "b".'}
    assert help_text(docs["limit_ms"], 2.0) == "Longest wait, 5 %% more or less (default: 2)"
    assert [help_text("What.", default) for default in (None, True, 67108864)] == ["What.", "What (default: true)", "What (default: 67108864)"]
    assert [metavar("limit_ms", float, ""), metavar("mode", str, docs["mode"]), metavar("bare", int, "")] == ["MS", "{a,b}", "N"]
    assert field_docs(type("NoSource", (), {})) == {}


# doctor


def test_a_report_is_80_columns_wide():
    shown = report([Check("kernel", "OK", "Linux 6.1"), Check("/dev/shm", "WARN", "small " * 20, "enlarge it " * 12), Check("x", "FAIL", "broken")])
    assert shown[0] == "OK    kernel    Linux 6.1"
    assert shown[-1] == "1 failure, 1 warning"
    assert any(line.startswith(" " * 16 + "-> enlarge") for line in shown)
    assert max(map(len, shown)) <= 80
    assert report([Check("kernel", "OK", "Linux 6.1")])[-1] == "everything is fine"


@pytest.mark.parametrize(("version", "level"), [("6.18.44-generic", "OK"), ("5.3", "OK"), ("5.2.99", "FAIL"), ("4.19.0", "FAIL"), ("", "FAIL")])
def test_versions(version, level):
    assert checks.judge_version("kernel", "Linux", version, (5, 3), "pidfd_open", "upgrade").level == level


@pytest.mark.parametrize(
    ("size_mb", "free_mb", "kind", "options", "writable", "level", "says"),
    [
        (1024, 900, "tmpfs", "rw,nosuid", True, "OK", "900 MiB free, tmpfs (rw,nosuid); a worker with default options takes 32 MiB"),
        (64, 60, "tmpfs", "rw", True, "WARN", "Docker's default"),
        (64, 20, "tmpfs", "rw", True, "FAIL", "--shm-size=1g"),
        (1024, 900, "", "", True, "WARN", "not a mount of its own"),
        (1024, 900, "tmpfs", "ro,nosuid", False, "FAIL", "not writable"),
    ],
)
def test_shared_memory(size_mb, free_mb, kind, options, writable, level, says):
    found = checks.judge_shm(size_mb << 20, free_mb << 20, kind, options, writable, 32 << 20)
    assert found.level == level
    assert says in f"{found.found} {found.advice}"


def test_the_last_mount_counts():
    mounts = "proc /proc proc rw 0 0\nshm /dev/shm tmpfs rw,size=64m 0 0\nshm /dev/shm tmpfs ro 0 0\nudev /dev devtmpfs rw 0 0\n"
    assert checks.mount_of("/dev/shm", mounts) == ("tmpfs", "ro")
    assert checks.mount_of("/dev/shm", "udev /dev devtmpfs rw 0 0\n") == ("", "")


def test_cpu_limits_of_all_groups_above(tmp_path):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert list(checks.cpu_limits(tmp_path, "0::/outer/inner\n")) == [1.5]
    old = tmp_path / "cpu" / "job"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("-1\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    (old.parent / "cpu.cfs_quota_us").write_text("400000\n")
    (old.parent / "cpu.cfs_period_us").write_text("100000\n")
    assert list(checks.cpu_limits(tmp_path, "5:memory:/job\n4:cpu,cpuacct:/job\n")) == [4.0]
    assert list(checks.cpu_limits(tmp_path, "0::/\n")) == []


def test_cores_and_quota():
    assert checks.judge_cores(8, 1).level == "WARN"
    assert checks.judge_cores(8, 4) == Check("cores", "OK", "8 cores, 4 usable by this process")
    assert [checks.judge_quota(limit, 8).level for limit in (None, 0.5, 1.5, 2.0)] == ["OK", "WARN", "WARN", "OK"]
    assert checks.judge_quota(1.0, 1).level == "OK"


@pytest.mark.parametrize(
    ("code", "devices", "built_for", "err", "driver", "level", "says"),
    [
        (0, ["H200"], "13.0", "", True, "OK", "CUDA 13.0: H200"),
        (0, [], None, "", False, "OK", "no GPU: handlers run on the CPU"),
        (0, [], None, "", True, "WARN", "it is built without CUDA"),
        (0, [], "13.0", "a warning\nthe driver is too old\n", True, "WARN", "the driver is too old"),
        (1, [], None, "Traceback...\nImportError: libcudart.so\n", True, "WARN", "ImportError: libcudart.so"),
        (-9, [], None, "", False, "WARN", "exit code -9"),
    ],
)
def test_torch(code, devices, built_for, err, driver, level, says):
    out = f"a banner\n{json.dumps({'built_for': built_for, 'devices': devices})}\n"
    found = checks.judge_torch("2.13", code, out, err, driver)
    assert (found.level, says in found.found) == (level, True)


def test_torch_that_hangs_or_is_not_there(monkeypatch):
    def hang():
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr(checks.importlib.metadata, "version", lambda name: "2.13")
    assert checks.torch(hang).level == "WARN"

    def missing(name):
        raise checks.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checks.importlib.metadata, "version", missing)
    assert checks.torch(hang) == Check("torch", "OK", "not installed; only handlers that import it need it")


def test_leftovers():
    files = {
        "gpuworker-live": 9, "gpuworker-live.spill-0-1-q": 9, "gpuworker-dead": 32 << 20, "gpuworker-dead.spill-3-7-r": 1 << 20,
        "gpuworker-dead2": 4096, "gpuworker-gone.spill-1-1-q": 4096, "gpuworker-gone.spill-2-1-q": 4096, "gpuworker-live.new-99-0a1b2c3d": 4096,
        "gpuworker-live.new-42-0a1b2c3d": 4096,
    }  # fmt: skip
    assert leftovers.pids_of(files) == {"99", "42"}
    found = leftovers.judge(files, ["live"], ["dead", "dead2"], {"42"})
    assert [check.found for check in found] == [
        "2 dead workers: dead (32 MiB and 1 payload file of 1 MiB), dead2 (4 KiB)",
        "2 files of 8 KiB that worker 'gone' no longer needs",
        "1 file of 4 KiB that worker 'live' no longer needs",
    ]
    assert "takes it over, with the requests that were queued" in found[0].advice
    assert found[1].advice.endswith("gpuworker doctor --clean")
    assert leftovers.judge({}, [], [], set()) == []


def test_a_broken_check_hides_no_other(monkeypatch):
    monkeypatch.setattr(checks, "glibc", Path("/nowhere").read_text)
    monkeypatch.setattr(checks, "torch", lambda: Check("torch", "OK", ""))
    found = checks.everything()
    assert [check.what for check in found][:3] == ["kernel", "read-text", "Python"]
    assert found[1].level == "FAIL"
    assert "No such file" in found[1].found
