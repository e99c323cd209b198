"""Decode steps as graphs on a CUDA that is simulated (tests/fake_cuda.py), with models of transformers, against the same steps without graphs."""

import functools
import logging
import random
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from gpuworker.execution.failures import Failure, kind_of
from gpuworker.generation import decode_kernels, graphs
from gpuworker.generation.blocks import BlockPool
from gpuworker.generation.graphs import DecodeGraphs, row_buckets, width_buckets
from gpuworker.generation.handler import GenerationHandler
from gpuworker.generation.model import PagedModel
from gpuworker.generation.scheduler import Scheduler
from gpuworker.generation.sequence import Sequence
from gpuworker.worker.options import WorkerOptions
from tests.fake_cuda import DEVICE, FakeCuda
from tests.paged_model import shuffle
from tests.test_paged_attention import chunk_of, scattered
from tests.tiny_decoders import decoder
from tests.tiny_llama import save

BLOCKS, ROWS, TOKENS = 70, 12, 512
SOME = 20
"""Steps in which some of the traffic comes."""
LIMIT_BYTES = 700_000


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def without_kernel(monkeypatch):
    """The native kernel does what it is told at once, and the simulated device knows nothing of it."""
    monkeypatch.setattr(decode_kernels, "decode_kernel", lambda layer: None)


@pytest.fixture(params=[None, 1])
def seed(request):
    """Of when the simulated device does what was queued; None: as late as possible."""
    return request.param


@pytest.fixture
def make(monkeypatch):
    """Models on a simulated device, with graphs."""
    made = []

    def make(name="llama", seed=None, **options):
        made.append(Simulated(decoder(name, num_hidden_layers=1), OneDevice(seed=seed), monkeypatch, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.api.living_graphs == 0


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="gpuworker")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "gpuworker"]


class OneDevice(FakeCuda):
    """What is made on the device of some tensor is on the simulated one: all of the model's tensors are."""

    def call(self, func, args, kwargs):
        return super().call(func, args, kwargs | {"device": DEVICE} if kwargs.get("device") == torch.device("cpu") else kwargs)


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


def paged_kernel(query, blocks, key_width, table, lengths, scale=None, window=None):
    """What paged_kernel.py computes: what is not seen is not read."""
    rows, heads, _ = query.shape
    both = blocks[table].flatten(1, 2).transpose(1, 2)
    at, ends = torch.arange(both.shape[2])[None], lengths[:, None]
    is_seen = at < ends
    if window is not None:
        is_seen = is_seen & (at >= ends - window)
    both = both.masked_fill(~is_seen[:, None, :, None], 0)
    mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, float("-inf"))[:, None, None]
    queries = query.reshape(rows, both.shape[1], -1, query.shape[-1])
    found = F.scaled_dot_product_attention(queries, both[..., :key_width], both[..., key_width:], attn_mask=mask, scale=scale)
    return found.reshape(rows, heads, -1)


@pytest.fixture
def with_kernel(monkeypatch):
    monkeypatch.setattr(decode_kernels, "decode_kernel", lambda layer: paged_kernel)


def test_buckets():
    assert row_buckets(1) == [1]
    assert row_buckets(6) == [1, 2, 4, 6]
    assert row_buckets(8) == [1, 2, 4, 8]
    assert row_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert row_buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert width_buckets(5) == [5]
    assert width_buckets(8) == [8]
    assert width_buckets(9) == [8, 9]
    assert width_buckets(64) == [8, 16, 32, 64]


def test_the_traffic_has_batches_of_every_size_and_crosses_every_bucket():
    scheduler = make_scheduler()
    shapes, generated, _ = drive(PagedModel(decoder("llama", num_hidden_layers=1), blocks=BLOCKS).forward, scheduler, *traffic())
    assert scheduler.stats().preemptions > 0
    assert {rows for rows, _ in shapes} >= set(range(1, ROWS + 1))
    assert {(width > 8) + (width > 16) for _, width in shapes} == {0, 1, 2}
    assert len({token for one in generated for token in one}) > 30, "such answers prove nothing"


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_as_without_graphs(make, name, seed, warnings):
    """Joins, leaves, preemptions, and lengths that grow past each bucket (vllm 13418, aprender PR 2030)."""
    simulated = make(name, seed)
    simulated.capture()
    assert simulated.graphs.count == len(row_buckets(ROWS)) * 3
    found = drive(simulated.forward, make_scheduler(), *traffic())
    assert_same(found, eagerly(name))
    assert (simulated.graphs.hits, simulated.graphs.misses) == (len(found[0]), 0)
    assert simulated.api.captures == simulated.graphs.count
    assert simulated.graphs.reason is None
    assert not warnings()


def test_as_without_graphs_where_a_kernel_reads_lengths(make, seed, with_kernel):
    """One width for all; behind a row's end the table holds what another step has left."""
    simulated = make("mistral-window", seed)
    simulated.capture()
    assert simulated.graphs.count == len(row_buckets(ROWS))
    found = drive(simulated.forward, make_scheduler(), *traffic())
    assert_same(found, eagerly("mistral-window"))
    assert (simulated.graphs.hits, simulated.graphs.misses) == (len(found[0]), 0)


def test_captured_between_steps(make, seed):
    simulated = make("llama", seed)
    found = drive(simulated.forward, make_scheduler(), *traffic())
    assert_same(found, eagerly("llama"))
    assert simulated.graphs.hits > 5
    assert simulated.graphs.misses > 5
    assert simulated.graphs.hits + simulated.graphs.misses == len(found[0])
    assert simulated.api.captures == simulated.graphs.count > 1


def test_the_same_bits_again(make):
    first, second = (drive(make(seed=seed).forward, make_scheduler(), *traffic(SOME)) for seed in (1, 2))
    assert first[:2] == second[:2]
    assert all(torch.equal(one, other) for one, other in zip(first[2], second[2], strict=True))


def test_graphs_make_room_for_others(make):
    simulated = make(limit_bytes=LIMIT_BYTES)
    assert_same(drive(simulated.forward, make_scheduler(), *traffic(SOME)), eagerly("llama", SOME))
    assert 0 < simulated.graphs.count < simulated.api.captures
    assert 0 < simulated.graphs.size_bytes <= LIMIT_BYTES


@pytest.mark.parametrize("has_kernel", [False, True])
def test_padding_and_captures_write_to_nobodys_blocks(make, seed, has_kernel, monkeypatch):
    """vllm 43810, xllm PR 1939, sglang PR 24743, flashinfer 2883."""
    if has_kernel:
        monkeypatch.setattr(decode_kernels, "decode_kernel", lambda layer: paged_kernel)
    simulated = make(seed=seed)
    before = simulated.noise()
    simulated.capture()
    for one, other in zip(simulated.copy(), before, strict=True):
        assert torch.equal(one[1:], other[1:])
    chunks, _ = scattered([(20, 1), (32, 1), (100, 1)], blocks=BLOCKS)
    expected = PagedModel(decoder("llama", num_hidden_layers=1), blocks=BLOCKS)
    put(before, expected)
    torch.testing.assert_close(simulated.forward(chunks), expected.forward(chunks), rtol=1e-4, atol=1e-4)
    assert simulated.graphs.hits == 1
    written = [(chunk.sequence.blocks[chunk.start // 16], chunk.start % 16) for chunk in chunks]
    fresh = chunks[1].sequence.blocks[2]
    for one, other, wanted in zip(simulated.copy(), before, expected.cache.layers.values(), strict=True):
        for block, offset in written:
            torch.testing.assert_close(one[block, offset], wanted.blocks[block, offset], rtol=1e-4, atol=1e-4)
            other[block, offset] = one[block, offset]
        assert not one[fresh, 1:].any()
        other[fresh] = one[fresh]
        assert torch.equal(one[1:], other[1:])


def test_a_capture_does_not_run_the_step_that_was_there_before(make):
    simulated = make()
    simulated.capture(8)
    chunks, _ = scattered([(200, 1), (32, 1), (100, 1)], blocks=BLOCKS)
    simulated.forward(chunks)
    assert simulated.graphs.hits == 1
    before = simulated.noise()
    simulated.capture()
    assert simulated.graphs.count == 15
    for one, other in zip(simulated.copy(), before, strict=True):
        assert torch.equal(one[1:], other[1:])


@pytest.mark.parametrize("left", [float("nan"), float("inf")])
def test_what_others_have_left_harms_nobody(make, left):
    """In blocks that are nobody's, in the one that padding writes to, and in those of the step before, whose numbers are still in the table."""
    simulated = make()
    simulated.capture()
    with torch.inference_mode():
        for blocks in simulated.layers:
            blocks.fill_(left)
    assert_same(drive(simulated.forward, make_scheduler(), *traffic()), eagerly("llama"))


def test_the_table_of_the_step_before_is_not_read(make):
    simulated = make()
    simulated.capture()
    long, left = scattered([(100, 1)], blocks=BLOCKS)
    simulated.forward(long)
    noise = simulated.noise()
    for values in noise:
        values[long[0].sequence.blocks] = float("nan")
    put(noise, simulated.paged)
    short = [chunk_of(20, 1, left[:2])]
    found = simulated.forward(short)
    assert simulated.graphs.hits == 2
    paged = PagedModel(decoder("llama", num_hidden_layers=1), blocks=BLOCKS)
    put(noise, paged)
    torch.testing.assert_close(found, paged.forward(short), rtol=1e-4, atol=1e-4)


def test_rows_that_get_no_logits(make):
    """A prompt of which only one token fits into a step."""
    simulated = make()
    noise = simulated.noise()
    simulated.capture()
    paged = PagedModel(decoder("llama", num_hidden_layers=1), blocks=BLOCKS)
    put(noise, paged)
    for flags in ([True, False, True], [False, True, True], [False, False, False]):
        chunks = [chunk_of(start, 1, [first, first + 1], is_last) for start, first, is_last in zip((20, 31, 16), (5, 9, 13), flags, strict=True)]
        expected = paged.forward(chunks)
        found = simulated.forward(chunks)
        assert found.shape == expected.shape == (sum(flags), 256)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert simulated.graphs.hits == 3


def test_steps_that_no_bucket_holds_are_eager(make):
    simulated = make(max_rows=2, max_tokens=64)
    simulated.capture()
    many, _ = scattered([(5, 1), (6, 1), (7, 1)], blocks=BLOCKS)
    long, _ = scattered([(64, 1)], blocks=BLOCKS)
    prompt, _ = scattered([(5, 1), (0, 6)], blocks=BLOCKS)
    for chunks in (many, long, prompt):
        assert len(simulated.forward(chunks)) == len(chunks)
    assert simulated.graphs.hits == simulated.graphs.misses == 0


# What goes wrong.


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


def counts():
    """Adds the number of the call: a graph has one baked in."""
    calls = []

    def count(logits):
        calls.append(1)
        return logits + len(calls)

    return count


@pytest.mark.parametrize(
    ("change", "said"),
    [(waits, "cannot be captured: .*capturing"), (fails, "cannot be captured: not such"), (counts(), "does not give what an eager")],
)
@pytest.mark.parametrize("when", ["before", "between"])
def test_what_cannot_be_captured_is_eager_for_good_and_said_once(make, warnings, change, said, when):
    simulated = make()
    expected = eagerly("llama", SOME)
    changed(simulated, change)
    if when == "before":
        simulated.capture(1)
    found = drive(simulated.forward, make_scheduler(), *traffic(SOME))
    if change in (waits, fails):
        assert_same(found, expected)
    assert found[0][0] == expected[0][0]
    (warning,) = warnings()
    assert warning.startswith("the model runs without CUDA graphs: ")
    assert re.search(said, warning)
    assert warning.endswith(simulated.graphs.reason)
    assert simulated.graphs.count == simulated.api.living_graphs == 0
    replays = simulated.api.replays
    assert replays <= 1
    drive(simulated.forward, make_scheduler(), *traffic(SOME))
    assert simulated.api.replays == replays
    assert len(warnings()) == 1


def test_a_bucket_without_memory_is_eager_and_others_are_not(make, warnings):
    simulated = make()
    simulated.api.largest_bytes = 100
    simulated.capture(1)
    simulated.api.largest_bytes = 1 << 30
    assert simulated.graphs.count == 0
    assert any("not enough memory" in warning for warning in warnings())
    refused = len(warnings())
    assert_same(drive(simulated.forward, make_scheduler(), *traffic(SOME)), eagerly("llama", SOME))
    assert len(warnings()) == refused
    assert simulated.graphs.reason is None


def test_a_lost_device_is_not_taken_for_a_capture_that_fails(make, warnings):
    simulated = make()
    simulated.api.lost = RuntimeError("gone")
    with pytest.raises(torch.AcceleratorError) as caught:
        simulated.capture()
    assert kind_of(caught.value) is Failure.DEVICE_LOST
    assert not warnings()


def test_closed_graphs_are_gone_and_steps_eager(make):
    simulated = make()
    simulated.capture(3)
    assert simulated.api.living_graphs == 3
    simulated.graphs.close()
    simulated.graphs.close()
    assert simulated.api.living_graphs == simulated.graphs.count == simulated.graphs.size_bytes == 0
    chunks, _ = scattered([(5, 1)], blocks=BLOCKS)
    assert simulated.forward(chunks).shape == (1, 256)
    assert simulated.api.replays == 0


# The handler.


def test_a_worker_may_ask_for_none_and_the_cpu_has_none(tmp_path):
    for given, option in ((True, None), (True, True), (True, False), (False, None)):
        handler = GenerationHandler(save(tmp_path), cuda_graphs=given, device="cpu", kv_cache_bytes=1 << 20)
        handler.configure(WorkerOptions(cuda_graphs=option))
        handler.load()
        handler.prepare()
        assert handler._graphs is None
        handler.close()
