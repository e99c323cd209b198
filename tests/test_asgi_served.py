"""A server of its own, called by the clients that people have, and by the lines of docs/http.md."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import numpy as np
import openai
import pytest

import gpuworker
from gpuworker.execution.encoder import HFEncoder
from gpuworker.generation.handler import GenerationHandler
from tests import tiny_encoder, tiny_llama, wordy_llama
from tests.conftest import eventually, shm_files
from tests.tensor_handlers import Doubled, Summed

triton = pytest.importorskip("tritonclient.http")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
DOCS = pathlib.Path(__file__).parent.parent / "docs" / "http.md"
KEY = "KEY"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return wordy_llama.save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return tiny_encoder.save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def workers(llama, encoder):
    """By the name of their model."""
    handlers = {
        "minilm": HFEncoder(str(encoder)),
        "smollm2": GenerationHandler(llama, dtype="float32"),
        "doubler": Doubled(),
        "summed": Summed(),
        "plain": lambda requests: requests,
    }
    run = f"t-served{os.getpid()}-{os.urandom(3).hex()}"  # not as the tests' own: the servers' bells are there from test to test
    started = {}
    try:
        for name, handler in handlers.items():
            started[name] = gpuworker.Worker(handler, name=f"{run}-{name}", in_process=True, max_batch_size=8)
            started[name].start()
        yield started
    finally:
        for worker in started.values():
            worker.stop()
        eventually(lambda: not any(run in file for file in shm_files()))


@pytest.fixture(scope="module")
def serve(workers, tmp_path_factory):
    """Starts `gpuworker http`. -> its address, once it answers."""
    processes = []

    def start(*options):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        models = [f"{name}={worker.name}" for name, worker in workers.items()]
        log = open(tmp_path_factory.mktemp("log") / "log", "w")  # noqa: SIM115
        command = [sys.executable, "-m", "gpuworker.cli", "http", *models, "--port", str(port), *options]
        processes.append((subprocess.Popen(command, stdout=log, stderr=log), log))

        def answers():
            assert processes[-1][0].poll() is None, pathlib.Path(log.name).read_text()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/live") as response:
                    return response.status == 200
            except OSError:
                return False

        eventually(answers, 60)
        return f"http://127.0.0.1:{port}"

    start.processes = processes
    yield start
    for process, log in processes:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM), pathlib.Path(log.name).read_text()
        log.close()


@pytest.fixture(scope="module")
def url(serve):
    return serve("--workers", "2")


@pytest.fixture(scope="module")
def locked(serve, tmp_path_factory):
    """One that wants a key."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEY}\n")
    return serve("--api-keys-file", str(file))


@pytest.fixture
def ai(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def v2(url):
    client = triton.InferenceServerClient(url.removeprefix("http://"))
    yield client
    client.close()


def test_embeddings_by_openais_client(ai, workers):
    texts = tiny_encoder.texts(5)
    expected = np.array(list(workers["minilm"].connect().map(texts)))
    found = ai.embeddings.create(model="minilm", input=texts)
    assert np.allclose([one.embedding for one in found.data], expected, atol=1e-5)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 5
    plain = ai.embeddings.create(model="minilm", input=texts[0], encoding_format="float")
    assert np.allclose(plain.data[0].embedding, expected[0], atol=1e-5)
    ids = gpuworker.Declared(workers["minilm"].name).now().tokens_of(texts[0])["input_ids"].tolist()
    assert np.allclose(ai.embeddings.create(model="minilm", input=ids).data[0].embedding, expected[0], atol=1e-5)
    assert np.allclose([one.embedding for one in ai.embeddings.create(model="minilm", input=[ids, ids]).data], expected[:1].repeat(2, 0), atol=1e-5)


def test_long_texts_are_embedded_too(ai, workers):
    text = " ".join(tiny_encoder.texts(2)) * 300
    expected = workers["minilm"].connect().submit(text)
    assert np.allclose(ai.embeddings.create(model="minilm", input=text).data[0].embedding, expected, atol=1e-5)


@pytest.mark.parametrize("given", ["", [], ["a", ""], ["a", 1], [[]], [-1], [2**40]])
def test_what_embeddings_do_not_take(ai, given):
    with pytest.raises(openai.BadRequestError) as caught:
        ai.embeddings.create(model="minilm", input=given)
    assert caught.value.param == "input"
    with pytest.raises(openai.BadRequestError) as caught:
        ai.embeddings.create(model="minilm", input="a", dimensions=3)
    assert caught.value.param == "dimensions"


def test_chats_by_openais_client(ai, llama):
    expected = wordy_llama.text_of(tiny_llama.generated(llama, wordy_llama.ids("user : hello assistant :"), 20))
    asked = {
        "model": "smollm2", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "temperature": 0, "extra_body": {"ignore_eos": True},
        "logprobs": True, "top_logprobs": 1,
    }  # fmt: skip
    whole = ai.chat.completions.create(**asked)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (expected, "length")
    assert whole.usage.total_tokens == 25
    with ai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage == whole.usage
    logprobs = [one.logprob for chunk in chunks if chunk.choices and chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert np.allclose(logprobs, [one.logprob for one in whole.choices[0].logprobs.content], atol=1e-4)


def test_completions_by_openais_client(ai, llama):
    expected = wordy_llama.text_of(tiny_llama.generated(llama, wordy_llama.ids("hello w20"), 6))
    asked = {"model": "smollm2", "prompt": "hello w20", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    assert ai.completions.create(**asked).choices[0].text == expected
    assert "".join(chunk.choices[0].text for chunk in ai.completions.create(**asked, stream=True)) == expected


def test_a_stream_that_is_closed_ends(ai, workers):
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 500, "temperature": 0, "extra_body": {"ignore_eos": True}}
    before = workers["smollm2"].stats().generation.tokens
    with ai.chat.completions.create(model="smollm2", **asked, stream=True) as stream:
        next(iter(stream))
    eventually(lambda: workers["smollm2"].stats().generation.running == 0 == workers["smollm2"].stats().slots_in_use)
    assert workers["smollm2"].stats().generation.tokens - before < 490


def test_errors_are_those_that_openais_client_knows(ai):
    assert [model.id for model in ai.models.list()] == ["minilm", "smollm2", "doubler", "summed", "plain"]
    assert ai.models.retrieve("minilm").owned_by == "gpuworker"
    with pytest.raises(openai.NotFoundError) as caught:
        ai.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "hello"}])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "hello"}], tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert caught.value.param == "tools"
    with pytest.raises(openai.InternalServerError):
        ai.completions.create(model="smollm2", prompt="w20 poison w21", stream=True)


def test_keys_by_openais_client(locked):
    with openai.OpenAI(base_url=f"{locked}/v1", api_key="wrong", max_retries=0) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with openai.OpenAI(base_url=f"{locked}/v1", api_key=KEY, max_retries=0) as client:
        assert len(client.models.list().data) == 5


def infer_input(name, array, datatype, binary):
    found = triton.InferInput(name, list(array.shape), datatype)
    found.set_data_from_numpy(array, binary_data=binary)
    return found


@pytest.mark.parametrize("binary", [True, False])
def test_inference_by_tritons_client(v2, binary):
    x, scale = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 10], np.float32)
    outputs = [triton.InferRequestedOutput("sum", binary_data=binary), triton.InferRequestedOutput("y", binary_data=not binary)]
    inputs = [infer_input("x", x, "FP32", binary), infer_input("scale", scale, "FP32", not binary)]
    found = v2.infer("summed", inputs, outputs=outputs, request_id="id-1")
    assert np.array_equal(found.as_numpy("y"), x * scale[:, None])
    assert np.array_equal(found.as_numpy("sum"), [3, 120])
    assert found.get_response()["id"] == "id-1"
    bare = v2.infer("doubler", [infer_input("input", np.ones((3, 4), np.float32), "FP32", binary)])
    assert np.array_equal(bare.as_numpy("output"), np.full((3, 4), 2, np.float32))


@pytest.mark.parametrize(
    ("datatype", "dtype"), [("BOOL", "?"), ("INT8", "i1"), ("INT64", "i8"), ("UINT8", "u1"), ("UINT64", "u8"), ("FP16", "f2"), ("FP64", "f8")]
)
def test_datatypes_by_tritons_client(v2, datatype, dtype):
    array = np.array([[0, 1, 1]], dtype)
    found = v2.infer("plain", [infer_input("input", array, datatype, True)]).as_numpy("output")
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def test_texts_by_tritons_client(v2, workers):
    texts = [*tiny_encoder.texts(3), " ".join(tiny_encoder.texts(2)) * 300]
    expected = np.array(list(workers["minilm"].connect().map(texts)))
    for binary in (True, False):
        found = v2.infer("minilm", [infer_input("text", np.array(texts, object), "BYTES", binary)])
        assert np.allclose(found.as_numpy("output"), expected, atol=1e-5)
    assert v2.infer("plain", [infer_input("input", np.array(["a", "é"], object), "BYTES", True)]).as_numpy("output").tolist() == [b"a", "é".encode()]


def test_health_and_errors_by_tritons_client(v2):
    assert v2.is_server_live()
    assert v2.is_server_ready()
    assert v2.is_model_ready("doubler")
    assert not v2.is_model_ready("none")
    assert v2.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    assert v2.get_model_metadata("doubler")["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 4]}]
    with pytest.raises(triton.InferenceServerException, match="no model 'none'"):
        v2.get_model_metadata("none")
    with pytest.raises(triton.InferenceServerException, match="float32"):
        v2.infer("doubler", [infer_input("input", np.ones((1, 4)), "FP64", True)])


def test_a_long_body_is_refused_while_it_is_sent(url):
    """A caller that goes on sending gets its answer too."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v2/models/plain/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n"
        try:
            for _ in range(9):
                connection.sendall(chunk)
        except OSError:  # closed after its answer
            pass
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_servers_end_with_the_process_that_started_them(workers, serve):
    url = serve("--workers", "2")
    process, log = serve.processes.pop()
    process.kill()
    process.wait()
    log.close()

    def is_free():
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v2/health/live"):
            return False
        return True

    eventually(is_free, 60)


def lines():
    """The commands of the page that call curl, each with what the page says comes back ("" if nothing)."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", DOCS.read_text(), re.S):
        for line in block.splitlines():
            if line.startswith("$ curl"):
                found.append([line[2:], ""])
            elif found and not line.startswith("$"):
                found[-1][1] = line
    return found


@pytest.mark.parametrize(("command", "answer"), lines())
def test_the_lines_of_the_page_do_what_it_says(url, command, answer):
    command = command.replace("localhost:8000", url.removeprefix("http://"))
    command = command.replace('"max_tokens"', '"temperature": 0, "max_tokens"')  # one of this model's words is poison to it
    got = subprocess.run(["bash", "-c", f"{command} --fail --noproxy '*'"], capture_output=True, text=True, timeout=60)
    assert got.returncode == 0, got
    if answer:
        assert got.stdout == answer
    if '"stream": true' in command:
        assert got.stdout.endswith("data: [DONE]\n\n")
    else:
        assert "error" not in json.loads(got.stdout)


def test_the_page_has_lines():
    assert len(lines()) > 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "a=b"], "twice"),
        (["=b"], "NAME"),
        (["a=b c"], "name"),
        (["a", "--port", "0"], "--port"),
        (["a", "--timeout", "-1"], "--timeout"),
        (["a", "--api-keys-file", "/nothing/there"], "/nothing/there"),
        (["a", "--prot", "1"], "--port"),
    ],
)
def test_mistakes_in_the_command_are_one_line(arguments, words):
    got = subprocess.run([sys.executable, "-m", "gpuworker.cli", "http", *arguments], capture_output=True, text=True, timeout=60)
    assert got.returncode in (1, 2)
    assert words in got.stderr
    assert "Traceback" not in got.stderr


def test_what_is_missing_is_named(monkeypatch, capsys):
    import importlib.util

    from gpuworker.cli import main

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else find(name, *rest))
    assert main(["http", "a"]) == 1
    assert "pip install 'gpuworker[http]'" in capsys.readouterr().err
