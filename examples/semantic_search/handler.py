"""The handler that the owner runs: MiniLM sentence embeddings, on the CPU."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from gpuworker.execution.encoder import HFEncoder

from .model import model_directory

PASS_COST_TOKENS = 32  # one pass through the model costs, besides its tokens, about as much as 32 more: it reads 40 MB of weights


class MiniLM(HFEncoder):
    """Texts in, L2-normalised float32 vectors of 384 numbers out. What `gpuworker serve --hf-encoder DIR` serves, with a name for gunicorn.conf.py.

    `forward` is there for the CPU's sake, which has no use for a full batch of one shape: it runs several passes, each with hardly any padding. On a GPU leave
    it to HFEncoder.
    """

    directory = model_directory()
    device = "cpu"  # so that the comparison with a model in every process is one on equal terms

    def load(self) -> None:
        super().load()
        self.threads = len(os.sched_getaffinity(0))
        # Passes side by side, each on one core. The other way, one pass on several cores, has them wait for each other between any two operations.
        self.pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        lengths = batch["attention_mask"].sum(1).tolist()
        texts = [row for row, length in enumerate(lengths) if length > 1]  # the other rows only fill the batch up: a text has two special tokens
        split = [[texts[i] for i in chosen] for chosen in passes([lengths[row] for row in texts], self.threads)]

        def run_pass(rows: list[int]) -> torch.Tensor:
            longest = lengths[rows[0]]
            return super(MiniLM, self).forward({name: array[rows, :longest] for name, array in batch.items()})

        vectors = torch.zeros(len(lengths), self.outputs.shape[0])
        for rows, found in zip(split, self.pool.map(run_pass, split), strict=True):
            vectors[rows] = found
        return vectors


def passes(lengths: list[int], threads: int) -> list[list[int]]:
    """Splits a batch into passes, longest texts first: enough for all threads, and each with less padding than a pass of its own would cost.

    Within 4 % of the cheapest split on the demo's texts; one pass for all costs up to three times as much.
    """
    most_tokens = max(sum(lengths) / threads, 2 * PASS_COST_TOKENS)
    split: list[list[int]] = []
    padding = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        longest = lengths[split[-1][0]] if split else 0
        padding += longest - lengths[i]
        if split and padding <= PASS_COST_TOKENS and longest * (len(split[-1]) + 1) <= most_tokens:
            split[-1].append(i)
        else:
            split.append([i])
            padding = 0
    return split
