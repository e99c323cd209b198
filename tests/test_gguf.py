"""`gpuworker serve --gguf`: a GGUF file is converted once, whoever asks and however often that is interrupted."""

import os
import subprocess
import sys

import pytest

from gpuworker.cli import main
from gpuworker.generation import gguf
from tests import byte_tokenizer, tiny_decoders
from tests.live_worker import side_by_side

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
HEADS, KV_HEADS, LAYERS = 4, 2, 2


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """-> (a GGUF file as llama.cpp's converter would have written it, the model that is in it)."""
    writers, _ = pytest.importorskip("gguf"), pytest.importorskip("accelerate")
    tokenizer = byte_tokenizer.byte_level()
    model = tiny_decoders.decoder("llama", vocab_size=tokenizer.get_vocab_size())
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(writers, file, model, tokenizer)
    return file, model


def write(gguf_package, file, model, tokenizer):
    import json

    config, weights = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer = gguf_package.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    told = json.loads(tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get))
    writer.add_token_types([3 if index < len(byte_tokenizer.SPECIALS) else 1 for index in range(config.vocab_size)])
    writer.add_token_merges([" ".join(merge) for merge in told["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")]:
        writer.add_tensor(f"{name}.weight", weights[f"{tensor}.weight"])
    parts = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    for layer in range(LAYERS):
        for name, tensor in parts.items():
            weight, heads = weights[f"model.layers.{layer}.{tensor}.weight"], {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
            if heads:  # llama.cpp has the halves of a rotation side by side
                weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_is_converted_once_to_what_is_in_it(made, monkeypatch, caplog):
    import transformers

    file, model = made
    caplog.set_level("INFO", logger="gpuworker")
    directory = gguf.converted(file)
    assert [f"converting {file} once, into {directory}" in caplog.messages, "converted in" in caplog.messages[-1]] == [True, True]
    assert set(os.listdir(directory)) >= {"config.json", "model.safetensors", "tokenizer.json"}
    monkeypatch.setattr(subprocess, "run", None)
    assert gguf.converted(file) == directory
    assert f"{file} was converted earlier: {directory}" in caplog.messages
    assert os.listdir(os.path.dirname(directory)).count(os.path.basename(directory) + ".partial") == 0
    found = transformers.AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    assert found.dtype == torch.float32
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    words = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    text = byte_tokenizer.TEXTS[0]
    assert words(text, add_special_tokens=False)["input_ids"] == byte_tokenizer.byte_level().encode(text).ids


@pytest.fixture
def file(tmp_path):
    """One that nobody can read further than its first bytes."""
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF and no more")
    return path


def test_another_version_of_a_file_has_another_directory(file):
    before = gguf.directory_of(file)
    assert gguf.directory_of(file) == before
    os.utime(file, ns=(1, 1))
    changed = gguf.directory_of(file)
    file.write_bytes(b"GGUF and more than that")
    assert len({before, changed, gguf.directory_of(file)}) == 3
    link = file.with_name("link.gguf")
    link.symlink_to(file)
    assert gguf.directory_of(link) == gguf.directory_of(file)


def test_of_many_at_once_one_converts(file, monkeypatch):
    saved = []

    def save(path, directory):
        directory.mkdir()
        saved.append(path)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "_save", save)
    directory = gguf.directory_of(file)
    side_by_side(lambda _: gguf.convert(file, directory), range(8))
    assert saved == [file]
    assert (directory / "config.json").exists()


def test_nothing_is_there_before_it_is_whole_and_what_was_killed_is_begun_again(file, monkeypatch):
    directory = gguf.directory_of(file)
    left = directory.with_suffix(".partial")

    def fail(path, directory):
        directory.mkdir()
        raise OSError("No space left on device")

    monkeypatch.setattr(gguf, "_save", fail)
    with pytest.raises(OSError, match="No space left"):
        gguf.convert(file, directory)
    assert not directory.exists()
    assert not left.exists()
    left.mkdir()
    (left / "half a file").touch()
    monkeypatch.setattr(gguf, "_save", lambda path, into: into.mkdir())
    gguf.convert(file, directory)
    assert os.listdir(directory) == []


def test_what_is_no_gguf_file_is_one_line(file, tmp_path, name, capsys):
    (tmp_path / "text.gguf").write_text("text")
    for path, message in [
        (tmp_path / "nowhere.gguf", "there is no such file"),
        (tmp_path, "is a directory; serve one that save_pretrained has written with --hf"),
        (tmp_path / "text.gguf", "is no GGUF file: it begins with b'text'"),
        (file, "cannot be served: "),
    ]:
        assert main(["serve", "--gguf", str(path), "--name", name]) == 1
        err = capsys.readouterr().err.splitlines()
        assert message in err[-1]
        assert str(path) in err[-1]
        assert not any(line.startswith("Traceback") for line in err)
    assert not gguf.directory_of(file).exists()


def test_a_missing_package_is_named(file, name, monkeypatch, capsys):
    find = gguf.importlib.util.find_spec
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda package: None if package == "gguf" else find(package))
    assert main(["serve", "--gguf", str(file), "--name", name]) == 1
    assert "a GGUF file is converted with gguf: pip install 'gpuworker[llm]'" in capsys.readouterr().err


def test_a_conversion_ends_with_whoever_waits_for_it(file):
    """Its parent is another process than it was told: it does nothing."""
    done = subprocess.run([sys.executable, "-m", gguf.__name__, str(file), str(gguf.directory_of(file)), "1"], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"")
