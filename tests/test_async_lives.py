"""AsyncClient and other processes: owners that die, stop and are replaced; forks; frontends that are killed; wake-ups that must not be lost."""

import asyncio
import os
import signal

import anyio
import numpy as np
import pytest

import gpuworker
from gpuworker.segment import Segment, chime
from tests.conftest import SMALL, eventually, kill_all, kill_owner, running, shm_files
from tests.tensor_handlers import Doubled
from tests.test_fork import in_child, succeeded


def chimes(name):
    return [file for file in shm_files() if file.startswith(f"gpuworker-{name}.chime")]


async def sent(client, *requests):
    """Tasks whose requests are on their way."""
    tasks = [asyncio.create_task(client.submit(request)) for request in requests]
    await asyncio.sleep(0)
    return tasks


async def happens(condition):
    await asyncio.to_thread(eventually, condition)


def test_what_runs_and_what_is_queued_is_served_by_the_next_owner(start, held):
    worker = start(max_batch_size=1)

    async def main():
        async with gpuworker.AsyncClient(worker.name) as client:
            first, *queued = await sent(client, ["hold", str(held)], *[["pid"]] * 5)
            await happens(lambda: running(worker))
            await asyncio.to_thread(kill_owner, worker)
            await happens(lambda: running(worker))
            held.unlink()
            assert await first == "held"
            assert set(await asyncio.gather(*queued)) == {worker.pid}

    asyncio.run(main(), debug=True)
    assert worker.stats().slots_in_use == 0


def test_when_nobody_is_left_all_are_told_also_those_that_wait_for_a_slot(start, held):
    worker = start(max_batch_size=1)

    async def main():
        async with gpuworker.AsyncClient(worker.name, on_full="block", connect_timeout_s=0.1) as client:
            tasks = await sent(client, *[["hold", str(held)]] * 20)  # more than there are slots
            await happens(lambda: running(worker))
            await asyncio.to_thread(kill_all, worker)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {gpuworker.WorkerDied}
            with pytest.raises(gpuworker.WorkerNotFound, match=r"connect_timeout_s=0.1"):
                await client.submit(["echo", 1])

    asyncio.run(main(), debug=True)


def test_a_worker_that_drains_answers_what_it_has_and_the_next_one_of_its_name_is_found(start, held, name):
    worker = start(max_batch_size=1)

    async def main():
        async with gpuworker.AsyncClient(name) as client:
            first, second = await sent(client, ["hold", str(held)], ["echo", 2])
            await happens(lambda: running(worker))
            stopping = asyncio.create_task(asyncio.to_thread(worker.stop))
            await happens(lambda: worker.stats().state == "draining")
            with pytest.raises(gpuworker.WorkerDraining):
                await client.submit(["echo", 3])
            held.unlink()
            assert await asyncio.gather(first, second) == ["held", 2]
            await stopping
            late = await sent(client, *[["echo", i] for i in range(5)])
            with gpuworker.Worker("tests.handlers:obeys", name=name, **SMALL) as other:
                assert await asyncio.gather(*late) == [0, 1, 2, 3, 4]
                assert len(chimes(name)) == 1, "the first one's went with it"
                assert other.stats().completed == 5

    asyncio.run(main(), debug=True)


def test_a_reload_fails_no_request(start):
    worker = start()

    async def main():
        async with gpuworker.AsyncClient(worker.name, on_full="block") as client:
            pids = set()

            async def call():
                while len(pids) < 2:
                    pids.add(await client.submit(["pid"]))

            callers = [asyncio.create_task(call()) for _ in range(20)]
            await happens(lambda: worker.stats().completed > 100)
            os.kill(worker.supervisor_pid, signal.SIGUSR1)
            await asyncio.gather(*callers)

    asyncio.run(main())
    assert worker.stats().reloads == 1


def test_a_task_per_request_while_no_worker_is_there_yet(in_process, gate, name):
    async def main():
        async with gpuworker.AsyncClient(f"{name}-0", on_full="block") as client:
            with pytest.raises(gpuworker.DeadlineExceeded) as raised:
                await client.submit(1, timeout=0.05)
            assert raised.value.stage == "connecting"
            tasks = await sent(client, *range(1000))
            tasks[0].cancel()  # the one that connects
            worker = await asyncio.to_thread(in_process, gate.run_batch)
            assert await asyncio.gather(*tasks[1:]) == list(range(1, 1000))
            assert len(worker.stats().clients) == 1

    asyncio.run(main(), debug=True)


# Forks and kills.


def test_parent_and_forked_children_use_one_client_at_once(in_process, gate):
    worker = in_process(gate.run_batch)
    client = gpuworker.AsyncClient(worker.name, on_full="block")

    async def calls(start):
        return await asyncio.gather(*(client.submit(i) for i in range(start, start + 200))) == list(range(start, start + 200))

    def child(start):
        signal.alarm(60)
        return asyncio.run(calls(start)) and len(client._loops) == 0

    async def main():
        assert await calls(0)
        children = [in_child(lambda start=start: child(start)) for start in (1000, 2000)]
        assert await calls(0)
        assert await asyncio.to_thread(succeeded, children)
        assert await calls(0)
        assert len(chimes(worker.name)) == 1

    async def fork_with_requests_on_their_way():
        gate.shut()
        tasks = await sent(client, *range(10))
        pid = os.fork()
        if not pid:
            os._exit(0 if client._last is None and not client._loops else 1)  # its loop is of no use to it, and it must not touch its parent's
        gate.open()
        assert await asyncio.gather(*tasks) == list(range(10))
        assert succeeded([pid])

    asyncio.run(main())
    asyncio.run(fork_with_requests_on_their_way())
    assert not chimes(worker.name)


def test_the_fifo_of_a_frontend_that_was_killed_goes_with_its_place(in_process, gate):
    worker = in_process(gate.run_batch)

    async def call():
        client = gpuworker.AsyncClient(worker.name)
        await client.submit(1)
        os.kill(os.getpid(), signal.SIGKILL)

    pid = in_child(lambda: asyncio.run(call()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    eventually(lambda: not chimes(worker.name))
    eventually(lambda: worker.stats().clients == ())


def test_fifos_that_nobody_has_are_swept(in_process, gate):
    worker = in_process(gate.run_batch)
    segment = Segment.attach(worker.name)
    strangers = [
        f"/dev/shm/gpuworker-{worker.name}.chime-{nonce:x}-{place}-{n}"
        for nonce, place, n in ((segment.nonce, 3, 9), (1, 1, 1), (segment.nonce, 4000, 1))
    ]

    async def main():
        async with gpuworker.AsyncClient(worker.name) as client:
            await client.submit(1)
            (mine,) = chimes(worker.name)
            for path in strangers:
                os.mkfifo(path)
            assert chime.sweep(segment) == 2
            assert chime.sweep(segment, strangers=True) == 1
            assert chimes(worker.name) == [mine]
            assert await client.submit(2) == 2

    asyncio.run(main())


def test_without_its_fifo_an_answer_is_only_later(start, held):
    """Also when it is replaced by something that is not a FIFO of ours."""
    worker = start(max_batch_size=1)

    async def main():
        async with gpuworker.AsyncClient(worker.name) as client:
            tasks = await sent(client, ["hold", str(held)])
            (fifo,) = chimes(worker.name)
            os.unlink(f"/dev/shm/{fifo}")
            os.symlink("/dev/zero", f"/dev/shm/{fifo}")
            await happens(lambda: running(worker))
            held.unlink()
            assert await tasks[0] == "held"
            assert [await client.submit(["echo", i]) for i in range(5)] == list(range(5))

    asyncio.run(main(), debug=True)


# Lost wake-ups.


@pytest.mark.parametrize("wake", ["park", "adaptive", "busy"])
def test_no_wake_up_is_lost(in_process, gate, wake, monkeypatch):
    """Many rounds of few requests, with all that would make a lost one good switched off: each would be waited for for ever."""
    from gpuworker.client.async_watch import Watch

    monkeypatch.setattr(Watch, "start_ticking", lambda self: None)
    worker = in_process(gate.run_batch, wake=wake)

    async def caller(client, start):
        for i in range(start, start + 1500):
            assert await client.submit(i) == i
            if i % 7 == start:
                await asyncio.sleep(0)

    async def main():
        async with gpuworker.AsyncClient(worker.name) as client:
            await asyncio.wait_for(asyncio.gather(*(caller(client, start) for start in range(3))), 60)

    asyncio.run(main())


# Others.


def test_arrays_that_a_worker_has_declared(in_process):
    worker = in_process(Doubled)

    async def main():
        async with gpuworker.AsyncClient(worker.name) as client:
            answers = await asyncio.gather(*(client.submit(np.full(4, i, np.float32)) for i in range(50)))
            assert [answer.tolist() for answer in answers] == [[2 * i] * 4 for i in range(50)]
            assert [answer.sum() async for answer in client.map(np.ones(4, np.float32) for _ in range(20))] == [8] * 20
            with pytest.raises(gpuworker.InvalidRequest, match="float32"):
                await client.submit(np.zeros(4, np.complex64))

    asyncio.run(main(), debug=True)


def test_under_anyio(in_process, gate):
    worker = in_process(gate.run_batch)

    async def main():
        async with gpuworker.AsyncClient(worker.name) as client:
            answers = []

            async def call(i):
                answers.append(await client.submit(i))

            async with anyio.create_task_group() as group:
                for i in range(50):
                    group.start_soon(call, i)
            assert sorted(answers) == list(range(50))
            gate.shut()
            with anyio.move_on_after(0.05) as scope:
                await client.submit("too slow")
            assert scope.cancelled_caught
            gate.open()

    anyio.run(main)
    eventually(lambda: worker.stats().slots_in_use == 0)
