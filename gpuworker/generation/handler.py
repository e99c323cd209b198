"""GenerationHandler: a model that generates, served step by step."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpuworker.execution.failures import Failure, check_device, kind_of
from gpuworker.execution.model_directory import check_weights, read_json
from gpuworker.execution.pretrained import load_whole
from gpuworker.generation.blocks import BlockPool
from gpuworker.generation.engine import Engine
from gpuworker.generation.files import check_given, check_kind
from gpuworker.generation.gate import max_tokens
from gpuworker.generation.graphs import DecodeGraphs
from gpuworker.generation.loop import GenerationLoop
from gpuworker.generation.model import BLOCK_TOKENS, PagedModel, bytes_per_token
from gpuworker.generation.sampler import Row, Sampler
from gpuworker.generation.scheduler import Scheduler
from gpuworker.worker.options import WorkerOptions

if TYPE_CHECKING:
    from gpuworker.segment import Segment
    from gpuworker.worker.exchange import Exchange
    from gpuworker.worker.runner import Loop

log = logging.getLogger("gpuworker")

BATCH_TOKENS = 512
NOT_FOR_GENERATION = (
    "latency_budget_ms", "max_wait_ms", "length_buckets", "max_length", "allowed_batch_sizes", "late", "wait", "admission", "pipeline_depth",
    "priority_ageing_ms", "target_miss_rate", "cost_file", "max_length_buckets",
)  # fmt: skip
CPU_CACHE_BYTES = 1 << 30
GPU_SHARE = 0.8
"""Of the device's memory that is free once the model is there, for keys and values."""


class GenerationHandler:
    """Any decoder of Hugging Face whose attention can be replaced (see model.py), from a directory as transformers has saved it.

        gpuworker.Worker(GenerationHandler("/models/SmolLM2-135M-Instruct"), name="llm")
        gpuworker.connect("llm").generate("The capital of France is", max_tokens=8).text

    directory: config.json, model.safetensors, tokenizer.json, and chat_template.jinja or tokenizer_config.json where it chats; nothing is downloaded, no code of the
    model's own is run. dtype: "float32", "bfloat16" or "float16"; default: as saved. device: "cpu", "cuda", "cuda:1"; default: cuda if there is one.
    max_model_tokens: of one prompt and its answer; default: what the model was made for. kv_cache_bytes: for keys and values; default: most of what is free on
    a GPU, 1 GiB on the CPU. prefix_caching: beginnings that two requests share are computed once. cuda_graphs: on a GPU, steps that only decode are replayed as
    CUDA graphs (see graphs.py); the worker's option of the same name goes before.
    The worker's max_batch_size is how many sequences take part in a step, its max_batch_tokens how many tokens (default: 512).
    """

    directory: str | os.PathLike[str] | None = None
    dtype: str | None = None
    device: str | None = None
    max_model_tokens: int | None = None
    kv_cache_bytes: int | None = None
    prefix_caching: bool = True
    cuda_graphs: bool = True

    _options: WorkerOptions | None = None
    _engine: Engine | None = None
    _paged: PagedModel | None = None
    _graphs: DecodeGraphs | None = None

    def __init__(self, directory: str | os.PathLike[str] | None = None, **given: Any) -> None:
        """The instance travels to its owner as it is here: what is given and no model. Raises TypeError and ValueError saying what to give."""
        unknown = given.keys() - {"dtype", "device", "max_model_tokens", "kv_cache_bytes", "prefix_caching", "cuda_graphs"}
        if unknown:
            raise TypeError(f"GenerationHandler knows no {sorted(unknown)[0]}=")
        vars(self).update({name: value for name, value in {"directory": directory, **given}.items() if value is not None})
        if self.directory is None:
            raise TypeError("GenerationHandler needs the directory of a model: GenerationHandler('/models/SmolLM2-135M-Instruct')")
        check_given(self)
        self.directory = os.path.abspath(self.directory)
        self.__qualname__ = f"{type(self).__qualname__}({self.directory})"

    def load(self) -> None:
        """Reads the model. Raises OSError or ValueError for a directory that cannot be served."""
        root = Path(str(self.directory))
        if not (root / "config.json").is_file():
            raise FileNotFoundError(f"{root} is no directory of a model: there is no config.json in it")
        check_kind(root, read_json(root / "config.json"))
        check_weights(root)
        model = load_whole("AutoModelForCausalLM", str(root), getattr(torch, self.dtype) if self.dtype else "auto")
        device = self.resolved_device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels of Triton are launched on the current one
        self._model = model.to(device)

    def prepare(self) -> None:
        """After `load`: sizes the cache and makes the engine. Raises RuntimeError and ValueError saying what is too small, or not supported."""
        options = self._options or WorkerOptions()
        config = self._model.config
        longest = min(limit for limit in (self.max_model_tokens, max_tokens(config), 1 << 20) if limit)
        budget = self._free_bytes() if self.kv_cache_bytes is None else self.kv_cache_bytes
        per_token = bytes_per_token(self._model)
        blocks = max(budget // (per_token * BLOCK_TOKENS), 0)
        if blocks < 2:
            raise RuntimeError(
                f"kv_cache_bytes={budget:,}: one block of {BLOCK_TOKENS} tokens takes {per_token * BLOCK_TOKENS:,}, and two are the least"
            )
        blocks = min(blocks, 1 + options.max_batch_size * -(-longest // BLOCK_TOKENS))
        longest = min(longest, (blocks - 1) * BLOCK_TOKENS)
        eos = getattr(self._model.generation_config, "eos_token_id", None)
        self._eos_ids = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]
        self._longest, self._vocabulary = longest, config.get_text_config().vocab_size
        scheduler = Scheduler(
            BlockPool(blocks, BLOCK_TOKENS),
            max_batch_tokens=max(options.max_batch_tokens or BATCH_TOKENS, options.max_batch_size),
            max_running=options.max_batch_size,
            max_model_tokens=longest,
            eos_ids=self._eos_ids,
            prefix_caching=self.prefix_caching,
        )
        paged = PagedModel(self._model, blocks=blocks, dtype=self._model.dtype, device=self.resolved_device)
        self._paged = paged
        wants_graphs = self.cuda_graphs if options.cuda_graphs is None else options.cuda_graphs
        if wants_graphs and paged.cache.device.type == "cuda":
            self._graphs = DecodeGraphs(paged, max_rows=options.max_batch_size, max_tokens=longest)
            self._graphs.capture_next()  # the largest: if it cannot be done, this is when to hear of it
        self._engine = Engine(scheduler, self._graphs or paged, Sampler(), Row, _is_fatal, isolate_errors=options.isolate_errors)
        size_mib = blocks * BLOCK_TOKENS * per_token / 2**20
        log.info(
            "%s: the cache has room for %d tokens, in %d blocks (%.1f MiB)", self.__qualname__, (blocks - 1) * BLOCK_TOKENS, blocks - 1, size_mib
        )

    def _free_bytes(self) -> int:
        device = self.resolved_device
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE) if device.type == "cuda" else CPU_CACHE_BYTES

    @property
    def resolved_device(self) -> torch.device:
        """The device that the model is on. Raises RuntimeError saying what is missing."""
        return check_device((self._options.device if self._options else None) or self.device)

    def configure(self, options: WorkerOptions | None) -> None:
        """The worker's options, before `load`. Raises ValueError for those that are about batches of whole requests."""
        default = WorkerOptions()
        for option in NOT_FOR_GENERATION:
            if options is not None and getattr(options, option) != getattr(default, option):
                raise ValueError(f"{option}: a worker that generates forms its batches anew for every token, and has no use for it; leave it out")
        self._options = options

    def contract(self) -> dict[str, Any]:
        """What clients have to know, as plain data."""
        return {
            "generation": {
                "directory": self.directory,
                "eos_ids": self._eos_ids,
                "vocabulary": self._vocabulary,
                "max_model_tokens": self._longest,
                "priorities": bool(self._options and self._options.priorities),
            }
        }

    def make_loop(self, segment: Segment, exchange: Exchange) -> Loop:
        """See worker/runner.py."""
        assert self._engine is not None
        priorities = bool(self._options and self._options.priorities)
        return GenerationLoop(self._engine, segment, exchange, self.__qualname__, self._vocabulary, priorities, self._graphs)

    def close(self) -> None:
        """The worker ends."""
        if self._graphs is not None:
            self._graphs.close()
        if self._paged is not None:
            self._paged.close()


def _is_fatal(error: Exception) -> bool:
    return kind_of(error) is Failure.DEVICE_LOST
