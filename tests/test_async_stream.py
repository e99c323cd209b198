"""AsyncClient.generate and stream, against an owner whose every step the test makes."""

import asyncio
import inspect

import pytest

import gpuworker
from gpuworker.client.async_generate import Options
from tests.byte_tokenizer import END
from tests.conftest import shm_files
from tests.fake_generation import EMOJI, directory_fixture, echo, fake_owner, ids_of, owner_fixture, served  # noqa: F401


@pytest.fixture
def run(owner):
    """Runs a test that takes a client."""

    def run(main, **options):
        async def with_client():
            async with gpuworker.AsyncClient(owner.segment.name, **options) as client:
                await main(client)

        asyncio.run(with_client(), debug=True)
        assert owner.in_use == 0
        assert not [file for file in shm_files() if f"{owner.segment.name}." in file]

    return run


def test_an_answer_comes_piece_by_piece_and_whole(owner, run):
    ids = ids_of(EMOJI)

    async def main(client):
        stream = client.stream("ab", max_tokens=100)
        assert owner.in_use == 0, "sent when it is read"
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        answer = owner.admit_one()
        assert answer.request.ids == ids_of("ab")
        deltas = []
        for token in ids:
            answer.send(token)
            deltas.append(await reading)
            reading = asyncio.create_task(anext(stream))
        assert stream.generation is None
        answer.send(END)
        answer.end("stop")
        deltas.append(await reading)
        deltas += [delta async for delta in stream]
        assert "".join(delta.text for delta in deltas) == EMOJI == (await stream.result()).text
        assert [token for delta in deltas for token in delta.tokens] == [*ids, END]
        assert stream.generation == gpuworker.Generation(EMOJI, [*ids, END], "stop", None, gpuworker.Usage(len(ids_of("ab")), len(ids) + 1))
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(main)


def test_many_streams_and_whole_answers_at_once(owner, run):
    async def read(stream):
        return "".join([delta.text async for delta in stream])

    async def main(client):
        texts = [f"a{EMOJI}{i}" for i in range(30)]
        with served(owner, echo):
            assert await asyncio.gather(*(read(client.stream(text)) for text in texts)) == [text[1:] for text in texts]
            whole = await asyncio.gather(*(client.generate(text) for text in texts))
            assert [one.text for one in whole] == [text[1:] for text in texts]
            assert [one.tokens for one in await client.generate("ab", n=12)] == [[*ids_of("b"), END]] * 12, "more than there are slots"
            stopped = await client.generate("abcdef", stop=["de"])
            assert (stopped.text, stopped.finish_reason) == ("bc", "stop")

    run(main, on_full="block")


def test_a_stop_string_ends_the_request_at_the_owner(owner, run):
    async def main(client):
        async with client.stream("a", stop="xy") as stream:
            answer = owner.admit_one()
            assert answer.send(*ids_of("bxy"))
            assert [delta.text async for delta in stream] == ["b"]
            assert stream.generation.finish_reason == "stop"
            assert not answer.send(*ids_of("z")), "nobody waits for more"
            answer.end("stop")

    run(main)


@pytest.mark.parametrize("leave", ["break", "aclose", "cancel the task", "cancel", "block", "drop"])
def test_leaving_a_stream_stops_the_generation(owner, run, leave):
    async def main(client):
        stream = client.stream("a")
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        answer = owner.admit_one()
        assert answer.send(*ids_of("b"))
        await reading
        if leave == "break":
            answer.send(*ids_of("c"))
            async for _ in stream:
                break
            del stream
        elif leave == "drop":
            del stream
        elif leave == "block":
            async with stream:
                pass
        elif leave == "aclose":
            await stream.aclose()
            with pytest.raises(gpuworker.RequestCancelled):
                await anext(stream)
        else:
            reading = asyncio.create_task(stream.result())
            await asyncio.sleep(0)
            if leave == "cancel":
                assert stream.cancel()
                with pytest.raises(gpuworker.RequestCancelled):
                    await reading
                assert not stream.cancel()
            else:
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
        del reading
        assert not answer.send(*ids_of("d"))
        answer.end("stop")

    run(main)


def test_a_stream_that_was_never_sent_can_be_left(owner, run):
    async def main(client):
        stream = client.stream("a")
        assert stream.cancel()
        with pytest.raises(gpuworker.RequestCancelled, match="before its request was sent"):
            await stream.result()
        assert owner.in_use == 0

    run(main)


@pytest.mark.parametrize("leave", ["close", "cancel"])
def test_a_stream_that_is_left_while_its_request_is_being_sent(owner, run, leave, monkeypatch):
    async def main(client):
        begun, go_on = asyncio.Event(), asyncio.Event()
        drive = client._here().drive

        async def slowly(steps):
            stream = await drive(steps)
            begun.set()
            await go_on.wait()
            return stream

        monkeypatch.setattr(client._here(), "drive", slowly)
        stream = client.stream("ab", max_tokens=100)
        reading = asyncio.create_task(anext(stream))
        await begun.wait()
        getattr(stream, leave)()
        go_on.set()
        with pytest.raises(gpuworker.RequestCancelled, match="while its request was being sent"):
            await reading
        assert owner.in_use == 0

    run(main)


def test_a_deadline_also_while_tokens_go_on_coming(owner, run):
    async def main(client):
        stream = client.stream("a", timeout=0.1, max_tokens=400)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        answer = owner.admit_one()
        with pytest.raises(gpuworker.DeadlineExceeded, match="timeout"):
            while True:
                answer.send(*ids_of("b"))
                await reading
                reading = asyncio.create_task(anext(stream))
                await asyncio.sleep(0.001)
        answer.end("stop")

    run(main)


def test_one_task_reads_at_a_time(owner, run):
    async def main(client):
        stream = client.stream("a")
        first, second = (asyncio.create_task(anext(stream)) for _ in range(2))
        await asyncio.sleep(0)
        answer = owner.admit_one()
        with pytest.raises(RuntimeError, match="another task"):
            await second
        answer.send(*ids_of("b"))
        assert (await first).text == "b"
        stream.close()
        answer.send(*ids_of("b"))
        answer.end("stop")

    run(main)


def test_closing_the_client_ends_its_streams(owner):
    async def main():
        client = gpuworker.AsyncClient(owner.segment.name)
        streams = [client.stream("a"), client.stream("b")]
        reading = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        answers = owner.admit()
        answers[0].send(*ids_of("b"))
        await reading[0]
        client.close()
        with pytest.raises(gpuworker.RequestCancelled):
            await reading[1]
        for stream in streams:
            with pytest.raises(gpuworker.RequestCancelled):
                await anext(stream)
        for answer in answers:
            answer.end("stop")

    asyncio.run(main(), debug=True)
    assert owner.in_use == 0


def test_what_a_worker_cannot_do_is_said(owner, run):
    async def main(client):
        with pytest.raises(gpuworker.InvalidRequest, match="max_tokens"):
            await client.generate("a", max_tokens=-1)
        with pytest.raises(gpuworker.InvalidRequest, match="n=0"):
            await client.generate("a", n=0)
        with pytest.raises(TypeError, match=r"AsyncClient.generate\(\) got an unexpected keyword argument 'tokens'"):
            await client.generate("a", tokens=3)
        with pytest.raises(gpuworker.InvalidRequest, match="empty"):
            async with client.stream([]):
                pass
        with pytest.raises(gpuworker.InvalidRequest, match="this worker generates"):
            await client.submit("a")

    run(main)


def test_the_keywords_are_those_of_the_blocking_client():
    blocking = inspect.signature(gpuworker.Client.stream).parameters
    assert set(Options.__annotations__) == {name for name, one in blocking.items() if one.kind is one.KEYWORD_ONLY} - {"timeout"}


def test_a_stream_goes_on_under_the_next_owner(owner, run):
    async def main(client):
        stream = client.stream("a")
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        owner.admit_one().send(*ids_of("b"))
        assert (await reading).text == "b"
        assert owner.succeed() == 1
        answer = owner.admit_one()
        answer.send(*ids_of("c"))
        answer.end("length")
        assert (await stream.result()).text == "bc"

    run(main)


def test_when_nobody_is_left_the_reader_is_told(owner, monkeypatch):
    from gpuworker.segment import Segment

    async def main():
        async with gpuworker.AsyncClient(owner.segment.name) as client:
            stream = client.stream("a")
            reading = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            answer = owner.admit_one()
            answer.send(*ids_of("b"))
            assert (await reading).text == "b"
            monkeypatch.setattr(Segment, "is_dead", lambda self: True)
            with pytest.raises(gpuworker.WorkerDied, match="died before"):
                await anext(stream)
            answer.finish()

    asyncio.run(main(), debug=True)
    assert owner.in_use == 0
