"""Decoders of many families: what they generate together, in chunks, over few and scattered blocks, is what each request gets alone, token for token."""

import random

import pytest
import torch

from gpuworker.generation.blocks import BlockPool
from gpuworker.generation.model import PagedModel, UnsupportedModel, bytes_per_token
from gpuworker.generation.scheduler import Scheduler
from gpuworker.generation.sequence import Sequence
from tests.paged_model import shuffle
from tests.tiny_decoders import FAMILIES, REFUSED, alone, answers, decoder, requests

FEW, MANY = 13, 200


def make_scheduler(blocks, seed=3, **options):
    pool = BlockPool(blocks)
    shuffle(pool, random.Random(seed))
    return Scheduler(pool, **{"max_batch_tokens": 48, "max_running": 4, "max_model_tokens": 512, "watermark_blocks": 0, **options})


def generate(paged, scheduler, asked):
    """-> what each request gets. The greedy sampler: argmax."""
    sequences = [Sequence(ticket, prompt, max_tokens=most) for ticket, (prompt, most) in enumerate(asked)]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.running or scheduler.waiting:
        chunks = scheduler.plan()
        logits = paged.forward(chunks)
        last = [chunk.sequence for chunk in chunks if chunk.is_last]
        assert len(logits) == len(last)
        scheduler.done(chunks, dict(zip(last, logits.argmax(-1).tolist(), strict=True)))
        scheduler.check()
    return [sequence.generated for sequence in sequences]


@pytest.mark.parametrize("name", FAMILIES)
def test_together_as_alone(name):
    expected = answers(name)
    assert len({token for answer in expected for token in answer}) > 8, "such answers prove nothing"
    paged = PagedModel(decoder(name), blocks=FEW)
    scheduler = make_scheduler(FEW)
    assert generate(paged, scheduler, requests()) == expected
    stats = scheduler.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_paged_is_refused_by_name(name):
    model = decoder(name)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=f"^{name}"):
        PagedModel(model, blocks=FEW)
    with pytest.raises(UnsupportedModel, match=f"^{name}"):
        bytes_per_token(model)
    assert model.config._attn_implementation == before
    assert alone(model, [5, 6, 7], 2)


@pytest.mark.parametrize("options", [{"max_batch_tokens": 7}, {"max_batch_tokens": 512, "max_running": 8}, {"prefix_caching": False}], ids=str)
@pytest.mark.parametrize("blocks", [FEW, MANY])
def test_whatever_the_chunks_the_mates_and_the_cache(blocks, options):
    model = decoder("qwen2-window")
    paged = PagedModel(model, blocks=blocks)
    assert generate(paged, make_scheduler(blocks, **options), requests()) == answers("qwen2-window")


def test_a_second_batch_on_the_same_cache_and_then_the_model_alone():
    """Neither results nor the attention's implementation are left behind (transformers PR 45943)."""
    model = decoder("llama")
    before = model.config._attn_implementation
    paged, scheduler = PagedModel(model, blocks=FEW), make_scheduler(FEW)
    assert generate(paged, scheduler, requests()) == generate(paged, scheduler, requests()) == answers("llama")
    with pytest.raises(UnsupportedModel, match="llama: no step"):
        alone(model, [5, 6, 7], 2)
    paged.close()
    paged.close()
    assert model.config._attn_implementation == before
    assert paged.cache.size_bytes == 0
    prompt, most = requests()[0]
    assert alone(model, prompt, most) == answers("llama")[0]
    assert generate(PagedModel(model, blocks=FEW), make_scheduler(FEW), requests()) == answers("llama")


@pytest.mark.parametrize("name", ["llama", "mistral-window", "deepseek_v3"])
@pytest.mark.parametrize("left", [float("nan"), float("inf")])
def test_what_others_have_left_in_blocks_harms_nobody(name, left):
    paged = PagedModel(decoder(name), blocks=FEW)
    with torch.inference_mode():
        for layer in paged.cache.layers.values():
            layer.blocks.fill_(left)
    assert generate(paged, make_scheduler(FEW), requests()) == answers(name)


def test_an_exact_multiple_of_a_block_twice():
    """A prompt that is in the cache as a whole: one token at least is computed, and the answer is the same (tenstorrent/vllm 415, vllm PR 11186)."""
    model, prompt = decoder("llama"), requests(1, longest=70, shared=0)[0][0]
    prompt = (prompt * 32)[:32]
    expected = alone(model, prompt, 8)
    paged, scheduler = PagedModel(model, blocks=MANY), make_scheduler(MANY)
    assert generate(paged, scheduler, [(prompt, 8)]) == generate(paged, scheduler, [(prompt, 8)]) == [expected]
    assert scheduler.stats().prefix_hit_tokens == 16


def test_bytes_per_token_is_what_the_cache_takes():
    for name in ("llama", "deepseek_v3"):
        model = decoder(name)
        found = bytes_per_token(model)
        paged = PagedModel(model, blocks=FEW)
        assert paged.cache.size_bytes == found * FEW * 16
        assert paged.cache.token_bytes == found
    assert bytes_per_token(decoder("llama")) == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, bytes


@pytest.mark.parametrize("pack", [True, False])
def test_bfloat16_together_as_alone_but_for_rounding(pack):
    model = decoder("llama").bfloat16()
    prompt = requests()[1][0]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    paged, scheduler = PagedModel(model, blocks=MANY, pack=pack), make_scheduler(MANY, max_batch_tokens=17)
    sequence = Sequence(0, prompt, max_tokens=1)
    scheduler.add(sequence)
    while not sequence.is_finished:
        chunks = scheduler.plan()
        logits = paged.forward(chunks)
        scheduler.done(chunks, {sequence: 5})
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits[0], expected, rtol=0.05, atol=0.05 * expected.abs().max().item())


def test_converting_leaves_the_rotary_frequencies_exact():
    model = decoder("llama")
    frequencies = model.model.rotary_emb.inv_freq.clone()
    paged = PagedModel(model, blocks=FEW, dtype=torch.bfloat16)
    assert model.dtype == paged.cache.dtype == torch.bfloat16
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


def test_how_long_a_sequence_may_be():
    assert PagedModel(decoder("llama"), blocks=FEW).max_tokens == 512
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    assert PagedModel(decoder("llama", rope_parameters=scaled), blocks=FEW).max_tokens == 128
