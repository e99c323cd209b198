"""Encoders from a directory: every answer is what the model gives for the text alone, whatever it was batched with."""

import json
import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest

import gpuworker
from gpuworker.cli import main
from gpuworker.execution import encoder_files
from gpuworker.execution.encoder import HFEncoder
from gpuworker.execution.encoder_files import EncoderFiles, buckets
from gpuworker.segment.stats import Stats
from tests import tiny_encoder
from tests.tiny_encoder import MAX_TOKENS, POSITIONS, change_json, save_modules, texts, write_json

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest_plugins = ("tests.served_app",)
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["bert", "roberta"])
def encoder(request, tmp_path_factory):
    return tiny_encoder.save_encoder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def bert(tmp_path):
    """One that may be spoilt."""
    return tiny_encoder.save_encoder(tmp_path / "bert")


def alone(directory, wanted, pooling="mean", normalize=True, max_length=MAX_TOKENS):
    """Vectors as transformers has them, text by text, without any padding."""
    model = transformers.AutoModel.from_pretrained(directory).eval()
    tokenize = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    vectors = []
    for text in wanted:
        batch = tokenize([text], truncation=True, max_length=max_length, padding=False, return_token_type_ids=False, return_tensors="pt")
        with torch.inference_mode():
            states = model(**batch).last_hidden_state[0]
        vector = states.mean(0) if pooling == "mean" else states[0]
        vectors.append((vector / vector.norm() if normalize else vector).numpy())
    return np.stack(vectors)


def near(found, expected):
    found = np.stack(list(found))
    assert (found.dtype, found.shape) == (np.float32, expected.shape)
    assert np.abs(found - expected).max() <= TOLERANCE
    return True


def test_answers_are_those_of_the_text_alone_in_batches_of_all_lengths(encoder, in_process):
    worker, wanted = in_process(HFEncoder(encoder), max_batch_size=16), ["", *texts(58), "search " * 500]
    with worker.connect() as client:
        assert near(client.map(wanted), alone(encoder, wanted))
        stats = worker.stats()
        assert stats.completed == 60
        assert stats.batches < 60
        assert near([client.submit("Grüße 🎉")], alone(encoder, ["Grüße 🎉"]))


def test_length_buckets_change_no_answer(encoder, in_process):
    worker, wanted = in_process(HFEncoder(encoder), max_batch_size=8, length_buckets=buckets(MAX_TOKENS)), texts(60, seed=9)
    with worker.connect() as client:
        assert near(client.map(wanted), alone(encoder, wanted))


def test_token_ids_go_too_and_what_is_neither_is_refused(encoder, in_process):
    with in_process(HFEncoder(encoder)).connect() as client:
        assert near([client.submit({"input_ids": np.array([2, 5, 3])})], alone(encoder, ["search"]))
        for wrong in ("a\ud800", b"search", {"input_ids": np.zeros(MAX_TOKENS + 1, np.int64)}, np.zeros(3, np.int64)):
            with pytest.raises(gpuworker.InvalidRequest):
                client.submit(wrong)


def test_max_length_cuts_texts_earlier(encoder, in_process):
    wanted = ["search " * 20, "a"]
    with in_process(HFEncoder(encoder, max_length=7)).connect() as client:
        assert near(client.map(wanted), alone(encoder, wanted, max_length=7))


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", False), ("cls", True), ("cls", False)])
def test_pooling_is_that_of_sentence_transformers(bert, in_process, pooling, normalize):
    save_modules(bert, pooling, normalize, max_seq_length=9)
    wanted = texts(12)
    with in_process(HFEncoder(bert)).connect() as client:
        assert near(client.map(wanted), alone(bert, wanted, pooling, normalize, max_length=9))


def test_pooling_can_be_chosen(bert, in_process):
    save_modules(bert, "mean", True)
    with in_process(HFEncoder(bert, pooling="cls", normalize=False)).connect() as client:
        assert near([client.submit("search")], alone(bert, ["search"], "cls", False))


def test_the_newer_pooling_file_is_read_too(bert):
    save_modules(bert, pooling_mode="cls")
    assert EncoderFiles.read(bert).pooling == "cls"


def test_token_types_of_the_tokenizer_reach_the_model(bert, in_process):
    tiny_encoder.save_tokenizer(bert / "tokenizer.json", types=1)
    with in_process(HFEncoder(bert)).connect() as client:
        found = client.submit("search graph")
    model = transformers.AutoModel.from_pretrained(bert).eval()
    ids = torch.tensor([[2, 5, 9, 3]])
    with torch.inference_mode():
        states = model(input_ids=ids, token_type_ids=torch.ones_like(ids)).last_hidden_state[0]
    expected = torch.nn.functional.normalize(states.mean(0), dim=0).numpy()
    assert near([found], expected[None])
    assert np.abs(found - alone(bert, ["search graph"])[0]).max() > 0.01


def test_half_precision_gives_float32_vectors_close_to_the_others(bert, in_process):
    wanted = texts(10)
    with in_process(HFEncoder(bert, dtype="bfloat16")).connect() as client:
        found = np.stack(list(client.map(wanted)))
    assert found.dtype == np.float32
    cosines = (found * alone(bert, wanted)).sum(1)
    assert cosines.min() > 0.99
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < TOLERANCE


# The directory


def test_the_longest_text_is_what_tokenizer_positions_and_sentence_transformers_allow(bert):
    assert EncoderFiles.read(bert).max_length == MAX_TOKENS
    change_json(bert / "tokenizer_config.json", model_max_length=10**30)  # transformers' way to say that it does not know
    assert EncoderFiles.read(bert).max_length == POSITIONS
    change_json(bert / "config.json", model_type="roberta", pad_token_id=1)
    assert EncoderFiles.read(bert).max_length == POSITIONS - 2
    save_modules(bert, max_seq_length=12)
    assert EncoderFiles.read(bert).max_length == 12


def test_buckets_double_up_to_the_longest():
    assert buckets(512) == (16, 32, 64, 128, 256, 512)
    assert buckets(100) == (16, 32, 64, 100)
    assert buckets(16) == (16,)
    assert buckets(5) == (5,)


def remove(*names):
    return lambda directory: [(directory / name).unlink() for name in names]


def slow_tokenizer_only(directory):
    (directory / "tokenizer.json").rename(directory / "spiece.model")


def pickled(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def with_dense(directory):
    save_modules(directory)
    modules = json.loads((directory / "modules.json").read_text())
    write_json(directory / "modules.json", [*modules, {"idx": 3, "path": "3_Dense", "type": "sentence_transformers.models.Dense"}])


UNFIT = [
    (lambda directory: directory.rename(directory.with_name("moved")), "is no directory"),
    (remove("config.json"), "has no config.json"),
    (remove("model.safetensors"), "there is no model.safetensors"),
    (pickled, "pytorch_model.bin is a pickle"),
    (slow_tokenizer_only, "has no tokenizer.json"),
    (lambda directory: (directory / "config.json").write_text("{"), "config.json is no JSON"),
    (lambda directory: change_json(directory / "config.json", architectures=["LlamaForCausalLM"]), "is a decoder-only model"),
    (lambda directory: change_json(directory / "config.json", is_decoder=True), "is a decoder-only model"),
    (lambda directory: change_json(directory / "config.json", is_encoder_decoder=True), "is an encoder with a decoder"),
    (lambda directory: save_modules(directory, pooling_mode_max_tokens=True), "pooling by max is not supported; mean and cls are"),
    (lambda directory: save_modules(directory, pooling_mode=["mean", "cls"]), "pooling by mean and cls is not supported"),
    (with_dense, "modules.json has a module 'Dense'"),
]


@pytest.mark.parametrize(("spoil", "message"), UNFIT, ids=[message for _, message in UNFIT])
def test_a_directory_that_cannot_be_served_is_one_line(bert, name, capsys, spoil, message):
    spoil(bert)
    assert main(["serve", "--hf-encoder", str(bert), "--name", name]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
    assert str(bert) in err
    with pytest.raises((OSError, ValueError), match=message):
        HFEncoder(bert).load()


def fewer_weights(directory):
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if "layer.1." not in name}, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda directory: tiny_encoder.save_encoder(directory, "gpt2"), "GPT2Model is a decoder-only model"),
        (fewer_weights, "has no weights for 16 parameters of BertModel: encoder.layer.1."),
        (lambda directory: change_json(directory / "config.json", model_type="nothing-known"), "nothing-known"),
    ],
)
def test_a_model_that_is_none_is_found_by_its_owner(bert, spoil, message):
    spoil(bert)
    with pytest.raises(ValueError, match=message):
        HFEncoder(bert).load()


def test_texts_longer_than_the_positions_are_refused_before_any_comes(tmp_path, monkeypatch):
    roberta = tiny_encoder.save_encoder(tmp_path / "roberta", "roberta", pad_token_id=5)
    change_json(roberta / "tokenizer_config.json", model_max_length=1000)
    assert EncoderFiles.read(roberta).max_length == POSITIONS - 6
    encoder = HFEncoder(roberta)
    encoder.load()
    assert encoder.max_extents == {"tokens": POSITIONS - 6}
    monkeypatch.setattr(encoder_files, "OFFSET_POSITIONS", ())  # as if it were of a family that we do not know
    with pytest.raises(ValueError, match="may have 64 tokens, and its model has 58 positions; give max_length=58"):
        HFEncoder(roberta).load()
    HFEncoder(roberta, max_length=58).load()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float8"}, ValueError, "dtype='float8': choose one of 'float32'"),
        ({"pooling": "max"}, ValueError, "pooling='max': choose 'mean' or 'cls'"),
        ({"max_length": 0}, ValueError, "max_length=0: give a number of tokens"),
        ({"directory": None}, TypeError, "needs the directory of a model"),
    ],
)
def test_wrong_options_are_refused_at_once(options, error, message):
    with pytest.raises(error, match=message):
        HFEncoder(**{"directory": "/models/x", **options})


def test_it_travels_as_what_was_given(bert, monkeypatch):
    monkeypatch.chdir(bert.parent)
    encoder = HFEncoder("bert", dtype="bfloat16")
    encoder = pickle.loads(pickle.dumps(encoder))
    assert (encoder.directory, encoder.dtype, encoder.max_length) == (str(bert), "bfloat16", None)
    assert encoder.__qualname__ == f"HFEncoder({bert})"

    class Mine(HFEncoder):
        directory = "elsewhere"

    assert Mine().directory == str(bert.parent / "elsewhere")


# The command


FRONTEND = """
import os, sys
import gpuworker
client = gpuworker.connect(sys.argv[1])
first = client.submit("search graph")
child = os.fork()
assert [client.submit(text).tolist() for text in ("search graph", "")][0] == first.tolist()
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert first.dtype == "float32" and first.shape == (32,)
    assert "tokenizers" in sys.modules and not {"torch", "transformers"} & set(sys.modules)
    print(first.tolist())
"""


def test_serve_answers_texts_of_frontends_without_torch(bert, app, name):
    arguments = ["--name", name, "--hf-encoder", str(bert), "--device", "cpu", "--capacity", "16"]
    with subprocess.Popen([sys.executable, "-m", "gpuworker.cli", "serve", *arguments], stderr=subprocess.PIPE, text=True) as serving:
        try:
            ready = next((line for line in serving.stderr if "ready" in line), "")
            assert f"HFEncoder({bert})" in ready
            done = subprocess.run([sys.executable, "-c", FRONTEND, name], capture_output=True, text=True, timeout=60)
            assert (done.returncode, done.stderr) == (0, "")
            assert near([np.array(json.loads(done.stdout), np.float32)], alone(bert, ["search graph"]))
            assert Stats.of(name).options["length_buckets"] == [16, 32, MAX_TOKENS]
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(30) == 0
        finally:
            serving.kill()


@pytest.fixture
def job(monkeypatch):
    """What `gpuworker serve` would run."""
    jobs = []
    monkeypatch.setattr("gpuworker.cli.serve.Supervisor", lambda job, *_: jobs.append(job) or type("Done", (), {"run": lambda self: 0})())
    monkeypatch.setenv("GPUWORKER_LOG", "WARNING")
    return jobs


@pytest.mark.parametrize(
    ("options", "bounds", "longest"),
    [
        ([], (16, 32, MAX_TOKENS), MAX_TOKENS),
        (["--max-batch-tokens", "40"], (16, 32, 40), 40),
        (["--max-length", "20"], None, 20),
        (["--length-buckets", "8,24"], "8,24", 24),
        (["--length-buckets", "8,100"], "8,100", MAX_TOKENS),
        (["--length-buckets", "learn"], "learn", MAX_TOKENS),
    ],
)
def test_length_buckets_are_those_of_the_model_unless_given(bert, name, job, options, bounds, longest):
    assert main(["serve", *options, "--hf-encoder", str(bert), "--name", name, "--dtype", "float16"]) == 0
    handler = pickle.loads(job[0].handler)
    assert (handler.directory, handler.max_length, handler.dtype, handler.device) == (str(bert), longest, "float16", None)
    assert job[0].options.get("length_buckets") == bounds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a handler, MODULE:ATTR, or --hf-encoder DIR"),
        (["m:f", "--hf-encoder", "DIR"], "give a handler, MODULE:ATTR, or --hf-encoder DIR, not both"),
        (["m:f", "--dtype", "float16"], "--dtype is for --hf-encoder"),
        (["--hf-encoder", "DIR", "--dtype", "float8"], "argument --dtype: invalid choice: 'float8'"),
    ],
)
def test_wrong_usage_is_explained(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--name", "n", *arguments])
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_handler_may_come_last(name, job):
    assert main(["serve", "--name", name, "handlers:upper"]) == 0
    assert pickle.loads(job[0].handler) == "handlers:upper"


def test_the_command_imports_neither_torch_nor_transformers(bert):
    program = f"""
import sys
from gpuworker.cli import serve
from gpuworker.config import load_config
assert load_config(None, "n", hf_encoder={os.fspath(bert)!r}).options and not {{"torch", "transformers", "tokenizers"}} & set(sys.modules), set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)
