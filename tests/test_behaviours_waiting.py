"""Waiting burns no core and misses no wake-up, and nobody sees a word before the data it stands for."""

import os
import pathlib
import shutil
import subprocess
import time

import pytest

import gpuworker
from tests import handlers

NATIVE = pathlib.Path(__file__).parent.parent / "native"


def cpu_s(pid):
    return time.clock_gettime(~pid << 3 | 2)  # CPU time of all its threads, as clock_getcpuclockid gives


@pytest.fixture
def worker(name):
    with gpuworker.Worker(handlers.double, name=name) as worker:
        yield worker


def test_an_idle_owner_burns_no_core_however_busy_it_has_been(worker):
    client = worker.connect()
    for i in range(3000):  # by now both sides spin, where that pays
        client.submit(i)
    before = cpu_s(worker.pid)
    time.sleep(1)
    assert cpu_s(worker.pid) - before < 0.05


def test_a_trickle_of_requests_burns_no_core_on_either_side(worker):
    client = worker.connect()
    client.submit(0)
    before = cpu_s(worker.pid), cpu_s(os.getpid())
    for i in range(25):
        time.sleep(0.02)
        client.submit(i)
    assert cpu_s(worker.pid) - before[0] < 0.1
    assert cpu_s(os.getpid()) - before[1] < 0.1


@pytest.mark.parametrize("wake", ["park", "adaptive", "busy"])
def test_requests_published_while_the_owner_falls_asleep_wake_it(name, wake):
    with gpuworker.Worker(handlers.double, name=name, wake=wake) as worker:
        client = worker.connect()
        assert all(client.submit(i) == 2 * i for i in range(1000))
        assert worker.stats().late_wakes == 0


@pytest.fixture(scope="module")
def races(tmp_path_factory):
    """Builds the ring's thread stress under ThreadSanitizer, with a replacement in its sources, and runs it. -> whether it reports a data race."""
    folder = tmp_path_factory.mktemp("tsan")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }")
    built = (
        shutil.which("make")
        and shutil.which("cc")
        and subprocess.run(["cc", "-fsanitize=thread", probe, "-o", folder / "probe"], check=False, capture_output=True)
    )
    if not built or built.returncode or subprocess.run([folder / "probe"], check=False, capture_output=True).returncode:
        pytest.skip("needs make and a C compiler with ThreadSanitizer")

    def run(name, old, new):
        sources = folder / name
        shutil.copytree(NATIVE, sources, ignore=shutil.ignore_patterns("build", "*.o", "*.so"))
        header = sources / "ring.h"
        assert old in header.read_text()
        header.write_text(header.read_text().replace(old, new))
        subprocess.run(
            ["make", "-s", "-C", sources / "tests", "VARIANT=tsan", f"BUILD={folder / name}", folder / name / "tsan" / "stress"], check=True
        )
        ran = subprocess.run([folder / name / "tsan" / "stress", "2", "500", "4"], capture_output=True, text=True, check=False, timeout=100)
        found = "ThreadSanitizer: data race" in ran.stderr
        assert found == bool(ran.returncode), ran.stderr
        return found

    return run


def test_a_word_is_never_seen_before_the_data_it_stands_for(races):
    order = "memory_order_seq_cst, memory_order_acquire"
    assert not races("as_it_is", order, order)
    assert races("relaxed", order, "memory_order_relaxed, memory_order_relaxed"), "the check that finds nothing above must be able to"
