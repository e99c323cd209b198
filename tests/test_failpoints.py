"""Processes that die, or stop and go on, between any two atomics of the ring's transitions: at each of the failpoints that native/*.c name.

A build of its own has the failpoints in it (native/failpoints.h). The scenarios run under that build, in tests/failpoint_world.py; here is which points
each role must get to, and that no point is left out.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
POINT = re.compile(r"^ *GW_POINT\((\w+)\);.*\n", re.MULTILINE)
POINTS = {source.name: POINT.findall(source.read_text()) for source in sorted((ROOT / "native").glob("*.c"))}
ALL = [point for points in POINTS.values() for point in points]

LOOP = ("chime_emptied", "chime_armed")
FRONTEND = [*POINTS["ring.c"], *POINTS["wake.c"], *POINTS["port.c"], *LOOP, *(point for point in POINTS["semaphore.c"] if point != "post_waking")]
RECOVERY = ("recover", "untake", "wake_all", "refuse", "post_always", "identity", "alive")
"""The owner's points that the next one passes, or its supervisor."""
STREAMING = [*POINTS["stream.c"], "admit_all"]
"""Of workers that generate: native/tests/killstep_stream.h stops at each of their instructions."""
OWNER = [
    *(
        point
        for file in ("owner.c", "queue.c", "batch.c", "recovery.c")
        for point in POINTS.get(file, [])
        if not point.startswith((*RECOVERY[:4], "admit"))
    ),
    "batch_unstamped",
    *(point for point in POINTS["chime.c"] if point not in LOOP),
    "post_waking",
    "space_due",
    "space_bumped",
]
RECOVERING = [point for point in ALL if point.startswith((*RECOVERY, "finish"))]
SUPERVISOR = (
    "format_written", "identity_odd", "identity_written", "note_written", "alive_counted", "recover_awake", "recover_cleared", "recover_looked",
    "recover_tried", "recover_over", "untake_moved", "wake_all_posted", "wake_all_bumped",
)  # fmt: skip


def build(directory):
    """A copy of the package with the failpoints in it. The tests lie beside it, and so use it."""
    for name in ("gpuworker", "frontends", "native"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("*.so", "_native.c", "__pycache__", "tests", "model"))
    (directory / "tests").symlink_to(ROOT / "tests")
    command = [sys.executable, "-c", "from native.build import ffi; ffi.compile()"]  # without pyproject.toml, which old setuptools cannot read
    made = subprocess.run(command, cwd=directory, env={**os.environ, "GPUWORKER_FAILPOINTS": "1"}, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    directory = tmp_path_factory.mktemp("failpoints")
    build(directory)
    return directory


@pytest.fixture
def world(variant, tmp_path):
    """Calls a method of failpoint_world.World in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(variant), "FAILPOINT_RUNS": str(tmp_path / "runs"), "GPUWORKER_LOG": "CRITICAL"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.failpoint_world"],
        cwd=variant, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip

    def call(method, *arguments):
        process.stdin.write(json.dumps((method, *arguments)) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    with process:
        try:
            yield call
            process.stdin.close()
            assert process.wait(30) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the frontends it has forked


@pytest.fixture
def working(world):
    """The same, with a worker and others that use it."""
    world("start")
    yield world
    assert world("stop") is None


def test_every_point_has_a_name_of_its_own_and_a_scenario(world):
    assert len(ALL) == len(set(ALL)) > 100
    assert sorted(world("points")) == sorted(ALL)
    assert {*FRONTEND, *OWNER, *RECOVERING, *SUPERVISOR, *STREAMING} == set(ALL)


def test_frontends_killed_at_each_point_hurt_nobody_else(working):
    assert working("frontends_killed", FRONTEND) == []


def test_frontends_stopped_at_each_point_hurt_nobody_and_finish_later(working):
    assert working("frontends_stopped", FRONTEND) == []


def test_owners_killed_at_each_point_under_load_lose_nothing(working):
    assert working("owners_killed", OWNER) == []


def test_owners_killed_at_each_point_of_a_recovery_lose_nothing(world):
    assert world("owners_killed_in_recovery", RECOVERING) == []


def test_supervisors_killed_at_their_start_their_stop_or_over_a_dead_owner_lose_nothing(world):
    assert world("supervisors_killed", SUPERVISOR) == []


def test_a_point_that_nobody_passes_is_not_taken_for_one_that_was_reached(working):
    assert working("frontends_stopped", ["recover_looked"]) == ["recover_looked was not reached"]


def test_the_environment_arms_a_point_of_the_nth_pass(variant, name):
    script = f"from gpuworker.segment import Geometry, Segment; Segment.own({name!r}, Geometry(4, 64, 64, 4)).retire(); print('lived')"

    def ends(point):
        environment = {**os.environ, "PYTHONPATH": str(variant), "GPUWORKER_FAILPOINT": point}
        return subprocess.run([sys.executable, "-c", script], cwd=variant, env=environment, capture_output=True, text=True, check=False)

    assert ends("format_written:exit").returncode == 70
    assert ends("identity_odd:exit:2").returncode == 70
    assert ends("identity_odd:kill").returncode == -signal.SIGKILL
    assert "no such point" in ends("nowhere:kill").stderr
    assert "no such point" in ends("identity_odd:dance").stderr
    assert ends("identity_odd:exit:3").stdout == "lived\n", "and it has removed what the others left half-made"


@pytest.mark.parametrize("name", sorted(name for name, points in POINTS.items() if points))
def test_failpoints_cost_nothing_when_they_are_off(name, tmp_path):
    """The very same object code as without the lines."""
    source = (ROOT / "native" / name).read_text()
    objects = []
    for text in (source, POINT.sub("", source), source):
        (tmp_path / name).write_text(text)
        flags = ["-DGW_FAILPOINTS"] if len(objects) == 2 else []
        command = [os.environ.get("CC", "cc"), "-std=c11", "-O2", "-fPIC", *flags, f"-I{ROOT / 'native'}", "-c", name, "-o", "object"]
        subprocess.run(command, cwd=tmp_path, check=True)
        objects.append((tmp_path / "object").read_bytes())
    assert objects[0] == objects[1]
    assert objects[2] != objects[0], "with them on there is something to compare"
