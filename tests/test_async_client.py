"""AsyncClient: what it answers, and whom it wakes. Its owner is a thread of the test's."""

import asyncio
import contextlib
import os
import threading
import time

import numpy as np
import pytest
import uvloop

import gpuworker
from tests.conftest import eventually, shm_files

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def run(request):
    """As asyncio.run, in debug mode, which says what was never awaited, on either kind of loop."""

    def run(coroutine):
        loop = request.param()
        loop.set_debug(request.param is asyncio.new_event_loop)
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    return run


def descriptors():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return links


def chimes(name):
    return [file for file in shm_files() if file.startswith(f"gpuworker-{name}.chime")]


def test_submit_answers(run, in_process, gate):
    worker = in_process(gate.run_batch)

    async def main():
        async with gpuworker.AsyncClient(worker.name) as client:
            for request in (b"bytes", "text", 7, None, {"a": [1, (2, 3)]}, b"x" * 200_000):
                assert await client.submit(request) == request
            array = np.arange(12, dtype=">f8").reshape(3, 4)[:, ::2]
            for _ in range(3):
                np.testing.assert_array_equal(await client.submit(array), array)
            assert len(chimes(worker.name)) == 1
        assert not chimes(worker.name)

    run(main())
    assert worker.stats().slots_in_use == 0


def test_thousands_at_once_through_a_small_ring(run, in_process, gate):
    worker = in_process(gate.run_batch, capacity=64, max_batch_size=16)

    async def main():
        async with gpuworker.connect_async(worker.name, on_full="block") as client:
            assert await asyncio.gather(*(client.submit(i) for i in range(5000))) == list(range(5000))

    run(main())
    assert worker.stats().completed == 5000
    assert worker.stats().slots_in_use == 0


def test_map_keeps_the_order_and_runs_ahead(run, in_process, gate):
    worker = in_process(gate.run_batch, capacity=2, max_batch_size=32)

    async def later():
        for i in range(50):
            yield i

    async def main():
        async with gpuworker.AsyncClient(worker.name) as client:
            assert [answer async for answer in client.map(range(100))] == list(range(100))
            assert [answer async for answer in client.map(later())] == list(range(50))
            async for answer in client.map(range(100)):
                if answer == 3:
                    break

    run(main())
    eventually(lambda: worker.stats().slots_in_use == 0)


def test_map_withdraws_the_rest_at_the_first_error(run, in_process):
    worker = in_process(lambda requests: [ValueError("three") if request == 3 else request for request in requests], max_batch_size=1)

    async def main():
        seen = []
        async with gpuworker.AsyncClient(worker.name) as client:
            with pytest.raises(ValueError, match="three"):
                async for answer in client.map(range(50)):
                    seen.append(answer)
        assert seen == [0, 1, 2]

    run(main())
    eventually(lambda: worker.stats().slots_in_use == 0)


def test_errors_are_those_of_the_blocking_client(run, in_process):
    def fails(requests):
        return [KeyError(request) if request == "key" else StopIteration(1) if request == "stop" else request for request in requests]

    worker = in_process(fails)

    async def main():
        async with gpuworker.AsyncClient(worker.name) as client:
            with pytest.raises(KeyError, match="key"):
                await client.submit("key")
            with pytest.raises(gpuworker.RemoteError, match="StopIteration"):  # which no future takes
                await client.submit("stop")
            with pytest.raises(gpuworker.UnsupportedPayload):
                await client.submit(object())
            with pytest.raises(ValueError, match="timeout"):
                await client.submit(1, timeout=-1)
            with pytest.raises(ValueError, match="priorities"):
                await client.submit(1, priority=1)
            assert await client.submit("after") == "after"

    run(main())
    assert worker.stats().slots_in_use == 0


# Cancelling, in every state.


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_cancelled_task_withdraws_a_request_that_is_queued_and_drops_one_that_runs(run, in_process, gate):
    worker = in_process(gate.run_batch, max_batch_size=1)
    gate.shut()

    async def main():
        async with gpuworker.AsyncClient(worker.name) as client:
            running = asyncio.create_task(client.submit("running"))
            await asyncio.to_thread(gate.wait_entered)
            queued = asyncio.create_task(client.submit("queued"))
            await asyncio.sleep(0)
            assert worker.stats().slots_in_use == 2
            await cancelled(queued)
            assert worker.stats().slots_in_use == 1, "at once, as it was not running"
            await cancelled(running)
            gate.open()
            assert await client.submit("after") == "after"

    run(main())
    assert gate.batches == [["running"], ["after"]]
    assert worker.stats().slots_in_use == 0


def test_cancelling_an_answered_request_gives_its_slot_back(run, in_process, gate):
    gate.answer = lambda request: ValueError("nobody reads this")
    worker = in_process(gate.run_batch)
    gate.shut()

    async def main():
        async with gpuworker.AsyncClient(worker.name) as client:
            task = asyncio.create_task(client.submit(1))
            await asyncio.sleep(0)
            gate.open()
            eventually(lambda: worker.stats().failed == 1)  # answered; the loop has not seen it yet
            await cancelled(task)
            assert worker.stats().slots_in_use == 0

    run(main())


def test_a_cancelled_task_that_waits_for_a_slot_leaves_its_place_to_the_next(run, in_process, gate):
    worker = in_process(gate.run_batch, capacity=1, max_batch_size=1)
    gate.shut()

    async def main():
        async with gpuworker.AsyncClient(worker.name, on_full="block") as client:
            tasks = [asyncio.create_task(client.submit(i)) for i in range(4)]
            await asyncio.to_thread(gate.wait_entered)
            await asyncio.sleep(0)
            await cancelled(tasks[1])
            gate.open()
            assert await asyncio.gather(tasks[0], *tasks[2:]) == [0, 2, 3]

    run(main())
    assert gate.batches == [[0], [2], [3]]


# Deadlines and a full ring.


def test_deadlines(run, in_process, gate):
    worker = in_process(gate.run_batch, max_batch_size=1, capacity=2)
    gate.shut()

    async def stage(client, **options):
        start = time.monotonic()
        with pytest.raises(gpuworker.DeadlineExceeded) as raised:
            await client.submit(1, timeout=0.08)
        assert time.monotonic() - start >= 0.08
        return raised.value.stage

    async def main():
        async with gpuworker.AsyncClient(worker.name, on_full="block") as client:
            running = asyncio.create_task(client.submit("running"))
            await asyncio.to_thread(gate.wait_entered)
            assert await stage(client) == "queued"
            queued = asyncio.create_task(client.submit("queued"))
            await asyncio.sleep(0)
            assert await stage(client) == "claiming"
            gate.open()
            assert await asyncio.gather(running, queued) == ["running", "queued"]
            gate.shut()
            assert await stage(client) == "running"
            gate.open()

    run(main())
    eventually(lambda: worker.stats().slots_in_use == 0)
    assert worker.stats().expired == 3


def test_policies_for_a_full_ring(run, in_process, gate):
    worker = in_process(gate.run_batch, capacity=1)
    gate.shut()

    async def elsewhere(request):
        await asyncio.sleep(0)
        return f"{request} elsewhere"

    async def main():
        async with (
            gpuworker.AsyncClient(worker.name) as client,
            gpuworker.AsyncClient(worker.name, fallback=lambda request: f"{request} here") as falls_back,
            gpuworker.AsyncClient(worker.name, fallback=elsewhere) as falls_back_later,
        ):
            running = asyncio.create_task(client.submit("running"))
            await asyncio.to_thread(gate.wait_entered)
            with pytest.raises(gpuworker.QueueFull):
                await client.submit("too many")
            assert await falls_back.submit("answered") == "answered here"
            assert await falls_back_later.submit("answered") == "answered elsewhere"
            assert [answer async for answer in falls_back.map(["a", "b"])] == ["a here", "b here"]
            gate.open()
            assert await running == "running"

    run(main())
    stats = worker.stats()
    assert (stats.rejected, stats.fallbacks) == (1, 4)


def test_a_slot_that_another_process_frees_is_found(run, in_process, gate):
    worker = in_process(gate.run_batch, capacity=1)
    gate.shut()
    other = worker.connect().enqueue("other")
    gate.wait_entered()

    async def main():
        async with gpuworker.AsyncClient(worker.name, on_full="block") as client:
            task = asyncio.create_task(client.submit("mine"))
            await asyncio.sleep(0)
            gate.open()
            assert await asyncio.to_thread(other.result) == "other"
            assert await task == "mine"

    run(main())


# Where it may be used, and what it leaves.


def test_nothing_is_opened_before_the_first_request_nor_left_after_the_loop(run, in_process, gate):
    worker = in_process(gate.run_batch)
    client = gpuworker.AsyncClient(worker.name)
    assert "not connected yet" in repr(client)
    assert worker.stats().clients == ()

    async def main():
        assert await client.submit(1) == 1
        assert "1 loops" in repr(client)

    for _ in range(3):
        run(main())
        assert not chimes(worker.name)
    assert "not connected yet" in repr(client)
    eventually(lambda: worker.stats().clients == ())
    eventually(lambda: not [link for link in descriptors() if "gpuworker" in link and "chime" in link])
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        run(main())


def test_two_loops_in_two_threads(in_process, gate):
    worker = in_process(gate.run_batch)
    client, wrong = gpuworker.AsyncClient(worker.name), []

    async def main(start):
        for at in range(start, start + 1000, 50):
            answers = await asyncio.gather(*(client.submit(i) for i in range(at, at + 50)))
            wrong.extend(set(answers) ^ set(range(at, at + 50)))

    threads = [threading.Thread(target=lambda start=start: asyncio.run(main(start))) for start in (0, 10_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert worker.stats().completed == 2000
    assert not chimes(worker.name)


def test_closing_fails_what_is_on_its_way(run, in_process, gate):
    worker = in_process(gate.run_batch, capacity=2, max_batch_size=1)
    gate.shut()

    async def main():
        client = gpuworker.AsyncClient(worker.name, on_full="block")
        tasks = [asyncio.create_task(client.submit(i)) for i in range(3)]
        await asyncio.to_thread(gate.wait_entered)
        await asyncio.to_thread(client.close)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [gpuworker.RequestCancelled, gpuworker.RequestCancelled, RuntimeError]
        client.close()
        gate.open()

    run(main())
    eventually(lambda: worker.stats().slots_in_use == 0)


def test_a_loop_that_is_closed_with_requests_on_their_way_keeps_nothing(in_process, gate):
    worker = in_process(gate.run_batch)
    gate.shut()
    client = gpuworker.AsyncClient(worker.name)
    loop = asyncio.new_event_loop()

    async def send():
        return client._here().send("lost", 0, 0)  # as a task that is never cancelled would leave it

    async def main():
        assert await client.submit("kept") == "kept"

    with pytest.raises(TimeoutError):
        loop.run_until_complete(asyncio.wait_for(client.submit("joins"), 0.05))
    loop.run_until_complete(send())
    loop.close()
    assert len(chimes(worker.name)) == 1
    gate.open()
    asyncio.run(main())
    assert not chimes(worker.name)
    eventually(lambda: worker.stats().slots_in_use == 0 and worker.stats().clients == ())


def test_without_asyncio_it_says_what_is_missing(in_process):
    client = gpuworker.AsyncClient("nobody")
    with pytest.raises(RuntimeError, match="needs asyncio"):
        client.submit(1).send(None)
    with pytest.raises(ValueError, match="worker name"):
        gpuworker.AsyncClient("no/name")
