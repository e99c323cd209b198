"""Prometheus' text: what it says, how it is named, of whom it speaks."""

import contextlib
import dataclasses
import os
import signal

import pytest
from prometheus_client.parser import text_string_to_metric_families

import gpuworker
from gpuworker.errors import WorkerNotFound
from gpuworker.metrics import which_are_up
from gpuworker.metrics.families import FAMILIES, SIZES, UP
from gpuworker.metrics.kinds import times
from gpuworker.segment.reader import StatsReader
from gpuworker.segment.stats import Histogram

from . import handlers
from .conftest import Gate, eventually, kill_all
from .exposed import samples, text_of, value, with_everything


def parsed(text):
    return list(text_string_to_metric_families(text.decode()))


def test_it_says_what_the_statistics_say(in_process):
    worker = in_process(lambda requests: [ValueError("odd") if r == 3 else r for r in requests], capacity=8)
    with worker.connect() as client:
        for pending in [client.enqueue(r) for r in range(5)]:
            with contextlib.suppress(ValueError):
                pending.result()
        stats, text = worker.stats(), gpuworker.render_metrics([worker.name])
    assert value(text, "gpuworker_up") == value(text, "gpuworker_owner_up") == value(text, "gpuworker_state", state="serving") == 1
    assert value(text, "gpuworker_state", state="draining") == 0
    assert value(text, "gpuworker_requests_submitted_total") == 5
    assert value(text, "gpuworker_requests_completed_total") == 4
    assert value(text, "gpuworker_requests_failed_total") == 1
    assert value(text, "gpuworker_slots") == 8
    assert value(text, "gpuworker_clients") == 1
    assert sum(value(text, "gpuworker_batches_total", reason=reason) for reason in stats.dispatch_reasons) == stats.batches
    assert value(text, "gpuworker_batch_size_count") == stats.batches
    assert value(text, "gpuworker_batch_size_sum") == 5
    for name, found in (("queue_wait", stats.queue_wait), ("batch_wait", stats.batch_wait), ("run", stats.run), ("claim_wait", stats.claim_wait)):
        assert value(text, f"gpuworker_{name}_seconds_count") == found.count
        assert value(text, f"gpuworker_{name}_seconds_sum") == found.sum_ns / 1e9
    assert value(text, "gpuworker_info", handler=stats.handler) == 1


def test_names_follow_the_conventions(in_process):
    names = [family.name for family in (UP, *FAMILIES)]
    assert len(set(names)) == len(names)
    for family in (UP, *FAMILIES):
        assert family.name.startswith("gpuworker_")
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert not family.name.endswith(("_ms", "_us", "_ns", "_s", "_kib", "_percent"))
        assert family.help.endswith(".")
        assert "\n" not in family.help
    text = text_of(with_everything(in_process(Gate())))
    assert [family.name for family in parsed(text)] == [name.removesuffix("_total") for name in names]  # each of them, once
    for family, declared in zip(parsed(text), (UP, *FAMILIES), strict=True):
        assert family.type == declared.kind
        assert {label for s in family.samples for label in s.labels} - {"worker"} == set(declared.labels)
        assert {s.labels["worker"] for s in family.samples} != {""}


def test_device_and_generation_are_there_only_where_there_is_such_a_thing(in_process):
    stats = in_process(Gate()).stats()
    assert not [name for name, _ in samples(text_of(stats)) if "device" in name or "generation" in name]
    everything = with_everything(in_process(Gate()))
    text = text_of(stats, everything)
    assert {s.labels["worker"] for family in parsed(text) if family.name == "gpuworker_generation_tokens" for s in family.samples} == {
        everything.name
    }
    assert value(text_of(everything), "gpuworker_device_memory_bytes") == everything.execution.memory_bytes
    assert value(text_of(everything), "gpuworker_device_seconds_total") == everything.execution.device_ns / 1e9
    assert value(text_of(everything), "gpuworker_generation_used_blocks") == everything.generation.blocks_used


def test_buckets_are_cumulative_and_exact():
    starts_ns = [256 * 2 ** (i // 4) * (1 + i % 4 / 4) for i in range(128)]
    words = [0] * 128
    for ns in (300, 1000, 1024, 5000, 5000, 10**9, 10**12):
        words[max(i for i, start in enumerate(starts_ns) if start <= ns)] += 1
    found = Histogram.of([*words, 12345, 99])
    family = times("t", "Help.", (2, 4, 5, 10, 22), lambda stats: found)
    got = dict(zip([row.suffix + row.labels for row in family.rows], family.values(None), strict=True))
    assert got['_bucket,le="1.024e-06"'] == 2  # 1024 itself lies in the bucket that begins there
    assert got['_bucket,le="4.096e-06"'] == 3
    assert got['_bucket,le="8.192e-06"'] == got['_bucket,le="0.000262144"'] == 5
    assert got['_bucket,le="1.073741824"'] == 6
    assert got['_bucket,le="+Inf"'] == 7
    assert got["_count"] == 7  # of the buckets as they were read, not of a count that was read later
    assert got["_sum"] == 12345 / 1e9


def test_batch_sizes(in_process):
    stats = dataclasses.replace(in_process(Gate()).stats(), batch_sizes={"1": 3, "33": 2, "63": 1, "64-127": 4, "4096-8191": 1})
    text = text_of(stats)
    found = {bound: value(text, "gpuworker_batch_size_bucket", le=str(bound)) for bound in SIZES}
    assert found == {1: 3, 2: 3, 4: 3, 8: 3, 16: 3, 32: 3, 63: 6, 127: 10, 255: 10, 511: 10, 1023: 10, 2047: 10, 4095: 10}
    assert value(text, "gpuworker_batch_size_count") == value(text, "gpuworker_batch_size_bucket", le="+Inf") == 11


def test_whatever_the_segment_says_of_its_handler_the_text_can_be_read(in_process):
    stats = in_process(Gate()).stats()
    for handler in ('a"b\\c', "line\nbreak\r\x00", "\ud800", 'x"} 1\ngpuworker_up{worker="y"} 1', ""):
        text = text_of(dataclasses.replace(stats, handler=handler))
        assert {s.labels["worker"] for family in parsed(text) for s in family.samples} == {stats.name}
    assert value(text_of(dataclasses.replace(stats, handler='a"b\\c')), "gpuworker_info", handler='a"b\\c') == 1


def test_counters_never_go_back_while_the_owner_has_yet_to_see_what_a_reader_has_done(in_process):
    """Statistics show abandoned requests less those whose reader had enough, which readers count first; a counter that goes back is a restart to Prometheus."""
    stats = in_process(Gate()).stats()
    seen = [
        value(text_of(dataclasses.replace(stats, abandoned=max(abandoned - satisfied, 0), satisfied=satisfied)), "gpuworker_requests_abandoned_total")
        for abandoned, satisfied in ((3, 0), (3, 1), (4, 1), (4, 6), (5, 6), (6, 6), (7, 6))
    ]
    assert seen == sorted(seen)


def test_a_dead_worker_is_down_and_its_numbers_are_still_there(start):
    worker = start(handlers.identity)
    with worker.connect() as client:
        client.submit(0)
    reader = StatsReader()
    assert reader.read(worker.name).completed == 1
    os.kill(worker.pid, signal.SIGSTOP)  # nobody is asked
    text = gpuworker.render_metrics([worker.name])
    assert (value(text, "gpuworker_up"), value(text, "gpuworker_requests_completed_total")) == (1, 1)
    kill_all(worker)
    text = gpuworker.render_metrics([worker.name])
    assert (value(text, "gpuworker_up"), value(text, "gpuworker_owner_up"), value(text, "gpuworker_requests_completed_total")) == (0, 0, 1)
    assert which_are_up([worker.name]) == {worker.name: False}
    assert reader.read(worker.name).alive is False
    worker.stop()
    text = gpuworker.render_metrics([worker.name])
    assert samples(text) == {("gpuworker_up", ()): 0}
    assert f"# worker {worker.name}: no worker named" in text.decode()
    with pytest.raises(WorkerNotFound):
        reader.read(worker.name)


def test_a_worker_that_was_replaced_is_found_again(in_process, name):
    first = gpuworker.Worker(Gate(), name=name, in_process=True, capacity=4).start()
    assert value(gpuworker.render_metrics([name]), "gpuworker_slots") == 4
    first.stop()
    with gpuworker.Worker(Gate(), name=name, in_process=True, capacity=8):
        assert value(gpuworker.render_metrics([name]), "gpuworker_slots") == 8


def test_all_workers_of_this_user(in_process):
    workers = {in_process(Gate()).name, in_process(Gate()).name}
    text = gpuworker.render_metrics()
    exposed = {s.labels["worker"] for family in parsed(text) if family.name == "gpuworker_slots" for s in family.samples}
    assert workers <= exposed
    assert [family.name for family in parsed(text)].count("gpuworker_slots") == 1
    assert workers <= {name for name, up in which_are_up().items() if up}


def test_what_lies_about_under_a_workers_name_spoils_nothing(in_process, name):
    worker = in_process(Gate())
    path = f"/dev/shm/gpuworker-{name}-junk"
    with open(path, "wb") as file:
        file.write(b"nonsense" * 1000)
    try:
        text = gpuworker.render_metrics()
        found = {s.labels["worker"]: s.value for family in parsed(text) if family.name == "gpuworker_up" for s in family.samples}
        assert (found[worker.name], found[f"{name}-junk"]) == (1, 0)
        assert f"# worker {name}-junk: the segment of worker" in text.decode()
    finally:
        os.unlink(path)


def test_what_is_no_name_is_an_error():
    with pytest.raises(ValueError, match=r"worker name '../etc'"):
        gpuworker.render_metrics(["../etc"])


def test_a_forked_child_reads_for_itself(in_process):
    worker = in_process(Gate())
    reader = StatsReader()
    reader.read(worker.name)
    with reader._lock:  # as if another thread were reading at the time of the fork
        pid = os.fork()
        if not pid:
            os._exit(0 if reader.read(worker.name).capacity == worker.stats().capacity and worker.name in reader.names() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert reader.read(worker.name).alive


def test_segments_of_those_who_are_gone_are_let_go(in_process):
    worker = in_process(Gate())
    reader = StatsReader()
    reader.read(worker.name)
    worker.stop()
    eventually(lambda: worker.name not in reader.names())
    assert not reader._segments
