"""Directories of models that cannot be served whole are refused when they are loaded, in words; and loading writes nothing to stderr."""

import json
import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file
from transformers.utils import logging as said

from gpuworker.generation.handler import GenerationHandler
from tests import tiny_decoders, tiny_llama
from tests.tiny_encoder import change_json

NORM = "model.norm.weight"


def change_weights(directory, change):
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def drop(*names):
    def change(weights):
        for name in [name for name in weights if any(one in name for one in names)]:
            del weights[name]

    return lambda directory: change_weights(directory, change)


def shorten(weights):
    weights[NORM] = weights[NORM][:32].clone()


def cut(directory):
    with open(directory / "model.safetensors", "r+b") as file:
        file.truncate(1000)


def split(directory):
    """Into two files with an index, of which one is lost."""
    weights = load_file(directory / "model.safetensors")
    parts = {name: f"model-0000{1 + (name == NORM)}-of-00002.safetensors" for name in weights}
    for part in set(parts.values()):
        save_file({name: weights[name] for name in weights if parts[name] == part}, directory / part, metadata={"format": "pt"})
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    return directory / parts[NORM]


UNFIT = [
    (drop("layers.1.mlp.up"), ValueError, "has no weights for 1 parameters of LlamaForCausalLM: model.layers.1.mlp.up_proj.weight"),
    (drop("layers.1"), ValueError, r"has no weights for 9 parameters of LlamaForCausalLM: .*, .*, .*, \.\.\."),
    (drop("lm_head"), ValueError, "has no weights for 1 parameters of LlamaForCausalLM: lm_head.weight"),
    (lambda directory: change_json(directory / "config.json", num_hidden_layers=3), ValueError, "has no weights for 9 parameters"),
    (
        lambda directory: change_weights(directory, shorten),
        ValueError,
        r"1 parameters of LlamaForCausalLM: model.norm.weight is \[32\] and should be \[64\]",
    ),
    (cut, ValueError, "its weights cannot be read .* is the file whole?"),
    (lambda directory: (directory / "model.safetensors").unlink(), FileNotFoundError, "has no weights: there is no model.safetensors"),
    (
        lambda directory: split(directory).unlink(),
        FileNotFoundError,
        "has not all of its weights: model-00002-of-00002.safetensors is missing, of 2 files",
    ),
    (
        lambda directory: change_json(directory / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        ValueError,
        r"holds quantised weights \(gptq\), which are not supported; give the directory of the model itself, or a GGUF file",
    ),
    (lambda directory: change_json(directory / "config.json", quantization_config={"load_in_4bit": True}), ValueError, "holds quantised weights"),
    (lambda directory: change_json(directory / "config.json", architectures=["LlamaModel"]), ValueError, "holds LlamaModel, which generates no text"),
    (lambda directory: change_json(directory / "config.json", model_type="of-nobodys"), ValueError, "of-nobodys"),
    (lambda directory: (directory / "config.json").unlink(), FileNotFoundError, "there is no config.json in it"),
]


@pytest.fixture
def directory(tmp_path):
    tiny_llama.save(tmp_path)
    return tmp_path


def load(directory):
    handler = GenerationHandler(directory, dtype="float32", device="cpu")
    handler.load()
    return handler


@pytest.mark.parametrize(("spoil", "kind", "message"), UNFIT, ids=[re.sub(r"\W+", " ", message)[:60] for _, _, message in UNFIT])
def test_what_is_not_whole_is_refused(directory, spoil, kind, message):
    spoil(directory)
    with pytest.raises(kind, match=message) as caught:
        load(directory)
    assert str(directory) in str(caught.value) or "of-nobodys" in message


def test_in_several_files(directory):
    split(directory)
    load(directory)


def test_loading_is_quiet_and_leaves_others_as_loud_as_they_were(directory, capfd, caplog):
    said.enable_progress_bar()
    before = said.get_verbosity()
    capfd.readouterr()
    load(directory)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    change_weights(directory, lambda weights: weights.update({f"extra.{k}": weights[NORM].clone() for k in range(5)}))
    load(directory)
    assert capfd.readouterr() == ("", "")
    (record,) = caplog.records
    assert record.getMessage().endswith("has weights that LlamaForCausalLM has no use for, 5 of them: extra.0, extra.1, extra.2, ...")
    drop("lm_head")(directory)
    with pytest.raises(ValueError, match="lm_head"):
        load(directory)
    assert capfd.readouterr() == ("", "")
    assert (said.is_progress_bar_enabled(), said.get_verbosity()) == (True, before)


@pytest.mark.parametrize("name", ["gpt2", "gemma", "opt", "llama"])
def test_what_shares_its_weights_is_whole(tmp_path, name):
    """Of input and output embeddings that are one, the file holds one."""
    tiny_decoders.decoder(name, tie_word_embeddings=True).save_pretrained(tmp_path)
    load(tmp_path)
