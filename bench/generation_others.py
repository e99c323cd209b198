"""Engines that take part where somebody has installed them: vllm and llama.cpp (llama-cpp-python). Each runs in a process of its own, with one thread."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from generation_work import Subject

from examples.llm_chat.work import Request

VLLM, LLAMA_CPP = "vllm", "llama.cpp, one by one"
PACKAGES = {VLLM: "vllm", LLAMA_CPP: "llama_cpp"}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


class Other:
    """One of them."""

    def __init__(self, label: str, subject: Subject, slots: int) -> None:
        self.label = label
        self._process = subprocess.Popen(
            [sys.executable, __file__, label, subject.directory, subject.gguf or "", subject.dtype, str(slots)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
        )

    def run(self, requests: Sequence[Request]) -> dict[str, Any]:
        """A record, or one with an "error"."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([list(request) for request in requests]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return {"error": f"its process ended with status {self._process.wait()}"}
        tokens, seconds, cpu_s = json.loads(line)
        return {"tokens": tokens, "raw_tokens": tokens, "seconds": seconds, "cpu_s": cpu_s}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def installed(subject: Subject, slots: int) -> Iterator[list[Other]]:
    """Those that can take part."""
    with ExitStack() as stack:
        found = []
        for label, package in PACKAGES.items():
            if importlib.util.find_spec(package) is not None and (label != LLAMA_CPP or subject.gguf):
                found.append(Other(label, subject, slots))
                stack.callback(found[-1].close)
        yield found


def _vllm(directory: str, dtype: str, slots: int) -> Any:
    from vllm import LLM, SamplingParams

    model = LLM(model=directory, dtype=dtype, max_num_seqs=slots, max_model_len=8192)

    def run(requests: list[tuple[list[int], int]]) -> int:
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        outputs = model.generate(
            prompts, [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for _, tokens in requests], use_tqdm=False
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def _llama_cpp(gguf: str) -> Any:
    from llama_cpp import Llama

    model = Llama(gguf, n_ctx=8192, n_threads=1, n_threads_batch=1, verbose=False)

    def run(requests: list[tuple[list[int], int]]) -> int:
        for ids, tokens in requests:
            made = model.generate(ids, temp=0.0)
            for _ in range(tokens):
                next(made)
        return sum(tokens for _, tokens in requests)

    return run


def _main(label: str, directory: str, gguf: str, dtype: str, slots: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = _vllm(directory, dtype, int(slots)) if label == VLLM else _llama_cpp(gguf)
    run([([1, 2, 3], 4)])
    for line in sys.stdin:
        began_s, before_s = time.monotonic(), _cpu_s()
        tokens = run(json.loads(line))
        answers.write(json.dumps([tokens, time.monotonic() - began_s, _cpu_s() - before_s]) + "\n")
        answers.flush()


def _cpu_s() -> float:
    """Of this process and those under it: vllm's engine is one."""
    import psutil

    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


if __name__ == "__main__":
    _main(*sys.argv[1:])
