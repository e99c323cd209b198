"""The benchmark of decode graphs: what of it needs no GPU."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import gpu_generation
import torch

from gpuworker.generation.model import PagedModel

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 2048}


def test_it_says_where_there_is_no_device(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_generation.main(["--output", str(tmp_path)]) == []
    assert capsys.readouterr().out.startswith("Nothing measured: ")
    assert not list(tmp_path.iterdir())


def test_its_steps_are_steps_of_the_model():
    paged = PagedModel(gpu_generation.model(TINY), blocks=gpu_generation.blocks_for((1, 3), 20))
    seen = []

    def forward(chunks):
        seen.append(len(chunks))
        return paged.forward(chunks)

    try:
        found = gpu_generation.measure(paged.forward, forward, (1, 3), 20, rounds=3, steps=2)
    finally:
        paged.close()
    assert [record["rows"] for record in found] == [1, 3]
    assert seen == [1] * 11 + [3] * 11
    for record in found:
        assert record["graph_tokens_per_s"] == pytest.approx(record["rows"] / record["graph_ms"] * 1e3)
    shown = gpu_generation.table(found).splitlines()
    assert len(shown) == 4
    assert "eager / graph" in shown[0]


def test_rows_share_no_blocks():
    chunks = gpu_generation.step_of(8, 512)
    held = [block for chunk in chunks for block in chunk.sequence.blocks]
    assert sorted(held) == list(range(1, gpu_generation.blocks_for((8,), 512)))
    assert all(chunk.is_last and chunk.sequence.missing == 1 for chunk in chunks)
