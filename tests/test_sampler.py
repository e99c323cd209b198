"""From logits to tokens, against numpy and against transformers' own processors."""

import math

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from gpuworker.generation import sampler as module
from gpuworker.generation.sampler import Row, Sampled, Sampler
from gpuworker.sampling import SamplingParams

GRID = 2048
VOCABULARIES = (2, 63, 64, 65, 1000, 5003)


def row(position=0, prompt=(), generated=(), **options):
    return Row(SamplingParams(**{"seed": 0, **options}), position, list(prompt), list(generated))


def measure(logits, monkeypatch, **options):
    """The distribution that is drawn from: how much of [0, 1) each token has, for numbers on a grid."""
    monkeypatch.setattr(module, "uniform", lambda seed, position: (position + 0.5) / GRID)
    ids = {name: options.pop(name, ()) for name in ("prompt", "generated")}
    rows = [row(position, **ids, **options) for position in range(GRID)]
    sampled = Sampler().sample(logits.expand(GRID, -1), rows)
    assert all(one.error is None and one.logprob is None and one.top is None for one in sampled)
    return np.bincount([one.token for one in sampled], minlength=len(logits)) / GRID


def reference(logits, prompt=(), generated=(), temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
              frequency_penalty=0.0, logit_bias=None):  # fmt: skip
    """The distribution in float64, step by step. Cuts are made at a value: what equals the last that is kept is kept."""
    x = logits.float().numpy().astype(np.float64).copy()
    for token in {*prompt, *generated}:
        x[token] = x[token] / repetition_penalty if x[token] > 0 else x[token] * repetition_penalty
    for token in set(generated):
        x[token] -= presence_penalty + frequency_penalty * list(generated).count(token)
    for token, bias in (logit_bias or {}).items():
        x[token] += bias if bias > -100 else -np.inf
    if logit_bias and max(logit_bias.values()) == 100:
        x[[token for token in range(len(x)) if logit_bias.get(token) != 100]] = -np.inf
    p = softmax(x / temperature)
    if top_k:
        p = np.where(x >= np.sort(x)[::-1][min(top_k, len(x)) - 1], p, 0)
        p /= p.sum()
    if top_p < 1:
        falling = np.argsort(-x, kind="stable")
        last = falling[np.searchsorted(np.cumsum(p[falling]), top_p)]
        p = np.where(x >= x[last], p, 0)
        p /= p.sum()
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


def softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def some_logits(vocabulary=50, seed=0, scale=2.0):
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


OPTIONS = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 50},
    {"top_k": 1000},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_p": 0.95, "min_p": 0.1},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -0.3, "presence_penalty": -1},
    {"logit_bias": {0: 2.5, 30: -3.0, 31: -100}},
    {"logit_bias": {4: 100, 9: 100}},
    {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {0: 3, 11: -2},
        "temperature": 0.8,
        "top_k": 25,
        "top_p": 0.9,
    },
]
IDS = {"prompt": [1, 2, 3, 3, 30], "generated": [2, 11, 11, 11, 49]}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_drawn_from_is_what_numpy_computes(options, dtype, monkeypatch):
    for seed in range(2):
        logits = some_logits(seed=seed).to(dtype)
        options = {"temperature": 1.0, **options}
        np.testing.assert_allclose(measure(logits, monkeypatch, **IDS, **options), reference(logits, **IDS, **options), atol=1e-3)


@pytest.mark.parametrize("options", [one for one in OPTIONS if not {"presence_penalty", "frequency_penalty", "logit_bias"} & set(one)], ids=str)
def test_what_is_drawn_from_is_what_transformers_leaves(options, monkeypatch):
    logits = some_logits(seed=4)
    ids = torch.tensor([[*IDS["prompt"], *IDS["generated"]]])
    scores = hf.RepetitionPenaltyLogitsProcessor(options.get("repetition_penalty", 1.0))(ids, logits[None].clone())
    for name, processor in (
        ("temperature", hf.TemperatureLogitsWarper),
        ("top_k", hf.TopKLogitsWarper),
        ("top_p", hf.TopPLogitsWarper),
        ("min_p", hf.MinPLogitsWarper),
    ):
        if name in options:
            scores = processor(options[name])(ids, scores)
    options = {"temperature": 1.0, **options}
    np.testing.assert_allclose(measure(logits, monkeypatch, **IDS, **options), scores.softmax(-1)[0].numpy(), atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 64}, {"top_k": 65}, {"top_k": 700}, {"top_p": 0.3}, {"top_p": 0.99}, {"top_k": 300, "top_p": 0.7, "min_p": 0.3}],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("vocabulary", [5003, 49152])
def test_cuts_are_exact_however_many_tokens_they_leave(options, scale, vocabulary):
    """Among the likeliest that are looked at first and beyond: every token is kept, and is where the sum of its predecessors says."""
    logits = some_logits(vocabulary, seed=7, scale=scale)
    p = reference(logits, **options)
    until = np.cumsum(p)
    sampled = Sampler().sample(logits.expand(20, -1), [row(position, temperature=1.0, **options) for position in range(20)])
    for position, one in enumerate(sampled):
        chance = module.uniform(0, position)
        assert p[one.token] > 0
        assert until[one.token] - p[one.token] - 1e-5 <= chance <= until[one.token] + 1e-5


@pytest.mark.parametrize("scale", [0.01, 0.5, 3.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [65, 1000, 20000])
def test_how_many_are_looked_at_first_changes_nothing(vocabulary, dtype, scale):
    """bfloat16 has many equal logits in the tail, at the cut too."""
    logits = torch.stack([some_logits(vocabulary, seed, scale) for seed in range(8)]).to(dtype)
    for options in ({"top_k": 1}, {"top_k": 50}, {"top_p": 0.05}, {"top_p": 0.6}, {"top_p": 0.999999}, {"top_k": 200, "top_p": 0.9}):
        rows = [row(position, temperature=0.9, **options) for position in range(8)]
        expected = Sampler(vocabulary).sample(logits, rows)
        for candidates in (1, 2, 16, 64, 1024):
            assert Sampler(candidates).sample(logits, rows) == expected


def test_equal_logits_stay_or_go_together(monkeypatch):
    logits = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0, -5.0])
    np.testing.assert_array_equal(measure(logits, monkeypatch, temperature=1.0, top_k=3) > 0, [1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(measure(logits, monkeypatch, temperature=1.0, top_k=2) > 0, [0, 1, 0, 1, 0, 0])
    np.testing.assert_array_equal(measure(logits, monkeypatch, temperature=1.0, top_p=0.8) > 0, [1, 1, 1, 1, 1, 0])
    np.testing.assert_allclose(measure(torch.zeros(200), monkeypatch, temperature=1.0, top_k=1), 1 / 200, atol=1e-3)


@pytest.mark.parametrize("candidates", [1, 3, 4, 64])
def test_cuts_at_equal_logits_and_at_the_very_share_are_exact(candidates):
    """At this temperature logits that are whole numbers have exact probabilities: powers of 2."""
    exact = {"temperature": math.log2(math.e)}
    halves = torch.tensor([-1.0, 0.0, -1.0])
    assert drawn(halves, candidates, top_p=0.5, **exact) == {1}
    assert drawn(halves, candidates, top_p=0.5 + 1e-9, **exact) == {0, 1, 2}
    assert drawn(halves, candidates, min_p=0.5, **exact) == {0, 1, 2}
    assert drawn(halves, candidates, min_p=0.5 + 1e-6, **exact) == {1}
    many = torch.tensor([3.0, 2.0, *[1.0] * 100, *[0.0] * 20])  # 1 + 1/2 + 100 x 1/4 that top-k 3 leaves
    assert drawn(many, candidates, top_k=3, top_p=0.05, **exact) == {0, 1}
    assert drawn(many, candidates, top_k=3, top_p=0.03, **exact) == {0}
    assert drawn(many, candidates, top_k=3, top_p=0.06, **exact) == set(range(102))


def drawn(logits, candidates, **options):
    """All tokens that come up for 1,000 numbers."""
    return {one.token for one in Sampler(candidates).sample(logits.expand(1000, -1), [row(position, **options) for position in range(1000)])}


@pytest.mark.parametrize("vocabulary", [64, 5056, 151936, 1 << 20])
def test_sums_of_weights_are_exact_so_their_order_does_not_matter(vocabulary):
    for scale in (0.0, 0.01, 3.0):
        x = some_logits(vocabulary, scale=scale)[None]
        weights = module._weights(x, x.amax(-1, keepdim=True), torch.ones(1, 1))
        exact = sum(int(weight) for weight in weights[0].tolist())
        assert weights.frac().abs().max() == 0
        assert exact <= 2**52
        assert weights.sum(-1, dtype=torch.float64).item() == weights.flip(-1).cumsum(-1, dtype=torch.float64)[0, -1].item() == exact
        assert weights.max() * vocabulary > 2**51  # and as fine as that allows


def test_a_token_without_probability_is_never_drawn(monkeypatch):
    logits = torch.full((130,), -math.inf)
    logits[[3, 70, 129]] = torch.tensor([0.0, 1.0, 0.5])
    for chance in (0.0, 1 - 2.0**-53):
        monkeypatch.setattr(module, "uniform", lambda seed, position, chance=chance: chance)
        for options in ({}, {"top_k": 2}, {"top_k": 128}, {"top_p": 0.999}, {"min_p": 1e-6}):
            (one,) = Sampler().sample(logits[None], [row(temperature=1.0, **options)])
            assert one.token in (3, 70, 129)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_greedy_is_the_first_of_the_largest(vocabulary, dtype):
    logits = torch.stack([some_logits(vocabulary, seed).to(dtype) for seed in range(12)])
    logits[3] = 0
    logits[4, -1] = logits[4, vocabulary // 2] = 50
    for options in ({}, {"logprobs": 0}, {"temperature": 1e-6, "top_k": 5}):
        sampled = Sampler().sample(logits, [row(seed=None, **options)] * 12)
        assert [one.token for one in sampled] == logits.float().argmax(-1).tolist()
    assert (sampled[3].token, sampled[4].token) == (0, vocabulary // 2)


def test_penalties_count_what_they_say():
    logits = torch.tensor([[2.0, 1.9, 1.8, -1.0]])
    assert greedy(logits, prompt=[0], repetition_penalty=1.2) == 1
    assert greedy(logits, prompt=[0], presence_penalty=2.0, frequency_penalty=2.0) == 0  # the prompt does not count
    assert greedy(logits, generated=[0], presence_penalty=0.15) == 1
    assert greedy(logits, generated=[0, 0, 1], frequency_penalty=0.15) == 2
    assert greedy(logits, generated=[3], presence_penalty=-2.0) == 0
    assert greedy(logits, generated=[3], presence_penalty=-2.0, frequency_penalty=-2.0) == 3
    assert greedy(-logits, prompt=[3], repetition_penalty=3.0) == 3
    assert greedy(torch.tensor([[-1.0, -1.5]]), prompt=[0], repetition_penalty=2.0) == 1  # a negative one is multiplied
    assert (
        greedy(logits, prompt=[0, 4, 10**6, -1], generated=[1, 99], repetition_penalty=1.5, presence_penalty=0.1) == 2
    )  # ids of no token are passed over


def greedy(logits, prompt=(), generated=(), **options):
    (one,) = Sampler().sample(logits, [row(prompt=prompt, generated=generated, **options)])
    assert one.error is None
    return one.token


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("scale", [0.1, 1000.0])
def test_a_bias_of_100_bans_or_forces_whatever_the_logits(temperature, scale):
    logits = (some_logits(50) * scale).expand(200, -1)
    best = logits[0].argmax().item()
    worst = logits[0].argmin().item()
    for bias, allowed in (({best: -100}, set(range(50)) - {best}), ({worst: 100}, {worst}), ({worst: 100, 7: 100.0, 8: 99, best: -100}, {worst, 7})):
        sampled = Sampler().sample(logits, [row(position, temperature=temperature, logit_bias=bias) for position in range(200)])
        assert {one.token for one in sampled} <= allowed
        assert all(one.error is None for one in sampled)


def test_a_bias_is_not_changed_by_penalties():
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    assert greedy(logits, prompt=[0], repetition_penalty=10.0, logit_bias={0: 2.0}) == 0  # 0.1 + 2 > 2


def test_rows_whose_logits_are_no_numbers_fail_alone():
    logits = torch.stack([some_logits(100, seed) for seed in range(7)])
    good = logits.clone()
    logits[1, 99] = math.nan
    logits[2, 0] = math.inf
    logits[3] = -math.inf
    logits[4] = math.nan
    logits[5, :99] = -math.inf
    good[5] = logits[5]
    for options in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "logprobs": 2}, {"repetition_penalty": 1.5}, {"logprobs": 3}):
        rows = [row(position, prompt=[0, 99], **options) for position in range(7)]
        sampled, expected = Sampler().sample(logits, rows), Sampler().sample(good, rows)
        for index in (0, 5, 6):
            assert sampled[index] == expected[index]
            assert sampled[index].error is None
        for index in (1, 2, 3, 4):
            assert sampled[index] == Sampled(-1, error="the model's logits hold NaN or +inf, or nothing that is finite")


def test_rows_whose_params_do_not_fit_fail_alone():
    logits = some_logits(3).expand(6, -1)
    rows = [
        row(),
        row(logit_bias={3: 1.0}),
        row(temperature=1.0, seed=None),
        row(logit_bias={0: -100, 1: -100, 2: -100}),
        row(prompt=[0, 1, 2], repetition_penalty=1e-44),
        row(temperature=1.0, logit_bias={2: -1.0}),
    ]
    sampled = Sampler().sample(logits, rows)
    assert [one.error is None for one in sampled] == [True, False, False, False, False, True]
    assert "token 3, and the model has 3" in sampled[1].error
    assert "no seed" in sampled[2].error
    assert "no token is left" in sampled[3].error
    assert all(one.token == -1 for one in sampled[1:5])
    for index in (0, 5):
        assert [sampled[index]] == Sampler().sample(logits[:1], [rows[index]])


def test_logprobs_are_of_the_models_own_distribution():
    logits = torch.stack([some_logits(1000, seed) for seed in range(4)]).bfloat16()
    own = torch.log_softmax(logits.double(), -1)
    options = {"temperature": 2.0, "top_k": 3, "logit_bias": {5: 100, 6: 100}, "repetition_penalty": 1.5, "prompt": [5]}
    for count in (0, 1, 20):
        for index, one in enumerate(Sampler().sample(logits, [row(position, logprobs=count, **options) for position in range(4)])):
            assert one.token in (5, 6)
            assert one.logprob == pytest.approx(own[index, one.token].item(), abs=1e-5)
            if not count:
                assert one.top is None
                continue
            order = sorted(range(1000), key=lambda token: (-logits[index, token].item(), token))[:count]
            assert [token for token, _ in one.top] == order
            assert [logprob for _, logprob in one.top] == pytest.approx(own[index, order].tolist(), abs=1e-5)


def test_no_logprob_is_given_of_what_cannot_be():
    logits = torch.tensor([[0.0, -math.inf, 1.0, 1.0]])
    (one,) = Sampler().sample(logits, [row(logprobs=20)])
    assert [token for token, _ in one.top] == [2, 3, 0]
    assert one.token == 2
    assert one.logprob == one.top[0][1] == one.top[1][1] == pytest.approx(math.log(math.e / (2 * math.e + 1)))
    (certain,) = Sampler().sample(torch.tensor([[-math.inf, 3.0]]), [row(logprobs=1)])
    assert certain == Sampled(1, 0.0, [(1, 0.0)])
