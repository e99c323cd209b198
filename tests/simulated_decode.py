"""Decode steps on a CUDA that is simulated (tests/fake_cuda.py), with models of transformers: what its tests share."""

import functools
import logging
import random
from types import SimpleNamespace

import pytest
import torch

from gpuworker.generation import decode_kernels, graphs
from gpuworker.generation.blocks import BlockPool
from gpuworker.generation.graphs import DecodeGraphs
from gpuworker.generation.model import PagedModel
from gpuworker.generation.scheduler import Scheduler
from gpuworker.generation.sequence import Sequence
from tests.fake_cuda import DEVICE, OneDevice
from tests.paged_model import shuffle
from tests.tiny_decoders import decoder

BLOCKS, ROWS, TOKENS = 70, 12, 512
SOME = 20
"""Steps in which some of the traffic comes."""


@pytest.fixture(name="without_kernel", autouse=True)
def without_kernel_fixture(monkeypatch):
    """The native kernel does what it is told at once, and the simulated device knows nothing of it."""
    monkeypatch.setattr(decode_kernels, "decode_kernel", lambda layer: None)


@pytest.fixture(name="seed", params=[None, 1])
def seed_fixture(request):
    """Of when the simulated device does what was queued; None: as late as possible."""
    return request.param


@pytest.fixture(name="make")
def make_fixture(monkeypatch):
    """Models on a simulated device, with graphs."""
    made = []

    def make(name="llama", seed=None, **options):
        made.append(Simulated(decoder(name, num_hidden_layers=1), OneDevice(seed=seed), monkeypatch, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.api.living_graphs == 0


@pytest.fixture(name="warnings")
def warnings_fixture(caplog):
    caplog.set_level(logging.WARNING, logger="gpuworker")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "gpuworker"]


class Simulated:
    """A model all of whose tensors are on the simulated device, its graphs, and the stream that it runs on."""

    def __init__(self, model, api, monkeypatch, **options):
        api.time(monkeypatch)
        monkeypatch.setattr(graphs, "time", SimpleNamespace(monotonic_ns=lambda: api.host_ns))
        self.api, self.stream = api, api.Stream()
        self.paged = PagedModel(model, blocks=BLOCKS)
        self.paged.cache.device = DEVICE
        self.layers = [layer.blocks for layer in self.paged.cache.layers.values()]
        for tensor in [*model.parameters(), *model.buffers(), *self.layers]:
            api._register(tensor)
        with api.stream(self.stream):
            self.graphs = DecodeGraphs(self.paged, **{"max_rows": ROWS, "max_tokens": TOKENS, "limit_bytes": 1 << 28, "api": api, **options})

    def forward(self, chunks):
        with self.api.stream(self.stream):
            found = self.graphs.forward(chunks)
        self.api.synchronize()
        return found.clone()

    def capture(self, count=None):
        """So many graphs, or all."""
        with self.api.stream(self.stream):
            while self.graphs.capture_next() and (count is None or self.graphs.count < count):
                pass
        self.api.synchronize()

    def noise(self):
        """Fills the cache. -> a copy of it."""
        torch.manual_seed(5)
        with torch.inference_mode():
            for blocks in self.layers:
                blocks.normal_()
        return self.copy()

    def copy(self):
        return [blocks.clone() for blocks in self.layers]

    def close(self):
        self.api.lost = None
        with self.api.stream(self.stream):
            self.graphs.close()
        self.paged.close()


def put(values, paged):
    """Into a model's cache."""
    with torch.inference_mode():
        for layer, value in zip(paged.cache.layers.values(), values, strict=True):
            layer.blocks.copy_(value)


def traffic(until=100, seed=3):
    """Step -> (prompt, tokens) of who comes before it. Some cross the ends of the table's buckets, at 128 and 256 tokens, and come alone so that small batches do,
    too; and step -> the ticket that is withdrawn."""
    choice = random.Random(seed)
    lengths = {0: [124], 8: [252], 16: [60, 123], 26: [5, 30, 250, 11], 36: [4, 9, 17, 20, 31, 33], 44: [15, 16, 3, 8, 40]}
    arrivals = {
        at: [([choice.randint(3, 255) for _ in range(length)], choice.randint(10, 24)) for length in those]
        for at, those in lengths.items()
        if at < until
    }
    return arrivals, {at: ticket for at, ticket in {30: 4, 47: 9, 49: 1}.items() if at < until}


def make_scheduler(blocks=34, max_running=ROWS):
    pool = BlockPool(blocks)
    shuffle(pool, random.Random(3))
    return Scheduler(pool, max_batch_tokens=300, max_running=max_running, max_model_tokens=TOKENS, watermark_blocks=0)


def drive(forward, scheduler, arrivals, cancels):
    """Runs all traffic, greedily. -> the rows of each step that only decodes and how many blocks the longest has, the tokens of each, and each step's logits."""
    shapes, logits, sequences, step = [], [], [], 0
    while scheduler.running or scheduler.waiting or step <= max(arrivals):
        for prompt, most in arrivals.get(step, ()):
            sequences.append(Sequence(len(sequences), prompt, max_tokens=most))
            scheduler.add(sequences[-1])
        if step in cancels:
            scheduler.cancel(sequences[cancels[step]])
        step += 1
        chunks = scheduler.plan()
        if not chunks:
            continue
        if max(chunk.count for chunk in chunks) == 1:
            shapes.append((len(chunks), max(chunk.start for chunk in chunks) // 16 + 1))
        logits.append(forward(chunks))
        last = [chunk.sequence for chunk in chunks if chunk.is_last]
        assert len(last) == len(logits[-1])
        scheduler.done(chunks, dict(zip(last, logits[-1].argmax(-1).tolist(), strict=True)))
        scheduler.check()
    return shapes, [sequence.generated for sequence in sequences], logits


@functools.lru_cache
def eagerly(name, until=100):
    return drive(PagedModel(decoder(name, num_hidden_layers=1), blocks=BLOCKS).forward, make_scheduler(), *traffic(until))


def assert_same(found, expected):
    assert found[:2] == expected[:2]
    for one, other in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def changed(simulated, change):
    """From here on `change(logits)` is called in every decode step that goes the way of graphs."""
    decode = simulated.paged.decode

    def changed(batch):
        logits = decode(batch)
        return change(logits)

    simulated.paged.decode = changed


def waits(logits):
    return logits if logits.isnan().any() else logits + 0


def fails(logits):
    raise ValueError("not such a batch")
