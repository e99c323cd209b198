"""In-process workers with a latency budget, for tests: held rather than slow, and believing what they are told of their run times."""

import threading

import pytest

import gpuworker
from gpuworker.scheduling.cost_model import CostModel
from gpuworker.worker.cost_file import CostFile
from gpuworker.worker.handler import name_of
from tests.conftest import Gate, eventually

LONG_MS = 60_000
SHORT_MS = 60


@pytest.fixture(name="live")
def live_fixture(in_process):
    """-> (worker, gate): an in-process worker that has a latency budget unless told otherwise. Gates are opened before it is stopped."""
    gates = []

    def start(gate=None, **options):
        gates.append(gate or Gate())
        return in_process(gates[-1], **{"latency_budget_ms": LONG_MS, "cost_file": "off"} | options), gates[-1]

    yield start
    for gate in gates:
        gate.open()


def side_by_side(call, arguments):
    """Calls it with each of the arguments, in a thread each, and waits for all of them."""
    callers = [threading.Thread(target=call, args=(argument,)) for argument in arguments]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)


def hold(client, gate, request="first"):
    """-> the request's Pending: its batch runs, and does not end before the gate is opened."""
    gate.shut()
    before = len(gate.batches)
    pending = client.enqueue(request)
    eventually(lambda: len(gate.batches) > before)
    return pending


def known_costs(tmp_path, run_ms, max_batch_size, lengths=(0,), full_ms=None, of=Gate):
    """A file of run times as an earlier worker would have left it: every batch takes run_ms, or more the larger it is, up to full_ms."""
    model = CostModel(max_batch_size)
    for length in lengths:
        model.seed(1, length, [round(run_ms * 1e6)] * 5)
        model.seed(max_batch_size, length, [round((full_ms or run_ms) * 1e6)] * 5)
    file = tmp_path / "costs.json"
    CostFile(str(file), name_of(of)).save({"model": model.to_dict(), "boundaries": []})
    return str(file)


def outcome(pending):
    """The answer, or the error."""
    try:
        return pending.result(60)
    except gpuworker.GpuWorkerError as error:
        return error
