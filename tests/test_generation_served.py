"""Generation by real workers: what clients get, whatever happens around them."""

import itertools
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import gpuworker
from gpuworker.generating import GenerationRequest
from gpuworker.generation.handler import GenerationHandler
from tests import tiny_llama
from tests.conftest import SMALL, eventually, kill_owner
from tests.generation_handlers import Deadly

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama.save(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def serve(directory, name):
    """Starts a worker with the tiny llama; in this process unless told otherwise."""
    workers = []

    def start(in_process=True, handler=None, **options):
        given = {key: options.pop(key) for key in ("kv_cache_bytes", "prefix_caching", "max_model_tokens") if key in options}
        made = handler or GenerationHandler(directory, dtype="float32", **given)
        sizes = {} if in_process else SMALL
        workers.append(gpuworker.Worker(made, name=name, in_process=in_process, **{**sizes, "max_batch_size": 8, "max_batch_tokens": 64, **options}))
        worker = workers[-1].start()
        return worker, gpuworker.connect(name)

    yield start
    for worker in workers:
        worker.stop()


def prompts(count, seed=0, longest=70):
    rng = np.random.default_rng(seed)
    return [(rng.integers(8, 256, int(rng.integers(4, longest))).tolist(), int(rng.integers(4, 40))) for _ in range(count)]


def at_once(client, requests, **how):
    """Generates for all of them at the same time. -> tokens, or the error, of each."""
    found = [None] * len(requests)

    def run(k):
        ids, count = requests[k]
        try:
            found[k] = client.generate(ids, max_tokens=count, ignore_eos=True, **how).tokens
        except Exception as error:
            found[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return found


def joined(parts):
    return list(itertools.chain.from_iterable(parts))


def idle(worker):
    """Nothing is held any more."""
    found = worker.stats().generation
    return found is not None and found.running == found.waiting == found.blocks_used == 0 and worker.stats().slots_in_use == 0


def test_each_gets_what_the_model_says_to_it_alone(serve, directory):
    worker, client = serve()
    requests = prompts(24)
    assert at_once(client, requests) == [tiny_llama.generated(directory, *request) for request in requests]
    eventually(lambda: idle(worker))
    found = worker.stats().generation
    assert found.tokens == sum(count for _, count in requests)
    assert worker.stats().completed == 24


def test_so_do_they_when_blocks_are_few_and_sequences_are_preempted(serve, directory):
    worker, client = serve(kv_cache_bytes=20 * 16 * 512)
    requests = [(ids, 100) for ids, _ in prompts(12, seed=1, longest=12)]
    assert at_once(client, requests) == [tiny_llama.generated(directory, *request) for request in requests]
    eventually(lambda: idle(worker))
    assert worker.stats().generation.preemptions > 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_beginning_that_was_seen_before_changes_nothing(serve, directory, caching):
    worker, client = serve(prefix_caching=caching)
    ids = prompts(1, seed=2)[0][0][:4] * 12  # 48 tokens: three whole blocks
    expected = tiny_llama.generated(directory, ids, 20)
    for _ in range(3):
        assert client.generate(ids, max_tokens=20, ignore_eos=True).tokens == expected
    eventually(lambda: idle(worker))
    assert (worker.stats().generation.prefix_hit_tokens > 0) == caching


def test_tokens_come_as_they_are_generated(serve, directory):
    _, client = serve()
    ids = prompts(1, seed=3)[0][0]
    with client.stream(ids, max_tokens=200, ignore_eos=True) as stream:
        parts = [delta.tokens for delta in stream]
    assert len(parts) > 10
    assert joined(parts) == tiny_llama.generated(directory, ids, 200)


def test_an_answer_ends_at_the_models_end_or_at_a_stop_id(serve, directory):
    _, client = serve()
    ids = prompts(1, seed=4)[0][0]
    expected = tiny_llama.generated(directory, ids, 30)
    stop = expected[10]
    found = client.generate(ids, max_tokens=30, ignore_eos=True, stop_ids=[stop])
    assert found.finish_reason == "stop"
    assert found.tokens == expected[: expected.index(stop) + 1]
    assert client.generate(ids, max_tokens=5, ignore_eos=True).finish_reason == "length"
    nothing = client.generate(ids, max_tokens=0)
    assert (nothing.tokens, nothing.finish_reason) == ([], "length")


def test_a_seed_gives_the_same_tokens_alone_and_among_others(serve):
    worker, client = serve()
    requests = prompts(10, seed=5)
    how = {"temperature": 1.0, "top_p": 0.9, "seed": 11, "logit_bias": {tiny_llama.POISON: -100}}
    alone = [client.generate(ids, max_tokens=count, ignore_eos=True, **how).tokens for ids, count in requests]
    assert at_once(client, requests, **how) == alone
    other = client.generate(requests[0][0], max_tokens=requests[0][1], ignore_eos=True, **how | {"seed": 12}).tokens
    assert other != alone[0]
    assert worker.stats().failed == 0


def test_what_can_never_fit_is_refused_and_the_next_one_is_served(serve, directory):
    _, client = serve(kv_cache_bytes=9 * 16 * 512)
    ids, _ = prompts(1, seed=6)[0]
    with pytest.raises(gpuworker.InvalidRequest, match="this worker takes 128 together"):
        client.generate([9] * 200, max_tokens=4)
    with pytest.raises(gpuworker.InvalidRequest):
        client.generate([9] * 600, max_tokens=4)
    with pytest.raises(gpuworker.InvalidRequest):
        client.generate([], max_tokens=4)
    assert client.generate(ids, max_tokens=8, ignore_eos=True).tokens == tiny_llama.generated(directory, ids, 8)


def test_a_suspect_that_can_never_fit_is_refused_like_any_other(serve, directory, monkeypatch):
    """A client that is no friend can send one unchecked, and write into its slot that owners have died of it."""
    from gpuworker.generation import loop

    class Suspicious:
        def __getattr__(self, name):
            return (lambda *_: 1) if name == "gw_attempts" else getattr(lib, name)

    lib = loop.lib
    worker, client = serve(kv_cache_bytes=9 * 16 * 512)
    monkeypatch.setattr(loop, "lib", Suspicious())
    link = client._live_link(0)
    ticket = link.send(GenerationRequest(ids=[9] * 100, max_tokens=100).to_payload(), 0, 0)
    with pytest.raises(gpuworker.InvalidRequest):
        link.answer(ticket, 0)
    assert client.generate([20, 21, 22], max_tokens=8, ignore_eos=True).tokens == tiny_llama.generated(directory, [20, 21, 22], 8)
    eventually(lambda: idle(worker))


def test_logits_that_are_no_numbers_fail_their_own_request_only(serve, directory):
    worker, client = serve()
    requests = prompts(8, seed=7)
    requests[3] = ([20, tiny_llama.POISON, 21], 10)
    found = at_once(client, requests)
    assert isinstance(found[3], Exception)
    for k, request in enumerate(requests):
        if k != 3:
            assert found[k] == tiny_llama.generated(directory, *request)
    eventually(lambda: idle(worker))


def test_a_step_that_fails_is_made_again_without_the_one_at_fault(serve, directory, monkeypatch):
    from gpuworker.generation.model import PagedModel

    worker, client = serve()
    forward = PagedModel.forward

    def fails(self, chunks):
        if any(99 in chunk.sequence.prompt for chunk in chunks):
            raise ValueError("a bad step")
        return forward(self, chunks)

    monkeypatch.setattr(PagedModel, "forward", fails)
    requests = [([99 if k == 2 else one for one in ids[:5]] + [98], count) for k, (ids, count) in enumerate(prompts(6, seed=8))]
    requests = [([one for one in ids if k == 2 or one != 99], count) for k, (ids, count) in enumerate(requests)]
    found = at_once(client, requests)
    assert "a bad step" in str(found.pop(2))
    requests.pop(2)
    assert found == [tiny_llama.generated(directory, *request) for request in requests]
    eventually(lambda: idle(worker))


class Steps:
    """Counts the model's steps, and lets them through one by one while shut."""

    def __init__(self, monkeypatch):
        from gpuworker.generation.model import PagedModel

        forward, self.turns, self.is_shut, self.count = PagedModel.forward, threading.Semaphore(0), False, 0

        def gated(model, chunks):
            self.count += 1
            if self.is_shut:
                assert self.turns.acquire(timeout=60), "the test let no step through"
            return forward(model, chunks)

        monkeypatch.setattr(PagedModel, "forward", gated)

    def shut(self):
        before, self.is_shut = self.count, True
        eventually(lambda: self.count > before)  # in the next one it stands still

    def open(self):
        self.is_shut = False
        self.turns.release(1000)


@pytest.fixture
def steps(monkeypatch):
    found = Steps(monkeypatch)
    yield found
    found.open()


def test_a_cancelled_answer_gives_its_blocks_back_within_two_steps(serve, steps):
    worker, client = serve(max_batch_size=3, max_batch_tokens=16, kv_cache_bytes=40 * 16 * 512)
    short, long = [20, 21, 22], [30] * 300
    decoding = [client.stream(short, max_tokens=100, ignore_eos=True) for _ in range(2)]
    for stream in decoding:
        next(iter(stream))
    prefilling = client.stream(long, max_tokens=50, ignore_eos=True)
    eventually(lambda: worker.stats().slots_in_use == 3)
    steps.shut()
    waiting = [client.stream(short, max_tokens=100, ignore_eos=True) for _ in range(3)]
    for stream in (*decoding, prefilling, *waiting):
        stream.cancel()
    steps.turns.release(2)
    eventually(lambda: idle(worker))


def test_when_all_slots_are_held_a_caller_is_told_how_long_answers_take(serve, steps):
    """It was told what one step takes."""
    worker, client = serve(capacity=4)
    client.generate([20, 21, 22], max_tokens=100, ignore_eos=True)
    eventually(lambda: worker.stats().generation.answer_ms > 0)
    holding = [client.stream([20, 21, 22], max_tokens=400, ignore_eos=True) for _ in range(4)]
    steps.shut()
    with pytest.raises(gpuworker.QueueFull, match="all 4 slots are in use; try again in about") as caught:
        client.generate([20])
    assert caught.value.retry_after_ms == pytest.approx(max(worker.stats().generation.answer_ms / 4, 1.0))
    for stream in holding:
        stream.close()


def test_a_reader_that_is_killed_gives_its_blocks_back(serve):
    worker, client = serve(in_process=False, max_response_bytes=4096)
    code = (
        "import gpuworker, sys\n"
        f"stream = gpuworker.connect({worker.name!r}).stream([20, 21, 22], max_tokens=400, ignore_eos=True)\n"
        "for delta in stream:\n    print(len(delta.tokens), flush=True)\n    break\n"
        "sys.stdin.read()\n"
    )
    reader = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    reader.stdout.readline()
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    reader.stdin.close()
    reader.stdout.close()
    eventually(lambda: idle(worker))
    assert client.generate([20, 21], max_tokens=3, ignore_eos=True).finish_reason == "length"


def test_a_reader_that_never_reads_holds_up_nobody(serve, directory):
    worker, client = serve()
    sleeper = client.stream([20, 21, 22], max_tokens=300, ignore_eos=True)
    requests = prompts(6, seed=10)
    assert at_once(client, requests) == [tiny_llama.generated(directory, *request) for request in requests]
    eventually(lambda: worker.stats().generation.running == 0)
    assert joined([delta.tokens for delta in sleeper]) == tiny_llama.generated(directory, [20, 21, 22], 300)


def test_an_owner_that_is_killed_is_followed_by_one_that_goes_on(serve, directory):
    worker, client = serve(in_process=False, max_response_bytes=4096)
    requests = [(ids, 300) for ids, _ in prompts(4, seed=11, longest=30)]
    streams = [client.stream(ids, max_tokens=count, ignore_eos=True) for ids, count in requests]
    parts = [[next(stream).tokens] for stream in map(iter, streams)]
    kill_owner(worker)
    for stream, found in zip(streams, parts, strict=True):
        found += [delta.tokens for delta in stream]
    assert [joined(found) for found in parts] == [tiny_llama.generated(directory, *request) for request in requests]
    assert worker.stats().restarts == 1


def test_or_its_streams_end_where_that_was_asked_for(serve):
    worker, client = serve(in_process=False, max_response_bytes=4096, on_owner_death="fail")
    stream = client.stream([20, 21, 22], max_tokens=450, ignore_eos=True)
    reader = iter(stream)
    next(reader)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(gpuworker.WorkerDied):
        list(reader)


def test_a_request_that_kills_owners_ends_and_takes_nobody_with_it(serve, directory):
    worker, client = serve(in_process=False, max_response_bytes=4096, handler=Deadly(directory, dtype="float32"))
    requests = [([20, 21, 22 + k], 200) for k in range(5)]
    streams = [client.stream(ids, max_tokens=count, ignore_eos=True) for ids, count in requests]
    deadly = client.stream([20, Deadly.TOKEN, 22], max_tokens=200, ignore_eos=True)
    with pytest.raises(gpuworker.WorkerDied):
        list(deadly)
    found = [joined([delta.tokens for delta in stream]) for stream in streams]
    assert found == [tiny_llama.generated(directory, *request) for request in requests]
    assert worker.stats().restarts == 2
    assert at_once(client, requests[:2]) == found[:2]


def test_a_reload_in_the_middle_of_answers_loses_nothing(serve, directory):
    worker, client = serve(in_process=False, max_response_bytes=4096, max_batch_size=1)
    requests = [([20, 21, 22 + k], 450) for k in range(14)]
    how = [{}] * 7 + [{"temperature": 1.0, "seed": 5, "logit_bias": {tiny_llama.POISON: -100}}] * 7
    streams = [client.stream(ids, max_tokens=count, ignore_eos=True, **one) for (ids, count), one in zip(requests, how, strict=True)]
    os.kill(worker.supervisor_pid, signal.SIGUSR1)
    eventually(lambda: worker.stats().reloads == 1, 90)
    assert worker.stats().completed < len(requests)  # there was something to hand over
    found = [joined([delta.tokens for delta in stream]) for stream in streams]
    assert found[:7] == [tiny_llama.generated(directory, *request) for request in requests[:7]]
    again = client.generate(requests[7][0], max_tokens=450, ignore_eos=True, **how[7]).tokens
    assert found[7] == again
    assert all(len(one) == 450 for one in found)


def test_a_deadline_ends_an_answer_that_nobody_reads(serve, steps):
    worker, client = serve()
    stream = client.stream([20, 21, 22], max_tokens=400, ignore_eos=True, timeout=0.3)
    eventually(lambda: (found := worker.stats().generation) and found.running == found.blocks_used == 0 and worker.stats().expired == 1)
    assert steps.count < 400
    with pytest.raises(gpuworker.DeadlineExceeded):
        list(stream)


def test_what_only_waited_when_an_owner_died_was_not_run_by_it(serve, directory):
    worker, client = serve(in_process=False, max_response_bytes=4096, max_batch_size=1, on_owner_death="fail")
    runs, waits = [client.stream(ids, max_tokens=400, ignore_eos=True) for ids in ([20, 21], [30, 31])]
    reader = iter(runs)
    next(reader)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(gpuworker.WorkerDied):
        list(reader)
    assert joined([delta.tokens for delta in waits]) == tiny_llama.generated(directory, [30, 31], 400)


def test_draining_ends_when_its_time_is_over(serve, steps):
    worker, client = serve(drain_timeout_s=0.2)
    stream = client.stream([20, 21, 22], max_tokens=400, ignore_eos=True)
    next(iter(stream))
    steps.shut()
    stopper = threading.Thread(target=worker.stop)
    stopper.start()
    eventually(lambda: worker.stats().state == "draining")
    threading.Event().wait(0.3)  # the real wait that is tested
    steps.turns.release(1)
    with pytest.raises(gpuworker.WorkerDraining):
        list(stream)
    stopper.join(60)


def test_draining_finishes_what_has_begun(serve, directory):
    worker, client = serve()
    stream = client.stream([20, 21, 22], max_tokens=100, ignore_eos=True)
    reader = iter(stream)
    found = [next(reader).tokens]
    worker.stop()
    found += [delta.tokens for delta in reader]
    assert joined(found) == tiny_llama.generated(directory, [20, 21, 22], 100)


def test_options_that_are_for_batches_are_refused(directory, name):
    for options in ({"latency_budget_ms": 50}, {"length_buckets": (16, 32)}, {"max_wait_ms": 5}, {"pipeline_depth": 2}):
        with pytest.raises(ValueError, match=next(iter(options))):
            gpuworker.Worker(GenerationHandler(directory), name=name, in_process=True, **options).start()
