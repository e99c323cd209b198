"""While a worker that generates has nothing else to do, it captures the CUDA graphs of decode steps: here on a CUDA that is simulated."""

import pytest
import torch

import gpuworker
from gpuworker.cli import main
from gpuworker.generation.graphs import row_buckets
from gpuworker.generation.handler import GenerationHandler
from tests import tiny_llama
from tests.conftest import eventually
from tests.fake_cuda import OneDevice
from tests.simulated_decode import Simulated, without_kernel_fixture  # noqa: F401 (a fixture)
from tests.tiny_decoders import alone, decoder

ROWS = 2


class OnStream:
    """A simulated model and its graphs, as a handler has them: from whichever thread they are called, it is on their stream."""

    def __init__(self, simulated):
        self.simulated, self.forward = simulated, simulated.forward

    def __getattr__(self, name):
        return getattr(self.simulated.graphs, name)

    def capture_next(self):
        with self.simulated.api.stream(self.simulated.stream):
            return self.simulated.graphs.capture_next()

    def close(self):
        """The test does."""


class OnSimulatedCuda(GenerationHandler):
    simulated = None

    def prepare(self):
        super().prepare()
        self._graphs = self._engine._model = OnStream(self.simulated)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama.save(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def serve(directory, in_process, monkeypatch):
    made = []

    def serve(**options):
        handler = OnSimulatedCuda(directory, device="cpu", max_model_tokens=256)
        handler.simulated = Simulated(decoder("llama", num_hidden_layers=1), OneDevice(), monkeypatch, max_rows=ROWS, max_tokens=256)
        made.append(handler.simulated)
        return in_process(handler, max_batch_size=ROWS, **options), handler.simulated

    yield serve
    for one in made:
        one.close()


def test_all_buckets_are_captured_while_nothing_is_to_be_done(serve):
    worker, simulated = serve()
    count = len(row_buckets(ROWS)) * 2  # of two widths
    eventually(lambda: (found := worker.stats().generation) and found.graphs == count, 60)
    ids = [5, 6, 7]
    assert worker.connect().generate(ids, max_tokens=12, ignore_eos=True).tokens == alone(decoder("llama", num_hidden_layers=1), ids, 12)
    eventually(lambda: worker.stats().generation.running == 0 < worker.stats().generation.graph_hits)
    found = worker.stats().generation
    assert (found.graph_hits, found.graph_misses, found.steps) == (11, 0, 12)  # the first is the prompt's
    assert found.graph_bytes > 0
    assert simulated.api.captures == count


def test_a_request_waits_for_one_capture_and_no_more(serve, monkeypatch):
    """Captures are made one at a time, and none while there are steps."""
    seen = []
    capture = OnStream.capture_next
    monkeypatch.setattr(OnStream, "capture_next", lambda self: seen.append("capture") or capture(self))
    forward = Simulated.forward
    monkeypatch.setattr(Simulated, "forward", lambda self, chunks: seen.append("step") or forward(self, chunks))
    worker, _ = serve()
    worker.connect().generate([5, 6, 7], max_tokens=8, ignore_eos=True)
    steps = [k for k, what in enumerate(seen) if what == "step"]
    assert len(steps) == 8
    assert steps == list(range(steps[0], steps[0] + 8))


def has_ended(worker):
    try:
        return worker.stats().state not in ("serving", "starting")
    except gpuworker.WorkerNotFound:
        return True


def test_a_device_that_is_lost_in_a_capture_ends_the_owner(serve, monkeypatch, caplog):
    def lost(self):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    worker, _ = serve()
    monkeypatch.setattr(OnStream, "capture_next", lost)
    eventually(lambda: has_ended(worker), 60)
    assert any("the device is lost, and the owner ends" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("flag", "given"), [("--no-cuda-graphs", False), ("--cuda-graphs", True), (None, None)])
def test_the_commands_flag_reaches_the_handler(directory, name, monkeypatch, flag, given):
    jobs = []
    monkeypatch.setattr("gpuworker.config.served.check_directory", str)
    monkeypatch.setattr("gpuworker.cli.serve.Supervisor", lambda job, *_: jobs.append(job) or type("Done", (), {"run": lambda self: 0})())
    assert main(["serve", "--hf", directory, "--name", name, *([flag] if flag else [])]) == 0
    handler = GenerationHandler(directory)
    handler.configure(gpuworker.worker.WorkerOptions.of(jobs[0].options))
    assert handler._options.cuda_graphs is given
