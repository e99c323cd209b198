"""What a GenerationHandler can be made with, and what `gpuworker serve` makes of sizes."""

import argparse
import pathlib
import re

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from gpuworker.cli.numbers import size_bytes
from gpuworker.generation.handler import GenerationHandler


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"directory": None}, TypeError, "GenerationHandler needs the directory of a model"),
        ({"directory": 5}, TypeError, "directory=5: give the path of a model's directory"),
        ({"directory": ""}, TypeError, "directory='': give the path"),
        ({"directory": b"/m"}, TypeError, "directory=b'/m': give the path"),
        ({"dtype": "int8"}, ValueError, "dtype='int8': give one of 'float32', 'bfloat16', 'float16', or None: as saved"),
        ({"dtype": torch.float16}, ValueError, "dtype=torch.float16: give one of 'float32'"),
        ({"device": 0}, TypeError, "device=0: give a str, as in 'cpu', 'cuda' or 'cuda:1'"),
        *(
            ({"max_model_tokens": value}, ValueError, f"max_model_tokens={value!r}: give how many tokens, as an integer of at least 1, or None")
            for value in (0, -3, "512", 2.5, True)
        ),
        *(
            ({"kv_cache_bytes": value}, ValueError, f"kv_cache_bytes={value!r}: give how many bytes, e.g. 2 * 1024**3, as an integer of at least 1")
            for value in (0, -1, "2GB", 1e9, False)
        ),
        ({"prefix_caching": 1}, ValueError, "prefix_caching=1: give True or False"),
        ({"cuda_graphs": "no"}, ValueError, "cuda_graphs='no': give True or False"),
        ({"max_running": 4}, TypeError, "GenerationHandler knows no max_running="),
    ],
    ids=str,
)
def test_what_it_cannot_be_made_with(given, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        GenerationHandler(**({"directory": "/m"} | given))


def test_classes_of_ones_own_are_checked_too():
    class Mine(GenerationHandler):
        directory = "/m"
        kv_cache_bytes = "2GB"

    with pytest.raises(ValueError, match="kv_cache_bytes='2GB'"):
        Mine()


def test_what_it_can_be_made_with():
    made = GenerationHandler(pathlib.Path("/m"), dtype="bfloat16", device="cpu", max_model_tokens=np.int64(1), kv_cache_bytes=1, cuda_graphs=False)
    assert (made.directory, made.max_model_tokens, made.cuda_graphs, made.prefix_caching) == ("/m", 1, False, True)
    assert GenerationHandler("/m", dtype=None, kv_cache_bytes=None, prefix_caching=None).prefix_caching is True


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 65536), ("0", 0), ("1k", 1000), ("1KiB", 1024), ("512MiB", 512 << 20), ("2GiB", 2 << 30), ("2 GiB", 2 << 30), ("2GB", 2 * 10**9),
        ("2g", 2 * 10**9), ("1.5GiB", 3 << 29), ("7b", 7), ("1TiB", 1 << 40), ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_sizes(text, size):
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2XB", "-1", "1e9", "2iB", "1,000", "٣", "2GiBs"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="give a number of bytes, or of another unit, as in 512MiB, 2GiB or 2GB"):
        size_bytes(text)
