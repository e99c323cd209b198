"""Hugging Face encoders, served from a directory: texts are tokenised by the clients, token ids come in, one vector per text goes out."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch

from gpuworker.client.tokenizer import entry_of
from gpuworker.execution.encoder_files import EncoderFiles
from gpuworker.execution.handler import TensorHandler
from gpuworker.execution.model_directory import DTYPES
from gpuworker.execution.pretrained import load_whole
from gpuworker.tensors import TensorSpec

PROBE_TOKENS = 6


class HFEncoder(TensorHandler):
    """An encoder (BERT, RoBERTa, MPNet, ...) as transformers or sentence-transformers have saved it; a text in, a float32 vector out.

        gpuworker.Worker(HFEncoder("/models/all-MiniLM-L6-v2"), name="embed")
        gpuworker.connect("embed").submit("some text")  # or int64 ids: {"input_ids": ids}

    directory: with config.json, model.safetensors and tokenizer.json; nothing is downloaded, no code of the model's own is run. A subclass may have it as an
    attribute, so that it can be named as "module:attr". dtype: of weights and computation, "float32" (default), "bfloat16" or "float16"; pooling and answers
    are float32 always. max_length: tokens, to cut texts earlier than the model has to. pooling: "mean" or "cls", normalize: to length 1; both are read from
    the directory by default (without a word there: mean, normalised). device: "cpu", "cuda", "cuda:1"; default: cuda if there is one.
    """

    directory: str | os.PathLike[str] | None = None
    max_length: int | None = None
    pooling: str | None = None
    normalize: bool | None = None

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        dtype: str | None = None,
        max_length: int | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        device: str | None = None,
    ) -> None:
        """The instance travels to its owner as it is here: what is given and no model. Raises ValueError and TypeError; the directory is read by `load`."""
        given = {"directory": directory, "dtype": dtype, "max_length": max_length, "pooling": pooling, "normalize": normalize, "device": device}
        for name, value in given.items():
            if value is not None:
                setattr(self, name, value)
        if self.directory is None:
            raise TypeError("HFEncoder needs the directory of a model: HFEncoder('/models/all-MiniLM-L6-v2')")
        self.directory = os.path.abspath(self.directory)  # a later owner may have another working directory
        if self.dtype not in (None, *DTYPES):
            raise ValueError(f"dtype={self.dtype!r}: choose one of {', '.join(map(repr, DTYPES))}")
        if self.pooling not in (None, "mean", "cls"):
            raise ValueError(f"pooling={self.pooling!r}: choose 'mean' or 'cls'")
        if self.max_length is not None and (isinstance(self.max_length, bool) or not isinstance(self.max_length, int) or self.max_length < 1):
            raise ValueError(f"max_length={self.max_length!r}: give a number of tokens, at least 1")
        self.__qualname__ = f"{type(self).__qualname__}({self.directory})"  # in messages, and for run times that are kept: each model has its own

    def load(self) -> None:
        """Reads tokenizer and model, and tries the model. Raises OSError or ValueError for a directory that cannot be served."""
        files = EncoderFiles.read(self.directory or "")
        longest = min(files.max_length, self.max_length or files.max_length)
        self._tokenizer = entry_of(files.tokenizer, longest, files.lower)
        self._pooling, self._normalize = self.pooling or files.pooling, files.normalize if self.normalize is None else self.normalize
        model = load_whole("AutoModel", files.directory, getattr(torch, self.dtype or "float32"), lambda name: name.startswith("pooler."))
        self._model = model.to(self.resolved_device)
        _check_positions(self._model, longest)
        self._tokenizer["types"] = self._tokenizer["types"] and "token_type_ids" in inspect.signature(self._model.forward).parameters
        config = self._model.config
        vocabulary, types = config.vocab_size, getattr(config, "type_vocab_size", None)
        inputs = {"input_ids": TensorSpec("int64", ("tokens",), pad_value=min(files.pad_id, vocabulary - 1), mask="attention_mask", below=vocabulary)}
        if self._tokenizer["types"]:
            inputs["token_type_ids"] = TensorSpec("int64", ("tokens",), below=types or None)
        self.inputs = inputs
        self.max_extents = {"tokens": longest}
        self.outputs = TensorSpec("float32", (self._try(),))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """int64 [rows, tokens] each -> float32 [rows, hidden]."""
        with torch.inference_mode():
            states = self._model(**batch).last_hidden_state.float()
            if self._pooling == "cls":
                vectors = states[:, 0]
            else:
                mask = batch["attention_mask"].unsqueeze(-1)
                vectors = (states * mask).sum(1) / mask.sum(1).clamp(min=1)  # a row that only fills the batch up has no token
            return torch.nn.functional.normalize(vectors, dim=1) if self._normalize else vectors

    def contract(self) -> dict[str, Any]:
        """What clients need to know: the signature, and how to tokenise."""
        return {**super().contract(), "tokenizer": self._tokenizer}

    def _try(self) -> int:
        """The size of a vector. Raises ValueError for a model whose tokens do not see those after them."""
        ids = torch.arange(PROBE_TOKENS, device=self._model.device).repeat(2, 1) % self._model.config.vocab_size
        ids[1, -1] = 0  # only the last tokens differ
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self._tokenizer["types"]:
            batch["token_type_ids"] = torch.zeros_like(ids)
        with torch.inference_mode():
            states = getattr(self._model(**batch), "last_hidden_state", None)
        if states is None:
            raise ValueError(f"{self.directory}: {type(self._model).__name__} gives no last_hidden_state; an encoder is needed")
        if torch.equal(states[0, 0], states[1, 0]):
            raise ValueError(f"{self.directory}: {type(self._model).__name__} is a decoder-only model; an encoder is needed")
        return int(states.shape[-1])


def _check_positions(model: Any, longest: int) -> None:
    """Raises ValueError where texts may have more tokens than the model has positions: on a GPU that would end its owner."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and hasattr(module, "num_embeddings"):
            positions = module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
            if longest > positions:
                raise ValueError(
                    f"{model.name_or_path}: its texts may have {longest} tokens, and its model has {positions} positions; give max_length={positions}"
                )
