"""From logits to tokens: no row has anything to do with another."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuworker.generation.sampler import Sampler
from tests.test_sampler import VOCABULARIES, row, some_logits

specs = st.fixed_dictionaries(
    {"seed": st.integers(0, 5), "position": st.integers(0, 9)},
    optional={
        "temperature": st.sampled_from([0.2, 1.0, 3.0]),
        "top_k": st.sampled_from([1, 3, 40, 300]),
        "top_p": st.sampled_from([0.1, 0.9, 0.9999]),
        "min_p": st.sampled_from([0.01, 0.5]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.7]),
        "frequency_penalty": st.sampled_from([-1.0, 0.7]),
        "logit_bias": st.dictionaries(st.integers(0, 2), st.sampled_from([-100.0, -2.0, 5.0, 100.0]), min_size=1),
        "logprobs": st.sampled_from([0, 3]),
        "prompt": st.lists(st.integers(0, 1), max_size=4),
        "generated": st.lists(st.integers(0, 1), max_size=4),
    },
)
kinds = st.tuples(st.integers(0, 3), st.sampled_from(["float32", "bfloat16", "flat", "peaked", "masked", "nan", "inf"]))


def logits_of(kind, vocabulary):
    seed, shape = kind
    x = some_logits(vocabulary, seed, {"flat": 0.05, "peaked": 15.0}.get(shape, 2.0))
    if shape == "bfloat16":
        x = x.bfloat16().float()
    if shape == "masked":
        x[::3] = -math.inf
    if shape in ("nan", "inf"):
        x[vocabulary // 2] = float(shape)
    return x


@settings(deadline=None, max_examples=150)
@given(vocabulary=st.sampled_from(VOCABULARIES), batch=st.lists(st.tuples(specs, kinds), min_size=1, max_size=9))
def test_every_row_gets_exactly_what_it_gets_alone(vocabulary, batch):
    logits = torch.stack([logits_of(kind, vocabulary) for _, kind in batch])
    before = logits.clone()
    rows = [row(**options) for options, _ in batch]
    sampled = Sampler().sample(logits, rows)
    assert torch.equal(torch.nan_to_num(logits), torch.nan_to_num(before))
    for index, one in enumerate(sampled):
        assert [one] == Sampler().sample(logits[index : index + 1].clone(), [rows[index]])
    assert sampled[::-1] == Sampler().sample(logits.flip(0), rows[::-1])


@pytest.mark.parametrize("vocabulary", [49152, 50257, 151936])
def test_neither_the_batch_nor_the_threads_matter_at_the_sizes_of_real_models(vocabulary):
    logits = torch.stack([some_logits(vocabulary, seed, 1.0 + seed / 4) for seed in range(12)])
    options = [
        {},
        {"top_p": 0.9},
        {"top_k": 50, "min_p": 0.01},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 2.0, "top_p": 0.99, "logprobs": 0},
    ]
    rows = [row(index, **{"temperature": 1.0, **options[index % len(options)]}) for index in range(12)]
    together = Sampler().sample(logits, rows)
    assert together == [one for index in range(12) for one in Sampler().sample(logits[index][None], rows[index : index + 1])]
    torch.set_num_threads(2)
    assert together == Sampler().sample(logits, rows)
    assert together == [one for index in range(12) for one in Sampler().sample(logits[index][None], rows[index : index + 1])]


def toy_model(ids, vocabulary=300):
    """Logits that depend on all the tokens so far."""
    return some_logits(vocabulary, seed=hash(tuple(ids)) % 10**6)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 20, "repetition_penalty": 1.2, "frequency_penalty": 0.5}], ids=str)
def test_a_seed_gives_the_same_text_alone_in_company_elsewhere_and_after_a_restart(options):
    def generate(generated=(), mates=lambda step: 0, until=24):
        prompt, generated = [3, 1, 4], list(generated)
        while len(generated) < until:
            own = row(len(prompt) + len(generated), prompt, generated, temperature=1.0, **{**options, "seed": 11})
            count = mates(len(generated))
            others = [row(50 - step, [step], temperature=0.1 + step, seed=step) for step in range(count)]
            at = count // 2
            rows = [*others[:at], own, *others[at:]]
            logits = torch.stack([toy_model([*one.prompt, *one.generated]) for one in rows])
            generated.append(Sampler().sample(logits, rows)[at].token)
        return generated

    alone = generate()
    assert len(set(alone)) > 5
    assert generate(mates=lambda step: 6) == alone
    assert generate(mates=lambda step: step % 5) == alone
    for kept in (1, 7, 23):
        assert generate(alone[:kept], mates=lambda step: 3) == alone


def test_the_same_seed_twice_in_a_batch_gives_the_same_and_another_gives_another():
    logits = some_logits(1000).expand(300, -1)
    rows = [row(position % 100, temperature=1.0, seed=position // 200) for position in range(300)]
    tokens = [one.token for one in Sampler().sample(logits, rows)]
    assert tokens[:100] == tokens[100:200] != tokens[200:]


def test_there_may_be_no_rows_and_there_must_be_as_many_as_logits():
    assert Sampler().sample(torch.zeros(0, 5), []) == []
    for shape, count in (((2, 5), 1), ((5,), 5), ((1, 0), 1), ((1, 2, 5), 1)):
        with pytest.raises(ValueError, match=r"give \[rows, vocabulary\]"):
            Sampler().sample(torch.zeros(shape), [row()] * count)


def test_logits_may_lie_anyhow():
    logits = torch.stack([some_logits(130, seed) for seed in range(6)])
    rows = [row(position, temperature=1.0, top_p=0.9, logprobs=1) for position in range(6)]
    expected = Sampler().sample(logits, rows)
    assert Sampler().sample(logits.t().contiguous().t(), rows) == expected
    wide = torch.zeros(6, 200)
    wide[:, 30:160] = logits
    assert Sampler().sample(wide[:, 30:160], rows) == expected
    assert Sampler().sample(logits.requires_grad_(), rows) == expected
