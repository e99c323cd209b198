"""Completions and chats as OpenAI's API has them, in front of an in-process worker with a tiny llama."""

import asyncio
import json
import math

import pytest

import gpuworker
from gpuworker.frontends.asgi import make_app
from gpuworker.frontends.http import generation
from gpuworker.generation.handler import GenerationHandler
from tests import tiny_llama, wordy_llama
from tests.conftest import eventually
from tests.test_asgi_connections import happens
from tests.web import Visitor, call, post

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"model": "m", "temperature": 0, "ignore_eos": True}
HELLO = [{"role": "user", "content": "hello"}]
POISONED = "w20 poison w21"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return wordy_llama.save(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def worker(directory, in_process):
    return in_process(GenerationHandler(directory, dtype="float32"), max_batch_size=8, max_batch_tokens=64)


@pytest.fixture
def app(worker):
    return make_app({"m": worker.name})


def said(directory, ids, count):
    return tiny_llama.generated(directory, ids, count)


def idle(worker):
    found = worker.stats().generation
    return found is not None and found.running == found.waiting == found.blocks_used == 0 and worker.stats().slots_in_use == 0


def events(app, path, request):
    """-> (status, the chunks; "[DONE]" as it is)."""
    response = call(app, "POST", path, json.dumps({**request, "stream": True}).encode())
    if response.status_code != 200:
        return response.status_code, response.json()
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(part.startswith("data: ") for part in parts)
    return 200, [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


def test_a_completion_of_text_and_of_token_ids(app, directory):
    ids = wordy_llama.ids("hello w20 w21")
    expected = said(directory, ids, 16)
    for prompt in ("hello w20 w21", ids):
        status, body = post(app, COMPLETIONS, {**GREEDY, "prompt": prompt})
        assert status == 200
        assert body["object"] == "text_completion"
        assert body["model"] == "m"
        assert body["choices"] == [{"index": 0, "text": wordy_llama.text_of(expected), "logprobs": None, "finish_reason": "length"}]
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}


def test_several_prompts_and_several_choices(app, directory):
    prompts = ["hello w30", "w40 w41 w42"]
    _, body = post(app, COMPLETIONS, {**GREEDY, "prompt": prompts, "n": 2, "max_tokens": 5})
    texts = [wordy_llama.text_of(said(directory, wordy_llama.ids(prompt), 5)) for prompt in prompts for _ in range(2)]
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate(texts))
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}
    _, body = post(app, COMPLETIONS, {**GREEDY, "prompt": [wordy_llama.ids(prompt) for prompt in prompts], "max_tokens": 5})
    assert [choice["text"] for choice in body["choices"]] == texts[::2]


def test_a_chat_goes_through_the_template(app, directory):
    messages = [
        {"role": "developer", "content": "w50"},
        {"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "w51"}]},
    ]
    ids = wordy_llama.ids("system : w50 user : hello w51 assistant :")
    status, body = post(app, CHAT, {**GREEDY, "messages": messages, "max_completion_tokens": 6})
    assert status == 200
    text = wordy_llama.text_of(said(directory, ids, 6))
    message = {"role": "assistant", "content": text, "refusal": None}
    assert body["object"] == "chat.completion"
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]


def test_long_prompts_are_the_same_as_short_ones(app, monkeypatch):
    for path, asked in ((COMPLETIONS, {"prompt": ["hello w20", "w30 w31"]}), (CHAT, {"messages": HELLO})):
        choices = post(app, path, {**GREEDY, **asked, "max_tokens": 5})[1]["choices"]
        with monkeypatch.context() as patch:
            patch.setattr(generation, "LONG_TEXT", 3)
            assert post(app, path, {**GREEDY, **asked, "max_tokens": 5})[1]["choices"] == choices
    status, body = post(app, COMPLETIONS, {**GREEDY, "prompt": "hello " * 20_000})
    assert (status, "20,016" in body["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("n", "prompts", "is_long"),
    [
        (1, ["hello"] * 7, True), (7, ["hello"], True), (1, [[{"role": "user", "content": ""}] * 2], True), (1, ["hello"] * 6, False), (9, [[5, 6]] * 9, False),
    ],
)  # fmt: skip
def test_what_is_long_together_is_made_into_tokens_in_a_thread(monkeypatch, n, prompts, is_long):
    made = []
    monkeypatch.setattr(gpuworker.Declaration, "ids_of", lambda self, prompt: made.append(prompt) or [1])
    monkeypatch.setattr(generation, "LONG_TEXT", 30)
    found = asyncio.run(generation._short(prompts, gpuworker.Declaration(None), n))
    assert (made, found) == ((prompts, [[1]] * len(prompts)) if is_long else ([], prompts))


def test_without_max_tokens_a_chat_has_all_the_room_there_is(directory, in_process):
    app = make_app({"m": in_process(GenerationHandler(directory, dtype="float32", max_model_tokens=64)).name})
    _, body = post(app, CHAT, {**GREEDY, "messages": HELLO})
    assert body["usage"]["total_tokens"] == 64
    assert body["choices"][0]["finish_reason"] == "length"


def test_and_no_more_than_the_slot_has(directory, in_process):
    for response_bytes in (1024, 1088):
        worker = in_process(GenerationHandler(directory, dtype="float32"), max_response_bytes=response_bytes)
        app = make_app({"m": worker.name})
        for more in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}):
            status, body = post(app, CHAT, {**GREEDY, "messages": HELLO, **more})
            assert status == 200, body
            most = body["usage"]["completion_tokens"]
            assert most < 500
            step = 64 // 4  # a slot's room is in steps of a cache line
            assert post(app, CHAT, {**GREEDY, "messages": HELLO, "max_tokens": most + step, **more})[0] == 400


def test_stop_strings_and_ids(app, directory):
    ids = wordy_llama.ids("hello w20 w21")
    expected = said(directory, ids, 16)
    stop = wordy_llama.WORDS[expected[9]]
    first = [wordy_llama.WORDS[token] for token in expected].index(stop)
    for more in ({"stop": [stop, "never"]}, {"stop": stop}, {"stop_token_ids": [expected[9]]}):
        _, body = post(app, COMPLETIONS, {**GREEDY, "prompt": ids, **more})
        choice = body["choices"][0]
        assert (choice["text"].strip(), choice["finish_reason"]) == (wordy_llama.text_of(expected[:first]), "stop")


def test_a_seed_gives_the_same_again_streamed_or_not(app):
    request = {"model": "m", "prompt": "hello w20", "seed": 3, "max_tokens": 8, "n": 3, "logit_bias": {str(tiny_llama.POISON): -100}, "top_p": 0.9}
    _, body = post(app, COMPLETIONS, request)
    texts = [choice["text"] for choice in body["choices"]]
    assert len(set(texts)) == 3
    assert [choice["text"] for choice in post(app, COMPLETIONS, request)[1]["choices"]] == texts
    assert [choice["text"] for choice in post(app, COMPLETIONS, {**request, "seed": 4})[1]["choices"]][:2] == texts[1:]
    _, chunks = events(app, COMPLETIONS, request)
    streamed = ["", "", ""]
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_logprobs_of_completions(app):
    _, body = post(app, COMPLETIONS, {**GREEDY, "prompt": "hello w20", "max_tokens": 4, "logprobs": 2})
    found = body["choices"][0]["logprobs"]
    assert " ".join(found["tokens"]) == body["choices"][0]["text"]
    assert all(value <= 0 for value in found["token_logprobs"])
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(top) == 2
        assert math.isclose(top[token], value, abs_tol=1e-4)
    assert found["text_offset"] == [sum(map(len, found["tokens"][:k])) for k in range(4)]
    _, body = post(app, COMPLETIONS, {**GREEDY, "prompt": "hello w20", "max_tokens": 4, "logprobs": 0})
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{}] * 4


def test_logprobs_of_chats_streamed_or_not(app):
    request = {**GREEDY, "messages": HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    _, body = post(app, CHAT, request)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == body["choices"][0]["message"]["content"].split()
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert len(entry["top_logprobs"]) == 2
    _, chunks = events(app, CHAT, request)
    pieces = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks[:-1] if chunk["choices"][0]["logprobs"]]
    assert [entry["token"] for piece in pieces for entry in piece] == [entry["token"] for entry in content]
    _, body = post(app, CHAT, {**GREEDY, "messages": HELLO, "max_tokens": 4, "logprobs": True})
    assert [entry["top_logprobs"] for entry in body["choices"][0]["logprobs"]["content"]] == [[]] * 4


def test_a_chat_comes_in_chunks(app, directory):
    ids = wordy_llama.ids("user : hello assistant :")
    status, chunks = events(app, CHAT, {**GREEDY, "messages": HELLO, "max_tokens": 40})
    assert (status, chunks.pop()) == (200, "[DONE]")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in middle) == wordy_llama.text_of(said(directory, ids, 40))
    assert {choice["finish_reason"] for choice in (first, *middle)} == {None}
    assert (last["delta"], last["finish_reason"]) == ({}, "length")


def test_usage_comes_last_where_it_is_asked_for(app):
    request = {**GREEDY, "messages": HELLO, "max_tokens": 5, "n": 2, "stream_options": {"include_usage": True}}
    _, chunks = events(app, CHAT, request)
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"] == {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    assert sorted(chunk["choices"][0]["index"] for chunk in chunks[:-2] if chunk["choices"][0]["finish_reason"]) == [0, 1]


def test_nothing_is_an_answer_too(app):
    _, chunks = events(app, COMPLETIONS, {**GREEDY, "prompt": "hello", "max_tokens": 0})
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == ["length"]
    assert post(app, COMPLETIONS, {**GREEDY, "prompt": "hello", "max_tokens": 0})[1]["choices"][0]["text"] == ""


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "not supported"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "not supported"),
        (CHAT, {"messages": []}, "messages", "at least one"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "text"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "like"),
        (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages", "not supported"),
        (CHAT, {"messages": "hello"}, "messages", "array"),
        (CHAT, {"messages": ["hello"]}, "messages", "object"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        (CHAT, {"logprobs": 3}, "logprobs", "bool"),
        (CHAT, {"max_tokens": 100_000}, None, "100,000"),
        (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens", ">= 0"),
        (CHAT, {"nonsense": 1}, "nonsense", "there is no field"),
        (COMPLETIONS, {"prompt": []}, "prompt", "not empty"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "not empty"),
        (COMPLETIONS, {"prompt": [300]}, "prompt", "255"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "255"),
        (COMPLETIONS, {"prompt": [10**30]}, "prompt", ""),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "object"),
        (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "prompt", "128"),
        (COMPLETIONS, {"n": 0}, "n", ">= 1"),
        (COMPLETIONS, {"n": 1000}, "n", "128"),
        (COMPLETIONS, {"echo": True}, "echo", "not supported"),
        (COMPLETIONS, {"best_of": 3}, "best_of", "not supported"),
        (COMPLETIONS, {"suffix": "x"}, "suffix", "not supported"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "20"),
        (COMPLETIONS, {"temperature": -1}, "temperature", "number"),
        (COMPLETIONS, {"temperature": "hot"}, "temperature", "float"),
        (COMPLETIONS, {"top_p": 0}, "top_p", "share"),
        (COMPLETIONS, {"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
        (COMPLETIONS, {"seed": 2**70}, "seed", ""),
        (COMPLETIONS, {"stop": [""]}, "stop", "at least one character"),
        (COMPLETIONS, {"stop": 3}, "stop", ""),
        (COMPLETIONS, {"stop": ["w1"] * 33}, "stop", "at most 32"),
        (CHAT, {"stop": "w" * 513}, "stop", "512 letters"),
        (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        (COMPLETIONS, {"logit_bias": {"5": 101}}, None, "-100"),
        (COMPLETIONS, {"logit_bias": {"900": 1}}, "logit_bias", "255"),
        (COMPLETIONS, {"stop_token_ids": [999]}, None, "255"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        (COMPLETIONS, {"model": "other"}, "model", "no model"),
        (COMPLETIONS, {"model": 1}, "model", "str"),
    ],
)
def test_what_cannot_be_is_refused_by_name(app, worker, path, fields, param, words):
    base = {**GREEDY, **({"messages": HELLO} if path == CHAT else {"prompt": "hello"})}
    for stream in ({}, {"stream": True}) if "stream_options" not in fields else ({},):
        status, body = post(app, path, {**base, **fields, **stream})
        assert status == (404 if fields.get("model") == "other" else 400)
        error = body["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert words in error["message"]
    assert worker.stats().submitted == 0


def test_what_asks_for_nothing_is_fine(app):
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "seed": None,
        "stop": None,
    }
    assert post(app, CHAT, {**GREEDY, "messages": HELLO, "max_tokens": 2, **nothing})[0] == 200
    assert post(app, COMPLETIONS, {**GREEDY, "prompt": "hello", "max_tokens": 2, "echo": False, "best_of": 1, "suffix": None, "n": None})[0] == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"\xff", b'{"model": NaN}', b"[" * 10**5])
def test_a_body_that_is_no_request(app, body):
    response = call(app, "POST", CHAT, body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_models_for_other_things(in_process, app):
    other = make_app({"m": in_process(lambda requests: requests).name})
    assert post(other, CHAT, {**GREEDY, "messages": HELLO})[1]["error"]["param"] == "model"
    assert post(app, "/v1/embeddings", {"model": "m", "input": "hello"})[1]["error"]["param"] == "model"
    status, body = post(app, "/v2/models/m/infer", {"inputs": [{"name": "input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}]})
    assert (status, "/v1/completions" in body["error"]) == (400, True)


def test_an_error_before_the_first_token_has_its_status(app):
    for path, asked in ((COMPLETIONS, {"prompt": POISONED}), (CHAT, {"messages": [{"role": "user", "content": "poison"}]})):
        for n in (1, 2):
            status, body = events(app, path, {**GREEDY, **asked, "n": n})
            assert status == 500
            assert body["error"]["type"] == "server_error"
            assert post(app, path, {**GREEDY, **asked, "n": n})[0] == 500


def test_an_error_in_mid_stream_is_an_event(app, monkeypatch):
    from gpuworker.generation.model import PagedModel

    forward, steps = PagedModel.forward, []

    def fails(self, chunks):
        steps.append(1)
        if len(steps) > 5:
            raise RuntimeError("the device is on fire")
        return forward(self, chunks)

    monkeypatch.setattr(PagedModel, "forward", fails)
    for n in (1, 2):
        steps.clear()
        status, chunks = events(app, CHAT, {**GREEDY, "messages": HELLO, "max_tokens": 50, "n": n})
        assert status == 200
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["error"]["type"] == "server_error"
        assert "fire" not in str(chunks)


def test_time_limits(app):
    request = {**GREEDY, "messages": HELLO, "max_tokens": 490}
    assert post(app, CHAT, request, X_Timeout_Ms="1")[0] == 504
    response = call(app, "POST", CHAT, json.dumps({**request, "stream": True}).encode(), X_Timeout_Ms="150")
    if response.status_code == 200:  # it had begun
        assert '"error"' in response.text.split("\n\n")[-2]
        assert "[DONE]" not in response.text
    else:
        assert response.status_code == 504


def test_a_full_ring_is_429(directory, in_process):
    worker = in_process(GenerationHandler(directory, dtype="float32"), capacity=1)
    with worker.connect() as client, client.stream([20, 21], max_tokens=300, ignore_eos=True) as stream:
        next(iter(stream))
        for more in ({}, {"stream": True}):
            response = call(make_app({"m": worker.name}), "POST", CHAT, json.dumps({**GREEDY, "messages": HELLO, **more}).encode())
            assert response.status_code == 429
            assert response.json()["error"]["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1


def test_a_worker_that_is_not_there_is_503(name):
    response = call(make_app({"m": name}), "POST", CHAT, json.dumps({**GREEDY, "messages": HELLO}).encode())
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "WorkerNotFound"


@pytest.mark.parametrize("more", [{"stream": True}, {"stream": True, "n": 3}, {}, {"n": 3}])
def test_a_caller_that_leaves_ends_its_answer(app, worker, more):
    request = {**GREEDY, "messages": HELLO, "max_tokens": 500, **more}

    async def run():
        visitor = Visitor(app, CHAT, json.dumps(request).encode()).start()
        if "stream" in more:
            await happens(lambda: len(visitor.sent) > 4)
        else:
            await happens(lambda: worker.stats().slots_in_use >= more.get("n", 1))
        visitor.leave()
        await visitor.task
        return visitor

    visitor = asyncio.run(run())
    eventually(lambda: idle(worker))
    assert worker.stats().generation.tokens < 500 * more.get("n", 1)
    assert b"[DONE]" not in visitor.body


def test_a_slow_reader_holds_nobody_up_and_loses_nothing(app, worker, directory):
    ids = wordy_llama.ids("user : hello assistant :")
    request = {**GREEDY, "messages": HELLO, "max_tokens": 100}

    async def run():
        slow = Visitor(app, CHAT, json.dumps({**request, "stream": True}).encode())
        slow.reads.clear()
        slow.start()
        other = Visitor(app, CHAT, json.dumps(request).encode()).start()
        await other.task
        await happens(lambda: worker.stats().generation.running == 0)
        slow.reads.set()
        await slow.task
        return slow.body.decode()

    chunks = [json.loads(part[6:]) for part in asyncio.run(run()).split("\n\n")[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == wordy_llama.text_of(said(directory, ids, 100))


def test_a_reader_that_has_stopped_keeps_no_slot(directory, in_process, monkeypatch, caplog):
    worker = in_process(GenerationHandler(directory, dtype="float32"))
    app = make_app({"m": worker.name}, generation_timeout=0.3)
    monkeypatch.setattr(generation, "SLOW_READER_S", 0.1)

    async def run():
        for n in (1, 3):
            stuck = Visitor(app, CHAT, json.dumps({**GREEDY, "messages": HELLO, "max_tokens": 100, "n": n, "stream": True}).encode())
            stuck.reads.clear()
            stuck.start()
            await happens(lambda: worker.stats().slots_in_use > 0)
            await stuck.task
            assert not stuck.sent
            await happens(lambda: worker.stats().slots_in_use == 0)

    asyncio.run(run())
    assert caplog.text.count("the caller has not read its answer") == 2


def test_a_model_without_a_tokenizer_has_tokens_only(tmp_path, in_process):
    directory = tiny_llama.save(tmp_path)
    app = make_app({"m": in_process(GenerationHandler(directory, dtype="float32")).name})
    _, body = post(app, COMPLETIONS, {**GREEDY, "prompt": [20, 21], "max_tokens": 3, "logprobs": 0})
    assert body["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in said(directory, [20, 21], 3)]


def test_max_tokens_is_optional_in_the_library_too(worker):
    client = gpuworker.connect(worker.name)
    assert client.generate([20] * 500, max_tokens=None, ignore_eos=True).usage == (500, 12)
    with pytest.raises(gpuworker.InvalidRequest, match="512 together"):
        client.generate([20] * 512, max_tokens=None)
