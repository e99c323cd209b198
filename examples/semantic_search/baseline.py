"""What gpuworker replaces: every process owns a model of its own, as transformers has it, and runs one text at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from .fleet import Embed, Way
from .model import MAX_TOKENS, model_directory
from .usage import cores


def own_model(processes: int) -> Way:
    """Each process gets its fair share of the cores as torch threads, at least one."""
    threads = max(1, cores() // processes)

    def load() -> Embed:
        model = OwnModel(threads)
        model.embed("a text, so that the first one that counts finds everything warm")
        return model.embed_all

    return Way(f"{processes} with own models", processes, load)


class OwnModel:
    """Nothing of gpuworker's: its vectors are what the owner's are checked against."""

    def __init__(self, threads: int) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        files = model_directory()
        self.tokenizer = AutoTokenizer.from_pretrained(files, local_files_only=True)
        self.model = AutoModel.from_pretrained(files, dtype=torch.float32, local_files_only=True).eval()

    def embed_all(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        return map(self.embed, texts)

    def embed(self, text: str) -> np.ndarray:
        """Mean of the last layer over the text's tokens, L2-normalised: shape (384,)."""
        import torch

        batch = self.tokenizer([text], truncation=True, max_length=MAX_TOKENS, padding=False, return_tensors="pt")
        with torch.inference_mode():
            mean = self.model(**batch).last_hidden_state[0].mean(0)
            return torch.nn.functional.normalize(mean, dim=0).numpy()
