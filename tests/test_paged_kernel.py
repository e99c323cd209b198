"""The kernel for decode rows, in triton's interpreter: its arithmetic, without a GPU. The device's own is tested in tests/gpu."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

RUN = """
import torch
from gpuworker.generation.paged_kernel import paged_decode
from tests.paged_kernel_cases import CASES, compare
compare(paged_decode, "cpu", torch.float32, 2e-5, lengths=[1, 17, 64, 255, 257], **CASES[{index}])
compare(paged_decode, "cpu", torch.float16, 4e-3, lengths=[16, 65], **CASES[{index}])  # for bfloat16 the interpreter's tl.dot is wrong: it multiplies the bits
"""


@pytest.mark.parametrize("index", [0, 2, 3, 6])
def test_as_each_row_by_itself(index):
    """In a process of its own: triton looks at the variable when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", RUN.format(index=index)], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
