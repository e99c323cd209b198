"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, and an inverse CDF over what is left.

A row's token depends on its logits and its `Row`, never on the rows beside it, on its place among them, on the number of threads or on a generator's state. Sums of
floats would break this, as their rounding depends on the order in which a kernel of this batch size happens to add. So probabilities are whole numbers here, as many
bits long as leave every sum below 2**53: float64 adds them exactly, in any order.

The cuts are made in transformers' order (generation/utils.py, `_get_logits_processor`: temperature, top-k, top-p, min-p, each on what the one before has left); vLLM
(v1/sample/sampler.py) has min-p before the other two. Penalties are vLLM's: repetition over prompt and generated tokens, the other two over generated ones; the bias
comes after them, so that it is added to the very logit that is used. A cut is a smallest logit: equal ones stay or go together, as in transformers' top-k, and do
not depend on how a sort orders them. What is left is drawn from in the order of token ids.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpuworker.sampling import BANNED, FORCED, SamplingParams, uniform

_BLOCK = 64
"""Rows are searched in two steps, which block and where in it; all are padded to whole blocks with -inf."""

_TILE = 1 << 19
"""How many logits are worked on at a time on the CPU: some megabytes."""

_LOG2_E = math.log2(math.e)


class Row(NamedTuple):
    """What one row of logits is for: the token at `position` of the sequence with these ids so far. The ids are only looked at where there are penalties."""

    params: SamplingParams
    position: int
    prompt: Sequence[int]
    generated: Sequence[int]


class Sampled(NamedTuple):
    """The token of one row, or why there is none (`error`; then token is -1).

    logprob: the token's log-probability; top: the likeliest tokens', (token, logprob), best first, equal ones by id, impossible ones left out. Both are of the
    model's own distribution, before temperature, penalties and cuts, as in OpenAI's API; None if not asked for.
    """

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    error: str | None = None


class Sampler:
    """Chooses tokens. It keeps no state between calls.

    candidates: how many of the likeliest tokens are looked at first for where top-k and top-p cut; where that is too few, the whole row is. It changes the time
    taken and nothing else. None: 64 on the CPU, 1024 elsewhere.
    """

    def __init__(self, candidates: int | None = None) -> None:
        self._candidates = candidates

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
        """The next token of each row. logits: [rows, vocabulary], of any floating dtype, on any device; they are not changed. A row whose logits hold NaN or +inf
        or nothing finite, or whose params do not fit the vocabulary, gets an error in place of a token. ValueError if there are not as many `rows`."""
        if logits.dim() != 2 or len(logits) != len(rows) or not logits.shape[1]:
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(rows)} rows: give [rows, vocabulary]")
        # Rows do not depend on each other, so on the CPU they are taken a few at a time, for the sake of its caches.
        count = max(1, _TILE // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(rows))
        return [one for start in range(0, len(rows), count) for one in self._sample(logits[start : start + count], rows[start : start + count])]

    def _sample(self, logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
        vocabulary = logits.shape[1]
        x = _in_blocks(logits)
        if all(row.params.is_plain for row in rows):
            tokens, peaks = _likeliest(x)
            return [Sampled(token) if math.isfinite(peak) else _failed(_NOT_FINITE) for token, peak in zip(tokens, peaks, strict=True)]
        errors = [_misfit(row, vocabulary) if math.isfinite(peak) else _NOT_FINITE for row, peak in zip(rows, x.amax(-1).tolist(), strict=True)]
        edited = x
        to_edit = [index for index, row in enumerate(rows) if row.params.edits and not errors[index]]
        if to_edit:
            edited = x.clone()
            _edit(edited, vocabulary, [(index, rows[index]) for index in to_edit])
            for index, peak in zip(to_edit, _rows_of(edited, to_edit).amax(-1).tolist(), strict=True):
                if not math.isfinite(peak):
                    errors[index] = "after penalties and logit_bias no token is left that could be chosen; ban fewer, or make the penalties smaller"

        tokens = [-1] * len(rows)
        chosen = [index for index, error in enumerate(errors) if not error]
        greedy = [index for index in chosen if rows[index].params.is_greedy]
        if greedy:
            for index, token in zip(greedy, _likeliest(_rows_of(edited, greedy))[0], strict=True):
                tokens[index] = token
        drawn = [index for index in chosen if not rows[index].params.is_greedy]
        if drawn:
            for index, token in zip(drawn, self._draw(_rows_of(edited, drawn), vocabulary, [rows[index] for index in drawn]), strict=True):
                tokens[index] = token

        results = [Sampled(token) if not error else _failed(error) for token, error in zip(tokens, errors, strict=True)]
        told = [index for index in chosen if rows[index].params.logprobs >= 0]
        if told:
            counts = [rows[index].params.logprobs for index in told]
            for index, (logprob, top) in zip(told, _logprobs(_rows_of(x, told), [tokens[index] for index in told], counts), strict=True):
                results[index] = Sampled(tokens[index], logprob, top)
        return results

    def _draw(self, x: Tensor, vocabulary: int, rows: Sequence[Row]) -> list[int]:
        """Tokens by chance, for rows that have something finite and nothing that is NaN or +inf."""
        params = [row.params for row in rows]
        peaks = x.amax(-1, keepdim=True)
        factors = _column([_LOG2_E / one.temperature for one in params], x)
        weights = _weights(x, peaks, factors)
        top_k = [one.top_k if 0 < one.top_k < vocabulary else 0 for one in params]
        if any(top_k) or any(one.top_p < 1 for one in params):
            floors = self._floors(x, weights, peaks, factors, top_k, [one.top_p for one in params])
            weights.mul_(torch.ge(x, floors, out=torch.empty_like(x)))
        if any(one.min_p for one in params):
            floors = _column([one.min_p * _scale(x) for one in params], x)
            weights.mul_(torch.ge(weights, floors, out=torch.empty_like(x)))
        chances = _column([uniform(row.params.seed or 0, row.position) for row in rows], x, torch.float64)
        tokens: list[int] = _inverse_cdf(weights, chances).tolist()
        return tokens

    def _floors(self, x: Tensor, weights: Tensor, peaks: Tensor, factors: Tensor, top_k: list[int], top_p: list[float]) -> Tensor:
        """The smallest logit of each row that top-k and top-p leave, [rows, 1]; -inf where both are off."""
        width = x.shape[1]
        count = min(self._candidates or (64 if x.device.type == "cpu" else 1024), width)
        best = _largest(x, count)
        last = best[:, -1:]
        k, p = _column(top_k, x, torch.int64), _column(top_p, x, torch.float64)

        kth = torch.where(k > 0, best.gather(1, (k - 1).clamp(0, count - 1)), -math.inf)
        best_weights = _weights(best, peaks, factors, _scale(x)) * (best >= kth)
        sums = best_weights.cumsum(-1, dtype=torch.float64)
        totals = torch.where(k > 0, sums[:, -1:], weights.sum(-1, keepdim=True, dtype=torch.float64))
        place = (sums < p * totals).sum(-1, keepdim=True)
        nucleus = torch.where(p < 1, best.gather(1, place.clamp(max=count - 1)), -math.inf)
        floors = torch.maximum(kth, nucleus)
        if count == width:
            return floors
        # What equals the last candidate, or is beyond it, has not been seen: the cut must lie above. With top-k that is enough, since top-p looks at no more.
        is_known = torch.where(k > 0, kth, nucleus) > last
        is_off = (k == 0) & (p == 1)
        for index in (~(is_known | is_off)).flatten().nonzero().flatten().tolist():
            floors[index, 0] = _floor(x[index], weights[index], factors[index, 0].item(), top_k[index], top_p[index])
        return floors


_NOT_FINITE = "the model's logits hold NaN or +inf, or nothing that is finite"


def _failed(error: str) -> Sampled:
    return Sampled(-1, error=error)


def _misfit(row: Row, vocabulary: int) -> str | None:
    """Why these params cannot be used with this vocabulary."""
    params = row.params
    if not params.is_greedy and params.seed is None:
        return "no seed: whoever makes the request is to draw one"
    if params.logit_bias and max(params.logit_bias) >= vocabulary:
        return f"logit_bias is for token {max(params.logit_bias)}, and the model has {vocabulary} tokens"
    return None


def _in_blocks(logits: Tensor) -> Tensor:
    """As contiguous float32, padded to whole blocks with -inf."""
    x = logits.float()
    padding = -x.shape[1] % _BLOCK
    return torch.nn.functional.pad(x, (0, padding), value=-math.inf) if padding else x.contiguous()


def _rows_of(x: Tensor, indices: list[int]) -> Tensor:
    return x if len(indices) == len(x) else x.index_select(0, torch.tensor(indices, device=x.device))


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(like.device)[:, None]


def _likeliest(x: Tensor) -> tuple[list[int], list[float]]:
    """Where each row is largest (the first of equals), and how large. In two steps, as `amax` is vectorised on the CPU and `argmax` is not."""
    blocks = x.view(len(x), -1, _BLOCK)
    largest = blocks.amax(-1)
    block = largest.argmax(-1, keepdim=True)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK)).squeeze(1)
    return (block * _BLOCK + inside.argmax(-1, keepdim=True)).flatten().tolist(), largest.gather(1, block).flatten().tolist()


def _largest(x: Tensor, count: int) -> Tensor:
    """The `count` largest of each row, in falling order. They are in the `count` blocks whose largest are largest, which are fewer to search."""
    blocks = x.view(len(x), -1, _BLOCK)
    if blocks.shape[1] > count:
        found = blocks.amax(-1).topk(count, -1, sorted=False).indices
        x = blocks.gather(1, found[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    return x.topk(count, -1).values


def _scale(x: Tensor) -> float:
    """The weight of the likeliest token: a power of 2, so that a row of such weights adds up to 2**52 at the most."""
    return 2.0 ** (52 - (x.shape[-1] - 1).bit_length())


def _weights(x: Tensor, peaks: Tensor, factors: Tensor, scale: float | None = None) -> Tensor:
    """Probabilities in proportion to the likeliest token's, as whole numbers. factors: log2(e) / temperature. exp2, as it is faster than exp on the CPU."""
    return x.sub(peaks).mul_(factors).exp2_().mul_(_scale(x) if scale is None else scale).round_()


def _inverse_cdf(weights: Tensor, chances: Tensor) -> Tensor:
    """The first token of each row at which the sum of weights exceeds the share `chances` of the whole. The sums are exact: two steps find what one would."""
    blocks = weights.view(len(weights), -1, _BLOCK)
    of_block = blocks.sum(-1, dtype=torch.float64)
    until = of_block.cumsum(-1)
    total = until[:, -1:]
    target = torch.minimum((chances * total).floor(), total - 1)
    block = torch.searchsorted(until, target, right=True)
    before = until.gather(1, block) - of_block.gather(1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK)).squeeze(1).cumsum(-1, dtype=torch.float64)
    return (block * _BLOCK + torch.searchsorted(inside, target - before, right=True)).flatten()


def _floor(x: Tensor, weights: Tensor, factor: float, top_k: int, top_p: float) -> float:
    """As `_floors`, for one row, from all of it. A sort of everything is dear: halving says between which logits the cut is, and only those are sorted."""
    kept = torch.empty_like(x)
    floor = x.topk(top_k).values[-1].item() if top_k else -math.inf
    if top_p == 1:
        return floor
    if top_k:
        weights = weights * torch.ge(x, floor, out=kept)
    total = weights.sum(dtype=torch.float64).item()
    goal = top_p * total
    # Tokens less likely than the mean of the 1 - top_p that may go are not needed: the cut is above them (by half of that, against rounding).
    peak = x.amax().item()
    low = peak + math.log2((1 - top_p) * total / (2 * len(x) * _scale(x))) / factor
    high, above, middle = math.inf, 0.0, peak
    for _ in range(10):
        mass = torch.ge(x, middle, out=kept).mul_(weights).sum(dtype=torch.float64).item()
        if mass >= goal:
            low = middle
        else:
            high, above = middle, mass
        middle = (low + high) / 2
    between = ((x >= low) & (x < high)).nonzero().flatten()
    falling, order = x[between].sort(descending=True)
    sums = weights[between][order].cumsum(-1, dtype=torch.float64) + above
    return falling[(sums < goal).sum()].item()


class _Changes:
    """What is to be done to single logits: their places in the flattened batch, each once, and a number for each."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._numbers: list[float] = []

    def add(self, places: list[int], numbers: list[float]) -> None:
        self._places += places
        self._numbers += numbers

    def __bool__(self) -> bool:
        return bool(self._places)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Places and numbers (float32)."""
        return torch.tensor(self._places, device=device), torch.tensor(self._numbers, dtype=torch.float32, device=device)


def _edit(x: Tensor, vocabulary: int, edits: list[tuple[int, Row]]) -> None:
    """Penalties, then biases, in place. An id that the vocabulary has not (a placeholder in a prompt) has no logit to be penalised."""
    divided, lowered, raised = _Changes(), _Changes(), _Changes()
    forced: list[int] = []
    for index, (params, _, prompt, generated) in edits:
        start = index * x.shape[1]
        if params.repetition_penalty != 1:
            places = [start + token for token in {*prompt, *generated} if 0 <= token < vocabulary]
            divided.add(places, [params.repetition_penalty] * len(places))
        if params.presence_penalty or params.frequency_penalty:
            counts = {token: count for token, count in Counter(generated).items() if 0 <= token < vocabulary}
            lowered.add(
                [start + token for token in counts], [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
            )
        if params.logit_bias:
            biases = params.logit_bias
            if max(biases.values()) >= FORCED:
                forced.append(index)
                biases = {token: bias for token, bias in biases.items() if bias >= FORCED}
            raised.add([start + token for token in biases], [bias if bias > BANNED else -math.inf for bias in biases.values()])
    flat = x.view(-1)
    if divided:
        at, numbers = divided.tensors(x.device)
        logits = flat[at]
        flat[at] = torch.where(logits > 0, logits / numbers, logits * numbers)
    if lowered:
        at, numbers = lowered.tensors(x.device)
        flat[at] -= numbers
    if raised:
        at, numbers = raised.tensors(x.device)
        logits = flat[at] + numbers
        if forced:
            x[torch.tensor(forced, device=x.device)] = -math.inf
        flat[at] = logits


def _logprobs(x: Tensor, tokens: list[int], counts: list[int]) -> list[tuple[float, list[tuple[int, float]] | None]]:
    """Of the chosen tokens, and of each row's `counts` likeliest (None for 0)."""
    peaks = x.amax(-1, keepdim=True)
    totals = (_weights(x, peaks, x.new_full((len(x), 1), _LOG2_E)).sum(-1, dtype=torch.float64) / _scale(x)).tolist()
    logits = x.gather(1, torch.tensor(tokens, device=x.device)[:, None]).flatten().tolist()
    results: list[tuple[float, list[tuple[int, float]] | None]] = []
    for row, peak, total, logit, count in zip(x, peaks.flatten().tolist(), totals, logits, counts, strict=True):
        spread = math.log(total)
        top = [(token, value - peak - spread) for token, value in _top(row, count)] if count else None
        results.append((logit - peak - spread, top))
    return results


def _top(row: Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` largest of a row that are finite: (index, value), falling, equal ones by index."""
    least = row.topk(min(count, len(row))).values[-1]
    indices = ((row >= least) & (row > -math.inf)).nonzero().flatten()
    pairs = sorted(zip(indices.tolist(), row[indices].tolist(), strict=True), key=lambda pair: -pair[1])  # stable: indices rise
    return pairs[:count]
