"""Linear layers with weights that are laid out once: the same results, bit for bit, and the model as it was afterwards."""

import copy

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from gpuworker.generation import linear
from gpuworker.generation.linear import PackedLinear, PackedWeights, Part, can_pack
from gpuworker.generation.model import PagedModel
from tests.test_paged_attention import scattered
from tests.tiny_decoders import FAMILIES, decoder

pytestmark = pytest.mark.skipif(not can_pack(), reason="this processor, or this torch, cannot multiply packed bfloat16 weights")


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Whatever is faster here."""
    monkeypatch.setattr(PackedWeights, "_is_faster", lambda self, weight: True)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [(0,), (1,), (1, 16), (1, 0), (2, 3, 5), (300,)])
def test_bit_for_bit(rows, has_bias):
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 200, bias=has_bias, dtype=torch.bfloat16)
    packed = PackedLinear(layer.weight.data, layer.bias)
    data = torch.randn(*rows, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(packed(data), layer(data))
        assert packed(data).shape == (*rows, 200)
        if len(rows) == 2:
            mixed = torch.randn(96, *rows, dtype=torch.bfloat16).movedim(0, -1)
            assert torch.equal(packed(mixed), packed(mixed.contiguous()))
        assert torch.equal(packed.original(), layer.weight)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_the_same(name):
    """Fused layers of every family among them."""
    model = decoder(name).bfloat16()
    before, layers = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    spans = [(20, 1), (33, 1), (0, 9), (17, 5)]
    chunks, _ = scattered(spans, blocks=30)
    plain = PagedModel(model, blocks=30, pack=False)
    expected = plain.forward(chunks)
    plain.close()
    paged = PagedModel(model, blocks=30)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    assert torch.equal(paged.forward(chunks), expected)
    paged.close()
    assert dict(model.named_modules()) == layers
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_layers_of_one_input_are_one():
    model = decoder("qwen2").bfloat16()
    weights = PackedWeights()
    weights.pack(model)
    attention = model.model.layers[0].self_attn
    assert all(isinstance(part, Part) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    assert isinstance(attention.o_proj, PackedLinear)
    data, other = (torch.randn(1, 3, 64, dtype=torch.bfloat16) for _ in range(2))
    plain = decoder("qwen2").bfloat16().model.layers[0].self_attn
    with torch.inference_mode():
        for part, layer in ((attention.v_proj, plain.v_proj), (attention.q_proj, plain.q_proj)):  # in any order, for any input, again and again
            for rows in (data, other, other, data):
                assert torch.equal(part(rows), layer(rows))
    weights.unpack()
    assert type(attention.q_proj) is torch.nn.Linear


def test_memory_is_not_taken_twice_unless_weights_are_tied():
    model = decoder("llama", tie_word_embeddings=True).bfloat16()
    PackedWeights().pack(model)
    assert model.model.embed_tokens.weight.numel() == 256 * 64
    untied = decoder("llama").bfloat16()
    head, down = untied.lm_head, untied.model.layers[0].mlp.down_proj
    weights = PackedWeights()
    weights.pack(untied)
    assert head.weight.numel() == down.weight.numel() == 0
    assert len(weights) == 2 * 7 + 1


def test_what_is_not_packed():
    model = decoder("llama")
    weights = PackedWeights()
    weights.pack(model)
    assert not len(weights)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Conv1D(8, 8), torch.nn.ReLU()).bfloat16()
    model[0].register_forward_hook(lambda *given: None)
    weights.pack(model)
    assert len(weights) == 1
    weights.unpack()
    assert isinstance(model[1], Conv1D)


def test_a_model_that_looks_at_its_weights_keeps_them(monkeypatch, caplog):
    model = decoder("llama").bfloat16()
    mlp, before = type(model.model.layers[0].mlp), type(model.model.layers[0].mlp).forward
    monkeypatch.setattr(mlp, "forward", lambda self, rows: before(self, rows.to(self.down_proj.weight.dtype)))
    chunks, _ = scattered([(20, 1), (0, 9)], blocks=30)
    paged = PagedModel(model, blocks=30)
    assert paged.forward(chunks).shape == (2, 256)
    assert type(model.lm_head) is torch.nn.Linear
    assert "llama runs with its weights as they are" in caplog.text


def test_it_is_measured_whether_it_pays(monkeypatch):
    monkeypatch.undo()
    weight, seconds = torch.zeros(8, 8, dtype=torch.bfloat16), {linear.F.linear: 2.0, linear._product: 1.0}
    monkeypatch.setattr(linear, "_took_s", lambda run, rows, weight: seconds[run])
    assert PackedWeights()._is_faster(weight)
    seconds[linear._product] = 3.0
    assert not PackedWeights()._is_faster(weight)
