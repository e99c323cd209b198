"""`gpuworker serve --hf`: a decoder's directory becomes a worker that generates, and what cannot be served is one line."""

import json
import os
import pickle
import signal
import subprocess
import sys

import pytest

from gpuworker.cli import main
from gpuworker.generation import files
from tests import byte_tokenizer, tiny_decoders, tiny_encoder
from tests.tiny_encoder import change_json

pytest.importorskip("torch")
pytest.importorskip("transformers")
PROMPT, TOKENS = "hello world", 12


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """-> (a directory, what the model in it generates from PROMPT)."""
    directory = tmp_path_factory.mktemp("llama")
    return directory, save_decoder(directory)


def save_decoder(directory):
    tokenizer = byte_tokenizer.byte_level()
    tokenizer.save(str(directory / "tokenizer.json"))
    model = tiny_decoders.decoder("llama", vocab_size=tokenizer.get_vocab_size())
    expected = tiny_decoders.alone(model, tokenizer.encode(PROMPT).ids, TOKENS)
    model.save_pretrained(directory)
    return expected


@pytest.fixture
def decoder(saved, tmp_path):
    """One that may be spoilt."""
    for file in saved[0].iterdir():
        os.link(file, tmp_path / file.name)
    config = tmp_path / "config.json"
    text = config.read_text()
    config.unlink()
    config.write_text(text)
    return tmp_path


FRONTEND = f"""
import sys, gpuworker
answer = gpuworker.connect(sys.argv[1]).generate({PROMPT!r}, max_tokens={TOKENS}, ignore_eos=True)
assert "tokenizers" in sys.modules and not {{"torch", "transformers"}} & set(sys.modules)
print(answer.tokens)
"""


def test_serve_generates_for_frontends_without_torch(saved, name):
    directory, expected = saved
    arguments = [
        "--hf",
        str(directory),
        "--name",
        name,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--kv-cache-bytes",
        "1000000",
        "--max-batch-size",
        "4",
    ]
    with subprocess.Popen([sys.executable, "-m", "gpuworker.cli", "serve", *arguments], stderr=subprocess.PIPE, text=True) as serving:
        try:
            lines = []
            for line in serving.stderr:
                lines.append(line)
                if "ready" in line:
                    break
            assert f"GenerationHandler({directory})" in lines[-1]
            assert any("the cache has room for" in line for line in lines)
            done = subprocess.run([sys.executable, "-c", FRONTEND, name], capture_output=True, text=True, timeout=60)
            assert (done.returncode, done.stderr) == (0, "")
            assert json.loads(done.stdout) == expected
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(30) == 0
        finally:
            serving.kill()


def encoder(directory):
    for file in directory.iterdir():
        file.unlink()
    tiny_encoder.save_encoder(directory)


UNFIT = [
    (lambda directory: (directory / "config.json").unlink(), "has no config.json"),
    (lambda directory: (directory / "tokenizer.json").unlink(), "has no tokenizer.json, which is what clients tokenise with"),
    (lambda directory: (directory / "model.safetensors").unlink(), "has no weights: there is no model.safetensors"),
    (lambda directory: (directory / "config.json").write_text("{"), "config.json is no JSON"),
    (lambda directory: change_json(directory / "config.json", quantization_config={"quant_method": "awq"}), "holds quantised weights (awq)"),
    (encoder, "holds BertModel, which generates no text; an encoder is served with --hf-encoder"),
    (lambda directory: change_json(directory / "config.json", is_encoder_decoder=True), "is an encoder with a decoder"),
    (lambda directory: change_json(directory / "config.json", architectures=["LlamaModel"]), "holds LlamaModel, which generates no text"),
]


@pytest.mark.parametrize(("spoil", "message"), UNFIT, ids=[message for _, message in UNFIT])
def test_a_directory_that_cannot_be_served_is_one_line(decoder, name, capsys, spoil, message):
    spoil(decoder)
    capsys.readouterr()
    assert main(["serve", "--hf", str(decoder), "--name", name]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
    assert str(decoder) in err


@pytest.mark.parametrize(
    ("path", "message"), [("nowhere", "is no directory; give one that save_pretrained has written"), ("model.gguf", "serve it with --gguf")]
)
def test_what_is_no_directory_is_one_line(tmp_path, name, capsys, path, message):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert main(["serve", "--hf", str(tmp_path / path), "--name", name]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a handler, MODULE:ATTR, or --hf-encoder DIR, or --hf DIR, or --gguf FILE"),
        (["--hf", "D", "--gguf", "F"], "give --hf DIR or --gguf FILE, not both"),
        (["m:f", "--hf", "D"], "give a handler, MODULE:ATTR, or --hf DIR, not both"),
        (["--hf", "D", "--gguf", "F", "--hf-encoder", "D"], "give --hf-encoder DIR or --hf DIR or --gguf FILE: one of them"),
        (["m:f", "--kv-cache-bytes", "100"], "--kv-cache-bytes is for --hf and --gguf"),
        (["--hf-encoder", "D", "--no-prefix-caching"], "--no-prefix-caching is for --hf and --gguf"),
        (["--hf", "D", "--max-model-tokens", "0"], "--max-model-tokens 0: give at least 1"),
    ],
)
def test_wrong_usage_is_explained(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--name", "n", *arguments])
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_what_is_given_reaches_the_handler(decoder, name, monkeypatch):
    jobs = []
    monkeypatch.setattr("gpuworker.cli.serve.Supervisor", lambda job, *_: jobs.append(job) or type("Done", (), {"run": lambda self: 0})())
    options = ["--dtype", "bfloat16", "--kv-cache-bytes", "123456", "--max-model-tokens", "99", "--no-prefix-caching", "--max-batch-tokens", "64"]
    assert main(["serve", "--hf", str(decoder), "--name", name, *options]) == 0
    assert main(["serve", "--hf", str(decoder), "--name", name]) == 0
    given, default = (pickle.loads(job.handler) for job in jobs)
    told = [(each.dtype, each.kv_cache_bytes, each.max_model_tokens, each.prefix_caching) for each in (given, default)]
    assert told == [("bfloat16", 123456, 99, False), (None, None, None, True)]
    assert given.directory == str(decoder)
    assert [job.options for job in jobs] == [{"max_batch_tokens": 64}, {}]


def test_the_command_imports_neither_torch_nor_transformers(decoder):
    program = f"""
import pickle, sys
from gpuworker.cli import serve
from gpuworker.config import load_config
pickle.dumps(load_config(None, "n", hf={str(decoder)!r}).handler)
assert not {{"torch", "transformers", "tokenizers"}} & set(sys.modules), set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_families_whose_classes_are_named_otherwise_pass(decoder):
    for name in ("GPT2LMHeadModel", "Gemma3ForConditionalGeneration"):
        change_json(decoder / "config.json", architectures=[name])
        assert files.check_directory(decoder) == str(decoder)
    change_json(decoder / "config.json", architectures=None)
    assert files.check_directory(decoder) == str(decoder)
