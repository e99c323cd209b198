"""What transformers itself makes of the same requests, with one thread: batches that are padded and run to the end of their longest answer (static), its own
continuous batching, and each request alone, which is what answers are checked against.

A process of its own, for which the parent needs no torch: `Rivals(directory)` starts it, and it runs what it is asked to, one thing after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .work import Request

STATIC, CONTINUOUS, ALONE = "static", "continuous", "alone"
PAGE_TOKENS = 16


class Outcome(NamedTuple):
    """tokens: the answers, of just as many tokens as were asked for. raw_tokens: what was computed for that, the rows of a batch whose answers were over
    already included. None where it cannot be known."""

    tokens: list[list[int]]
    prompt_tokens: list[int]
    seconds: float
    cpu_s: float
    raw_tokens: int | None

    @property
    def count(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.tokens))


class Rivals:
    """The process. Raises RuntimeError when it ends before it has answered."""

    def __init__(self, directory: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
        )

    def run(self, way: str, requests: Sequence[Request], *, dtype: str, slots: int = 16) -> Outcome:
        """way: STATIC, CONTINUOUS or ALONE. slots: rows of a batch."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([way, [list(request) for request in requests], dtype, slots]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of transformers has ended ({self._process.wait()})")
        return Outcome(*json.loads(line))

    def __enter__(self) -> Rivals:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def static(model: Any, requests: Sequence[tuple[list[int], int]], slots: int) -> tuple[list[list[int]], int]:
    """As they come, `slots` at a time, padded on the left; each batch until its longest answer is there."""
    import torch

    found, raw = [], 0
    for first in range(0, len(requests), slots):
        batch = requests[first : first + slots]
        longest, most = max(len(ids) for ids, _ in batch), max(tokens for _, tokens in batch)
        ids = torch.tensor([[0] * (longest - len(ids)) + ids for ids, _ in batch])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in batch])
        rows = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False)[:, longest:].tolist()
        found += [row[:tokens] for row, (_, tokens) in zip(rows, batch, strict=True)]
        raw += most * len(batch)
    return found, raw


def continuous(model: Any, requests: Sequence[tuple[list[int], int]], slots: int) -> tuple[list[list[int]], None]:
    """transformers' ContinuousBatchingManager with pages of 16 tokens and room for all that `slots` requests can hold."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    most = max(len(ids) + tokens for ids, tokens in requests)
    config = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=slots * (-(-most // PAGE_TOKENS) + 1) + 8,
        max_batch_tokens=512,
        max_requests_per_batch=slots,
        use_cuda_graph=False,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=most)
    found: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, warmup=False, timeout=5
    ) as manager:
        names = [manager.add_request(ids, max_new_tokens=tokens, eos_token_id=-1) for ids, tokens in requests]
        while len(found) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                found[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching has ended")
    return [found[name] for name in names], None


def alone(model: Any, requests: Sequence[tuple[list[int], int]], slots: int) -> tuple[list[list[int]], int]:
    """One by one."""
    return static(model, requests, 1)


WAYS: dict[str, Callable[[Any, Sequence[tuple[list[int], int]], int], tuple[list[list[int]], int | None]]] = {
    STATIC: static,
    CONTINUOUS: continuous,
    ALONE: alone,
}


def _main(directory: str) -> None:
    """Answers on what stdout was; whatever a library prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    models: dict[str, Any] = {}
    tokenizer: Any = None
    for line in sys.stdin:
        way, requests, dtype, slots = json.loads(line)
        if dtype not in models:
            models.clear()  # one at a time
            model = models[dtype] = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), local_files_only=True).eval()
            model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
            static(model, [([1, 2, 3], 4)], 1)  # the first one that counts finds everything warm
        if tokenizer is None and not all(isinstance(prompt[0], int) for prompt, _ in requests):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        asked = [(prompt if isinstance(prompt[0], int) else _ids(tokenizer, prompt), tokens) for prompt, tokens in requests]
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        tokens, raw = WAYS[way](models[dtype], asked, slots)
        outcome = Outcome(tokens, [len(ids) for ids, _ in asked], time.monotonic() - began_s, time.process_time() - began_cpu_s, raw)
        answers.write(json.dumps(outcome) + "\n")
        answers.flush()


def _ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


if __name__ == "__main__":
    _main(sys.argv[1])
