"""TensorHandlers, served on the cpu by the same code as on a GPU."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import gpuworker
from gpuworker import TensorHandler, TensorSpec
from tests.conftest import eventually, kill_owner
from tests.tensor_handlers import FLOATS, Doubled, Summed


@pytest.fixture
def serve(in_process):
    """-> (worker, client) of a handler."""

    def start(handler, **options):
        worker = in_process(handler, **options)
        return worker, gpuworker.connect(worker.name)

    return start


def some(rng, n):
    return {"x": rng.standard_normal(n).astype(np.float32), "scale": np.float32(rng.standard_normal()).reshape(())}


def check(request, answer):
    expected = request["x"] * request["scale"]
    assert answer["y"].shape == request["x"].shape
    np.testing.assert_array_equal(answer["y"], expected)
    assert abs(answer["sum"] - expected.astype(np.float64).sum()) < 1e-3


def test_a_bare_array_in_and_out(serve):
    _, client = serve(Doubled)
    answer = client.submit(np.arange(4, dtype=np.float32))
    assert (answer.dtype, answer.tolist()) == (np.float32, [0, 2, 4, 6])


def test_answers_are_of_the_requests_own_lengths_whatever_they_are_batched_with(serve):
    _, client = serve(Summed, max_wait_ms=5)
    rng = np.random.default_rng(1)
    requests = [some(rng, int(n)) for n in rng.integers(1, 301, 200)]
    for request, answer in zip(requests, client.map(requests), strict=True):
        check(request, answer)


def test_a_request_alone_and_in_a_batch_of_the_same_padded_shape_is_the_same_to_the_bit(serve):
    class Norm(TensorHandler):
        inputs = {"x": TensorSpec("float32", ("n",), mask="mask")}
        outputs = TensorSpec("float32", ())
        max_extents = {"n": 64}

        def load(self):
            torch.manual_seed(0)
            self.weights = torch.randn(64, 64)

        def forward(self, batch):
            return torch.tanh((batch["x"] * batch["mask"]) @ self.weights[: batch["x"].shape[1]]).sum(1)

    _, client = serve(Norm, allowed_batch_sizes=(8,), max_wait_ms=5, length_buckets=(64,))
    rng = np.random.default_rng(2)
    requests = [{"x": rng.standard_normal(int(n)).astype(np.float32)} for n in rng.integers(1, 65, 24)]
    together = list(client.map(requests))
    assert [client.submit(request).tobytes() for request in requests] == [answer.tobytes() for answer in together]


def test_one_request_is_not_padded_to_more_than_the_smallest_allowed_size(serve):
    handler = Summed()
    worker, client = serve(handler, allowed_batch_sizes=(1, 4, 8))
    handler.shapes.clear()
    client.submit(some(np.random.default_rng(0), 10))
    assert handler.shapes == [(1, 12)]
    eventually(lambda: worker.stats().execution is not None)
    assert (worker.stats().execution.rows, worker.stats().execution.padded_rows) == (1, 1)
    assert worker.stats().dispatch_reasons["age"] == 1


def test_lengths_270_and_252_go_into_one_batch(serve):
    handler = Summed()
    _, client = serve(handler, max_wait_ms=60_000, max_batch_size=2)
    handler.shapes.clear()
    rng = np.random.default_rng(3)
    requests = [some(rng, 270), some(rng, 252)]
    for request, pending in zip(requests, [client.enqueue(request) for request in requests], strict=True):
        check(request, pending.result(60))
    assert handler.shapes == [(2, 300)]


def test_a_batch_has_one_of_few_shapes(serve):
    handler = Summed()
    _, client = serve(handler, max_wait_ms=1, max_batch_size=16)
    rng = np.random.default_rng(4)
    list(client.map([some(rng, int(n)) for n in rng.integers(1, 301, 300)]))
    assert {rows for rows, _ in handler.shapes} <= {1, 2, 4, 8, 16}
    assert {length for _, length in handler.shapes} <= {8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 300}


def test_length_buckets_are_what_batches_are_padded_to(serve):
    handler = Summed()
    worker, client = serve(handler, max_wait_ms=5, length_buckets=(50, 100, 300))
    handler.shapes.clear()
    rng = np.random.default_rng(5)
    requests = [some(rng, int(n)) for n in rng.integers(1, 301, 200)]
    for request, answer in zip(requests, client.map(requests), strict=True):
        check(request, answer)
    assert {length for _, length in handler.shapes} == {50, 100, 300}
    stats = worker.stats()
    assert stats.tokens == sum(len(request["x"]) for request in requests)
    assert 1 < stats.padding < 1.7


def test_a_batch_is_padded_to_what_the_model_can_take_and_not_to_a_longer_bucket(serve):
    handler = Summed()
    _, client = serve(handler, length_buckets=(128, 512))
    check(request := some(np.random.default_rng(0), 290), client.submit(request))
    assert handler.shapes[-1] == (1, 300)


@pytest.mark.parametrize("options", [{"max_length": 200}, {"max_batch_tokens": 1000}, {"length_buckets": "learn"}], ids=str)
def test_without_length_buckets_batches_have_the_shapes_of_the_grid(serve, options):
    handler = Summed()
    _, client = serve(handler, **options)
    rng = np.random.default_rng(0)
    requests = [some(rng, int(n)) for n in rng.integers(1, 200, 100)]
    for request, answer in zip(requests, client.map(requests), strict=True):
        check(request, answer)
    assert {length for _, length in handler.shapes} <= {8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 200, 256, 300}


def test_the_same_handler_is_started_again_with_what_it_declares_then(name):
    class Changes(Doubled):
        extent = 3

        def load(self):
            Changes.extent += 1
            self.inputs = self.outputs = TensorSpec("float32", (Changes.extent,))

    handler = Changes()
    for extent in (4, 5):
        with gpuworker.Worker(handler, name=name, in_process=True) as worker:
            assert worker.connect().submit(np.ones(extent, np.float32)).tolist() == [2] * extent


def test_counters_of_an_owner_go_with_it(start):
    worker = start(Doubled)
    client = gpuworker.connect(worker.name)
    for _ in range(3):
        client.submit(np.ones(4, np.float32))
    eventually(lambda: worker.stats().execution is not None and worker.stats().execution.batches == 3)
    kill_owner(worker)
    eventually(lambda: worker.stats().execution is None)
    client.submit(np.ones(4, np.float32))
    eventually(lambda: (found := worker.stats().execution) and found.batches == 1)


def test_buffers_of_modules_are_found_wherever_they_are():
    class Handler(Doubled):
        def __init__(self):
            self.one, self.several = torch.nn.BatchNorm1d(3), [torch.nn.BatchNorm1d(3), {"no": "module"}]
            self.named = {"a": torch.nn.BatchNorm1d(3)}

    class Module(torch.nn.Module, Doubled):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.BatchNorm1d(3)

    assert (len(Handler().state()), len(Module().state())) == (9, 3)


def test_a_latency_budget_uses_run_times_that_were_measured_before_the_first_request(serve):
    worker, client = serve(Summed, latency_budget_ms=60_000, cost_file="off", length_buckets=(50, 300))
    check(request := some(np.random.default_rng(6), 40), client.submit(request))
    assert worker.stats().predicted_batches == 1


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (np.zeros(4), "float32"),
        (np.zeros(5, np.float32), "(4,)"),
        (np.zeros((4, 1), np.float32), "(4,)"),
        ([0.0] * 4, "np.asarray"),
        ("text", "got text"),
        ({"x": np.zeros(4, np.float32)}, "array"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_sent(serve, request_, words):
    worker, client = serve(Doubled)
    with pytest.raises(gpuworker.InvalidRequest, match="(?s).*" + words.replace("(", r"\(").replace(")", r"\)")):
        client.submit(request_)
    assert worker.stats().submitted == 0


def test_the_owner_checks_as_well_and_the_others_of_the_batch_do_not_suffer(serve, monkeypatch):
    worker, client = serve(Summed, max_wait_ms=60_000, max_batch_size=6)
    rng = np.random.default_rng(7)
    good = [some(rng, 20), some(rng, 30)]
    misfits = [
        b"bytes",
        {"x": np.zeros(3, np.float32)},
        {"x": np.zeros(301, np.float32), "scale": np.float32(1).reshape(())},
        np.zeros(4, np.float32),
    ]
    link = client._live_link(0)
    monkeypatch.setattr(type(link), "fit", lambda self, request, *_: (request, 0), raising=True)
    pending = [client.enqueue(request) for request in [misfits[0], good[0], *misfits[1:3], good[1], misfits[3]]]
    for at in (0, 2, 3, 5):
        with pytest.raises(gpuworker.InvalidRequest):
            pending[at].result(60)
    check(good[0], pending[1].result(60))
    check(good[1], pending[4].result(60))
    assert worker.stats().batches == 1


def test_arrays_in_any_order_in_memory_and_larger_than_a_slot(serve):
    class Transposed(TensorHandler):
        inputs = TensorSpec("float32", ("rows", "columns"))
        outputs = TensorSpec("float32", ("columns", "rows"))

        def forward(self, x):
            return x.transpose(1, 2)

    worker, client = serve(Transposed, max_wait_ms=5, max_request_bytes=4096, max_response_bytes=4096)
    rng = np.random.default_rng(8)
    requests = []
    for k in range(40):
        rows, columns = (int(n) for n in rng.integers(1, 60, 2))
        array = rng.standard_normal((rows, columns)).astype(np.float32)
        requests.append([array, np.asfortranarray(array), array[::-1, ::2], array[:, :1]][k % 4])
    for request, answer in zip(requests, client.map(requests), strict=True):
        np.testing.assert_array_equal(answer, request.T)
    eventually(lambda: (found := worker.stats().execution) and found.odd_requests > 5)


def test_an_array_that_was_reserved_is_filled_in_place(serve):
    _, client = serve(Doubled)
    with client.reserve((4,), "float32") as array:
        array[:] = 3
        assert client.submit(array).tolist() == [6, 6, 6, 6]


def test_without_a_worker():
    rng = np.random.default_rng(9)
    requests = [some(rng, n) for n in (5, 300, 1, 77)] * 20  # more than a batch holds
    for request, answer in zip(requests, Summed().run_batch(requests), strict=True):
        check(request, answer)
    with pytest.raises(gpuworker.InvalidRequest):
        Summed().run_batch([{"x": np.zeros(3, np.float32)}])


def test_dtypes_are_cast_on_the_device_and_back():
    class Half(TensorHandler):
        inputs = {"x": TensorSpec("float32", (3,)), "k": TensorSpec("int32", ())}
        outputs = {"y": TensorSpec("float32", (3,)), "kind": TensorSpec("bool", ())}
        dtype = "bfloat16"

        def forward(self, batch):
            assert (batch["x"].dtype, batch["k"].dtype) == (torch.bfloat16, torch.int32)
            return batch["x"] * batch["k"][:, None], batch["k"] > 1

    answer = Half().run_batch([{"x": np.float32([1, 2, 3.0001]), "k": np.int32(2).reshape(())}])[0]
    assert (answer["y"].dtype, answer["y"].tolist(), answer["kind"].tolist()) == (np.float32, [2, 4, 6], True)


def test_compiled():
    class Compiled(Doubled):
        compile = {"backend": "eager"}

    assert Compiled().run_batch([np.ones(4, np.float32)])[0].tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("attributes", "error", "words"),
    [
        ({"inputs": None}, TypeError, "inputs"),
        ({"dtype": "int32"}, ValueError, "floating-point"),
        ({"dtype": "double precision"}, ValueError, "bfloat16"),
        ({"device": "tpu"}, RuntimeError, "cuda:1"),
        ({"pipeline_depth": 16}, ValueError, "from 1 to 8"),
        ({"pipeline_depth": "2"}, ValueError, "from 1 to 8"),
        ({"graph_memory_bytes": -1}, ValueError, "graph_memory_bytes"),
        ({"max_extents": {"m": 3}}, ValueError, "max_extents"),
        ({"inputs": {f"x{k}": FLOATS for k in range(9)}}, ValueError, "up to 8 arrays"),
    ],
)
def test_a_declaration_that_cannot_be_is_an_error_at_the_start(name, attributes, error, words):
    handler = type("Wrong", (Doubled,), attributes)()
    with pytest.raises(error, match=words):
        gpuworker.Worker(handler, name=name, in_process=True).start()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_a_device_that_is_not_there_is_an_error_at_the_start(name):
    with pytest.raises(RuntimeError, match=r"device .cuda:7..*cpu"):
        gpuworker.Worker(Doubled, name=name, in_process=True, device="cuda:7").start()


def test_options_of_devices_are_for_tensor_handlers_only(name, gate):
    with pytest.raises(ValueError, match=r"pipeline_depth.*TensorHandler"):
        gpuworker.Worker(gate, name=name, in_process=True, pipeline_depth=2).start()


def test_a_handler_that_cannot_run_padding_is_served_without_a_trial(serve, caplog):
    class Picky(Summed):
        def forward(self, batch):
            if (batch["x"] > 1e8).all():
                raise ValueError("that is no real request")
            return super().forward(batch)

    _, client = serve(Picky)
    assert "give it a warmup()" in caplog.text
    check(request := some(np.random.default_rng(0), 8), client.submit(request))


def test_a_frontend_does_not_import_torch(serve):
    worker, _ = serve(Summed)
    code = (
        "import sys, numpy as np, gpuworker\n"
        f"answer = gpuworker.connect({worker.name!r}).submit({{'x': np.ones(5, np.float32), 'scale': np.float32(2).reshape(())}})\n"
        "assert answer['sum'] == 10, answer\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_the_owner_has_done_is_in_the_statistics(serve):
    worker, client = serve(Summed, max_wait_ms=5, max_batch_size=8)
    rng = np.random.default_rng(10)
    requests = [some(rng, int(n)) for n in rng.integers(1, 301, 50)]
    list(client.map(requests))
    eventually(lambda: worker.stats().execution is not None and worker.stats().execution.rows == 50)
    execution = worker.stats().execution
    assert execution.batches == worker.stats().batches
    assert execution.padded_rows >= 50
    assert execution.padding > 1
    assert execution.scattered_bytes > 50 * 8
    assert execution.gathered_bytes > execution.batches * 4
    assert 0 < execution.device_ms <= execution.wall_ms
    assert worker.stats().to_dict()["execution"]["rows"] == 50


def test_a_list_handler_has_no_such_statistics(in_process, gate):
    worker = in_process(gate)
    gpuworker.connect(worker.name).submit(b"x")
    assert worker.stats().execution is None


def test_a_length_of_the_handlers_own_goes_before_the_extent(serve):
    class Odd(Summed):
        def length(self, request):
            return 999

    _, client = serve(Odd, length_buckets=(16, 64))
    with pytest.raises(gpuworker.RequestTooLong):
        client.submit(some(np.random.default_rng(0), 5))


def test_forward_may_do_with_its_inputs_what_it_likes(serve):
    class Rough(TensorHandler):
        inputs = {"x": TensorSpec("complex64", (4,)), "y": TensorSpec("complex64", (4,))}
        outputs = TensorSpec("complex64", (4,))

        def forward(self, batch):
            x = batch.pop("x")
            x.unsqueeze_(1)
            batch["y"] = None
            return x.squeeze(1).conj()

    worker, client = serve(Rough, max_wait_ms=2)
    requests = [{"x": np.full(4, k + 1j, np.complex64), "y": np.zeros(4, np.complex64)} for k in range(50)]
    assert all((answer == request["x"].conj()).all() for request, answer in zip(requests, client.map(requests), strict=True))
    assert worker.stats().failed == 0


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda x: torch.nn.Parameter(x), None),
        (lambda x: x.to_sparse(), "dense"),
        (lambda x: x.to("meta"), "dense"),
    ],
)
def test_tensors_that_are_not_plain(returned, words):
    class Returns(Doubled):
        def forward(self, x):
            return returned(x)

    if words is None:
        assert Returns().run_batch([np.ones(4, np.float32)])[0].tolist() == [1, 1, 1, 1]
    else:
        with pytest.raises(ValueError, match=words):
            Returns().run_batch([np.ones(4, np.float32)])


def test_indices_out_of_range_never_reach_forward(serve, monkeypatch):
    class Table(TensorHandler):
        inputs = TensorSpec("int64", ("n",), below=10)
        outputs = TensorSpec("float32", ())

        def load(self):
            self.table = torch.arange(10.0)

        def forward(self, ids):
            return self.table[ids].sum(1)

    worker, client = serve(Table, max_wait_ms=60_000, max_batch_size=4)
    for wrong in ([10], [3, -1], [2**40]):
        with pytest.raises(gpuworker.InvalidRequest, match="values go from 0 to 9"):
            client.submit(np.array(wrong))
    assert worker.stats().submitted == 0
    monkeypatch.setattr(type(client._live_link(0)), "fit", lambda self, request, *_: (request, 0))
    pending = [client.enqueue(np.array(ids)) for ids in ([9, 9], [3, -1], [10], [0])]
    for at in (1, 2):
        with pytest.raises(gpuworker.InvalidRequest, match="values go from 0 to 9"):
            pending[at].result(60)
    assert (pending[0].result(60), pending[3].result(60)) == (18, 0)


def test_devices_and_dtypes_by_what_torch_calls_them():
    class Named(Doubled):
        device, dtype = torch.device("cpu"), torch.bfloat16

    assert Named().run_batch([np.ones(4, np.float32)])[0].tolist() == [2, 2, 2, 2]


def test_a_dimension_without_a_sensible_end_starts_all_the_same():
    class Endless(TensorHandler):
        inputs, outputs = TensorSpec("float32", ("n",)), TensorSpec("float32", ())
        max_extents = {"n": 2**31 - 1}

        def forward(self, x):
            return x.sum(1)

    assert Endless().run_batch([np.ones(5, np.float32)])[0] == 5
