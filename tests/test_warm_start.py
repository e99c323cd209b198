"""What a worker knows from the last time or from a profile, and how it is kept: by whoever writes it, nobody is held up."""

import threading

import pytest

from gpuworker.scheduling.cost_model import CostModel
from gpuworker.worker import warm_start
from gpuworker.worker.cost_file import CostFile
from gpuworker.worker.options import WorkerOptions
from gpuworker.worker.warm_start import KEEP_TICKS, WarmStart
from tests.conftest import eventually

MS = 1_000_000


class Handler:
    """As much of worker.handler.Handler as it needs."""

    name = "app:model"
    source = ""

    def __init__(self, examples=(), length=None):
        self.examples, self.length, self.batches = list(examples), length, []

    def run_batch(self, requests):
        self.batches.append((len(requests), max(requests, key=len)))
        return requests

    @property
    def shapes(self):
        return {(size, len(longest)) for size, longest in self.batches}


@pytest.fixture(name="begin")
def begin_fixture(tmp_path):
    """-> (WarmStart, its CostModel) of one life of the worker; the file is the same for all."""

    def begin(handler=None, **options):
        options = WorkerOptions(**{"latency_budget_ms": 50.0, "max_batch_size": 8, "cost_file": str(tmp_path / "costs.json")} | options)
        costs = CostModel(options.max_batch_size, allowed_batch_sizes=options.sizes)
        return WarmStart(handler or Handler(), options, costs), costs

    return begin


@pytest.fixture(name="file")
def file_fixture(tmp_path):
    return CostFile(str(tmp_path / "costs.json"), Handler.name)


def known(*lengths):
    model = CostModel(8)
    for length in lengths or (0,):
        model.seed(8, length, [5 * MS])
    return model.to_dict()


def ticks(warm, count=KEEP_TICKS):
    for _ in range(count):
        warm.on_tick()


# the next start


def test_what_was_learned_is_there_at_the_next_start(begin):
    warm, costs = begin()
    assert warm.seed(()) == ()
    costs.seed(8, 0, [5 * MS])
    warm.close(())
    warm, costs = begin()
    assert warm.seed(()) == ()
    assert costs.predicted(8, 0) == 5 * MS


def test_nothing_is_kept_while_nothing_is_known_so_that_the_next_start_profiles(begin, file):
    warm, costs = begin()
    warm.seed(())
    costs.observe(8, 0, 5 * MS)  # the first run may be a cold one, and is not known yet
    ticks(warm)
    warm.on_decide(())
    warm.on_tick()
    warm.close(())
    assert not file.path.exists()
    warm, costs = begin(Handler(["a"]))
    warm.seed(())
    assert not costs.is_empty


@pytest.mark.parametrize("model", [CostModel(8).to_dict(), {**known(), "shapes": [[32, 0, MS]]}], ids=["empty", "other sizes"])
def test_a_file_that_tells_nothing_does_not_keep_it_from_profiling(begin, file, model):
    file.save({"model": model, "boundaries": []})
    handler = Handler(["a"])
    warm, costs = begin(handler)
    warm.seed(())
    assert handler.batches
    assert not costs.is_empty


def test_who_knows_run_times_does_not_profile(begin, file):
    file.save({"model": known(), "boundaries": []})
    handler = Handler(["a"])
    begin(handler)[0].seed(())
    assert handler.batches == []


def test_only_a_latency_budget_needs_a_profile(begin):
    handler = Handler(["aa"], len)
    warm, costs = begin(handler, latency_budget_ms=None, length_buckets=(4,))
    warm.seed((4,))
    assert handler.batches == []
    assert costs.is_empty


def test_no_batch_of_the_profile_is_more_than_a_worker_would_run(begin):
    handler = Handler(["a" * 3, "a" * 8, "a" * 12, "a" * 20], len)
    begin(handler, max_batch_tokens=16)[0].seed(())
    assert handler.shapes == {(1, 3), (2, 3), (4, 3), (1, 8), (2, 8), (1, 12)}
    handler = Handler(["a" * 3, "a" * 8], len)
    begin(handler, max_batch_tokens=16, length_buckets=(4, 8), allowed_batch_sizes=(3, 4, 6), max_batch_size=6)[0].seed((4, 8))
    assert handler.shapes == {(3, 3), (4, 3), (3, 8)}, "single requests are run as 3, however long"


def test_lengths_are_not_asked_for_where_they_are_not_used(begin):
    warm, costs = begin(Handler(["a" * 3, "a" * 8], len))
    warm.seed(())
    assert {length for _, length, _ in costs.to_dict()["shapes"]} == {0}


# length buckets of the last time


@pytest.mark.parametrize(
    ("boundaries", "options", "used"),
    [
        ([4, 8], {}, True),
        ([4, 8, 16], {"max_length_buckets": 2}, False),
        ([4, 8], {"max_length": 7}, False),
        ([4, 8], {"max_length": 8}, True),
        ([4, 8], {"max_batch_tokens": 6}, False),
        ([4, 8], {"length_buckets": (8,)}, False),
        ([8, 4], {}, False),
        ([4, 4], {}, False),
        ([0, 4], {}, False),
        ("many", {}, False),
        (None, {}, False),
        ([float("inf")], {}, False),
    ],
)
def test_buckets_that_do_not_suit_the_options_are_learned_anew_and_run_times_kept(begin, file, boundaries, options, used):
    file.save({"model": known(4, 8), "boundaries": boundaries})
    warm, costs = begin(**{"length_buckets": "learn"} | options)
    assert warm.seed(()) == (tuple(boundaries) if used else ())
    assert costs.predicted(8, 8) == 5 * MS


# keeping it


@pytest.fixture(name="disk")
def disk_fixture(monkeypatch):
    return Disk(monkeypatch)


class Disk:
    """One that hangs until it is let go, and counts."""

    def __init__(self, monkeypatch):
        self.writers, self.written, self.goes_on = [], [], threading.Event()
        monkeypatch.setattr(CostFile, "save", self._save)

    def _save(self, contents):
        self.writers.append(threading.current_thread())
        assert self.goes_on.wait(60)
        self.written.append(contents["boundaries"])


def test_it_is_kept_every_so_many_ticks_if_something_has_changed(begin, disk):
    disk.goes_on.set()
    warm, costs = begin()
    costs.seed(8, 0, [5 * MS])
    for _ in range(3):  # once, as nothing changes
        ticks(warm, KEEP_TICKS - 2)
        warm.on_decide((1,))
        ticks(warm, 2)
        warm.on_decide((1,))
    warm.on_tick()
    eventually(lambda: disk.written == [[1]])
    ticks(warm)
    warm.on_decide((1, 2))  # only the buckets did
    warm.on_tick()
    eventually(lambda: disk.written == [[1], [1, 2]])
    costs.seed(4, 0, [MS])
    ticks(warm)
    warm.on_decide((1, 2))
    warm.on_tick()
    eventually(lambda: disk.written == [[1], [1, 2], [1, 2]])


def test_a_disk_that_hangs_stops_nobody_and_has_one_writer(begin, disk, monkeypatch, caplog):
    monkeypatch.setattr(warm_start, "CLOSE_LIMIT_S", 0.05)
    warm, costs = begin()
    for number in range(1, 4):
        costs.seed(number, 0, [number * MS])
        ticks(warm)
        warm.on_decide((number,))
        warm.on_tick()  # returns, though nothing is written
    eventually(lambda: len(disk.writers) == 1)
    assert disk.writers[0].daemon
    warm.close((9,))
    assert len(disk.writers) == 1
    assert "not waited for" in caplog.text
    disk.goes_on.set()
    eventually(lambda: disk.written == [[1]])
    disk.writers[0].join()
    warm.on_tick()
    eventually(lambda: disk.written == [[1], [3]])


def test_the_last_saving_waits_for_the_one_before(begin, disk):
    warm, costs = begin()
    costs.seed(8, 0, [5 * MS])
    ticks(warm)
    warm.on_decide((1,))
    warm.on_tick()
    eventually(lambda: disk.writers)
    threading.Timer(0.05, disk.goes_on.set).start()
    warm.close((2,))
    assert disk.written == [[1], [2]]


def test_without_threads_it_is_not_kept_and_nobody_falls(begin, disk, monkeypatch, caplog):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    warm, costs = begin()
    costs.seed(8, 0, [5 * MS])
    ticks(warm)
    warm.on_decide(())
    warm.on_tick()
    warm.close(())
    assert "can't start new thread" in caplog.text
    assert disk.written == []
