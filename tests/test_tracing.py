"""Spans of the owner, as an OpenTelemetry SDK gets them; worker, client and SDK in one process."""

import asyncio
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import gpuworker
from gpuworker._native import lib
from gpuworker.worker import tracer as tracer_module

from .conftest import Gate, eventually

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
EXPORTER = InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def provider():
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(EXPORTER))
    trace.set_tracer_provider(made)  # once a process


@pytest.fixture
def spans():
    """-> a function: the finished spans of that name, in the order of their starts."""
    EXPORTER.clear()
    return lambda name: sorted((span for span in EXPORTER.get_finished_spans() if span.name == name), key=lambda span: span.start_time)


@pytest.fixture
def tracer():
    return trace.get_tracer("test")


def submit_traced(tracer, client, request, **options):
    with tracer.start_as_current_span("caller") as span:
        assert client.submit(request, **options) is not None
    return span.get_span_context()


@pytest.mark.parametrize(
    "request_", [b"bytes", "text", {"a": [1, 2]}, np.arange(5.0), b"x" * 100_000], ids=["bytes", "str", "tree", "array", "spilled"]
)
def test_a_request_waits_and_runs_within_its_callers_span(in_process, spans, tracer, request_):
    before_ns = time.time_ns()
    worker = in_process(Gate(), tracing=True)
    with worker.connect(tracing=True) as client:
        caller = submit_traced(tracer, client, request_)
    worker.stop()
    (waiting,), (run,), (batch,), (outside,) = spans("gpuworker.queue"), spans("gpuworker.run"), spans("gpuworker.batch"), spans("caller")
    for span in (waiting, run):
        assert span.context.trace_id == caller.trace_id
        assert (span.parent.span_id, span.parent.is_remote) == (caller.span_id, True)
        assert span.attributes["gpuworker.worker"] == worker.name
        assert span.attributes["gpuworker.request"] == "0.1"
    slack_ns = 5 * 10**9  # two clocks are compared, on a machine that may be busy; what matters is that they have one epoch
    assert before_ns <= outside.start_time
    assert outside.start_time - slack_ns <= waiting.start_time <= waiting.end_time == run.start_time <= run.end_time <= time.time_ns() + slack_ns
    assert batch.parent is None
    assert batch.context.trace_id != caller.trace_id
    assert [link.context.span_id for link in batch.links] == [caller.span_id]
    assert [link.context.span_id for link in run.links] == [batch.context.span_id]
    assert (batch.start_time, batch.end_time) == (run.start_time, run.end_time)
    assert (batch.attributes["gpuworker.batch.size"], batch.attributes["gpuworker.batch.reason"]) == (1, "age")


def test_a_batch_is_linked_to_those_of_its_requests_that_are_traced(in_process, spans, tracer):
    gate = Gate(is_open=False)
    worker = in_process(gate, tracing=True)
    with worker.connect(tracing=True) as traced, worker.connect(tracing=False) as other:
        pending = [other.enqueue(0)]
        gate.wait_entered()
        callers = []
        for i in range(3):
            with tracer.start_as_current_span("caller") as span:
                callers.append(span.get_span_context())
                pending.append(traced.enqueue(i))
                pending.append(other.enqueue(i))
        pending.append(traced.enqueue("in no span"))
        gate.open()
        for one in pending:
            one.result()
    worker.stop()
    (batch,) = spans("gpuworker.batch")  # not of the first, in which nobody is traced
    assert batch.attributes["gpuworker.batch.size"] == 7
    assert {link.context.span_id for link in batch.links} == {caller.span_id for caller in callers}
    assert len({link.context.trace_id for link in batch.links}) == 3
    assert {span.parent.span_id for span in spans("gpuworker.run")} == {caller.span_id for caller in callers}


def test_a_task_of_an_event_loop_has_a_context_of_its_own(in_process, spans, tracer):
    worker = in_process(Gate(), tracing=True)

    async def call(client, i):
        with tracer.start_as_current_span("caller"):
            await client.submit(i)

    async def main():
        async with gpuworker.connect_async(worker.name, tracing=True) as client:
            await asyncio.gather(*(call(client, i) for i in range(4)))

    asyncio.run(main())
    worker.stop()
    runs, callers = spans("gpuworker.run"), spans("caller")
    assert sorted(span.parent.span_id for span in runs) == sorted(span.context.span_id for span in callers)
    assert len({span.context.trace_id for span in runs}) == 4


def test_a_context_is_that_of_its_own_request_only(in_process, spans, tracer):
    """Slots are used again: what an earlier request has left there is no later one's."""
    worker = in_process(Gate(), capacity=1, tracing=True)
    with worker.connect(tracing=True) as client:
        submit_traced(tracer, client, 1)
        client.submit(2)
        caller = submit_traced(tracer, client, 3)
        with worker.connect(tracing=False) as other, tracer.start_as_current_span("caller"):
            client.close()
            other.submit(4)
    worker.stop()
    runs = spans("gpuworker.run")
    assert [span.attributes["gpuworker.request"] for span in runs] == ["0.1", "0.3"]
    assert runs[1].parent.span_id == caller.span_id


def test_a_reserved_slot_and_one_that_was_waited_for_carry_it_too(in_process, spans, tracer):
    gate = Gate()
    worker = in_process(gate, capacity=1, tracing=True, on_full="block")
    with worker.connect(tracing=True) as client:
        with tracer.start_as_current_span("caller"), client.reserve(4) as array:
            array[:] = 1
            client.submit(array)
        gate.shut()
        held = client.enqueue(0)
        thread = threading.Thread(target=submit_traced, args=(tracer, client, "waits"))
        thread.start()
        gate.open()
        held.result()
        thread.join()
    worker.stop()
    assert {span.context.span_id for span in spans("caller")} == {span.parent.span_id for span in spans("gpuworker.run")}


def test_what_is_not_sampled_makes_no_spans(in_process, spans):
    worker = in_process(Gate(), tracing=True)
    context = trace.SpanContext(5, 6, is_remote=False, trace_flags=trace.TraceFlags(0))
    with worker.connect(tracing=True) as client, trace.use_span(trace.NonRecordingSpan(context)):
        client.submit(0)
    worker.stop()
    assert not EXPORTER.get_finished_spans()


def test_tracing_is_off_unless_somebody_wants_it(in_process, spans, tracer, monkeypatch):
    worker = in_process(Gate())
    with worker.connect() as client:
        assert client._stamp is None
        submit_traced(tracer, client, 0)
    worker.stop()
    assert not spans("gpuworker.run")
    monkeypatch.setenv("GPUWORKER_TRACING", "1")
    worker = in_process(Gate())
    with worker.connect() as client:
        submit_traced(tracer, client, 0)
    worker.stop()
    assert len(spans("gpuworker.run")) == 1
    monkeypatch.setenv("GPUWORKER_TRACING", "0")
    assert gpuworker.connect("x")._stamp is None
    code = "import sys, gpuworker; gpuworker.connect('x'); print([m for m in sys.modules if m.startswith('opentelemetry')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_only_what_is_claimed_can_be_stamped(in_process):
    gate = Gate(is_open=False)
    worker = in_process(gate)
    with worker.connect() as client:
        pending = client.enqueue(0)
        gate.wait_entered()
        port = client._link.port
        assert lib.gw_trace(port, pending._ticket, 1, 2, 3, 1) < 0  # it is running
        assert lib.gw_trace(port, 1 << 40, 1, 2, 3, 1) < 0
        assert lib.gw_trace(port, 4095, 1, 2, 3, 1) < 0
        assert lib.gw_trace(port, -1, 1, 2, 3, 1) < 0
        gate.open()
        pending.result()


def test_an_sdk_that_cannot_keep_up_holds_up_nobody(in_process, spans, tracer, monkeypatch, caplog):
    monkeypatch.setattr(tracer_module, "MOST_WAITING", 1)
    monkeypatch.setattr(tracer_module, "CLOSE_LIMIT_S", 60.0)
    stuck = threading.Event()
    monkeypatch.setattr(tracer_module.Tracer, "_make", lambda self, batch: stuck.wait(60))
    worker = in_process(Gate(), tracing=True)
    with worker.connect(tracing=True) as client:
        for i in range(5):
            submit_traced(tracer, client, i)
    eventually(lambda: worker._session.owner.tracer._dropped >= 3)
    stuck.set()
    worker.stop()
    assert "batches were dropped, as making them took too long" in caplog.text


def test_an_error_of_the_sdk_is_logged_and_the_next_batch_traced(in_process, spans, tracer, monkeypatch, caplog):
    make, calls = tracer_module.Tracer._make, []

    def broken_at_first(self, batch):
        calls.append(batch)
        if len(calls) == 1:
            raise RuntimeError("no exporter")
        make(self, batch)

    monkeypatch.setattr(tracer_module.Tracer, "_make", broken_at_first)
    worker = in_process(Gate(), tracing=True)
    with worker.connect(tracing=True) as client:
        submit_traced(tracer, client, 0)
        submit_traced(tracer, client, 1)
    worker.stop()
    assert "spans of a batch could not be made" in caplog.text
    assert len(spans("gpuworker.run")) == 1


@pytest.mark.parametrize("wrong", ["yes", 1, 0])
def test_what_is_neither_yes_nor_no_is_refused(wrong):
    with pytest.raises(ValueError, match="tracing="):
        gpuworker.connect("x", tracing=wrong)
    with pytest.raises(ValueError, match="tracing="):
        gpuworker.WorkerOptions(tracing=wrong)


def test_without_opentelemetry_there_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gpuworker\[otel\]'"):
        gpuworker.connect("x", tracing=True)
    gpuworker.connect("x")


def test_a_request_that_generates_waits_and_runs_too(spans, tracer, tmp_path, name):
    from gpuworker.generation.handler import GenerationHandler

    from . import tiny_llama

    handler = GenerationHandler(tiny_llama.save(tmp_path), dtype="float32", kv_cache_bytes=1 << 20)
    with (
        gpuworker.Worker(handler, name=name, in_process=True, max_batch_size=4, max_batch_tokens=64, tracing=True),
        gpuworker.connect(name, tracing=True) as client,
    ):
        with tracer.start_as_current_span("caller") as span:
            client.generate([9, 10, 11], max_tokens=5, ignore_eos=True)
        client.generate([9, 10, 11], max_tokens=2)
    (waiting,), (run,) = spans("gpuworker.queue"), spans("gpuworker.run")
    assert waiting.parent.span_id == run.parent.span_id == span.get_span_context().span_id
    assert waiting.end_time == run.start_time < run.end_time
    assert not spans("gpuworker.batch")  # it takes part in many


def test_an_sdk_that_never_returns_keeps_no_worker_from_stopping(in_process, monkeypatch, caplog):
    entered, go_on = threading.Event(), threading.Event()

    def hang(*_, **__):
        entered.set()
        go_on.wait(60)

    monkeypatch.setattr(tracer_module, "CLOSE_LIMIT_S", 0.05)
    monkeypatch.setattr(EXPORTER, "export", hang)
    worker = in_process(lambda requests: requests, tracing=True)
    try:
        with worker.connect(tracing=True) as client:
            assert submit_traced_elsewhere(client) == 1
            assert entered.wait(60)
        worker.stop()
        assert any("the SDK does not return" in message for message in caplog.messages)
    finally:
        go_on.set()


def submit_traced_elsewhere(client):
    """Under a span that is never exported, as the exporter hangs."""
    parent = trace.NonRecordingSpan(trace.SpanContext(1, 1, is_remote=False, trace_flags=trace.TraceFlags(1)))
    with trace.use_span(parent):
        return client.submit(1)
