"""Tensors are accepted wherever an array is, and arrive as arrays."""

from __future__ import annotations

import numpy as np
import pytest

from gpuworker.errors import UnsupportedPayload
from gpuworker.payload import encode
from tests.payload_area import Area, assert_same

torch = pytest.importorskip("torch")


def test_tensors_arrive_as_arrays() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    for tensor in (
        base,
        base.T,
        base[::2, 1::2],
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.ones(3, dtype=torch.bool),
        base.to(torch.complex64).conj(),
    ):
        expected = tensor.resolve_conj().numpy().copy()
        assert_same(Area(tensor).decode(True), expected)
        assert_same(Area({"x": tensor}).decode(True), {"x": expected})


def test_gradients_do_not_matter() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert_same(Area(parameter).decode(True), np.ones(3, np.float32))
    assert_same(Area(parameter * 2).decode(True), np.full(3, 2, np.float32))


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.zeros(10_000)
    data = encode(tensor)[2]
    tensor[0] = 1
    assert bytes(data[0:4]) == np.float32(1).tobytes() if isinstance(data, bytes) else data[3] == b"\x3f"


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_dtypes_numpy_lacks_are_refused_with_advice(dtype: str) -> None:
    tensor = torch.zeros(3, dtype=getattr(torch, dtype))
    for value in (tensor, [tensor]):
        with pytest.raises(UnsupportedPayload, match=rf"{dtype}.*float\(\).*allow_pickle=True"):
            encode(value)


def test_tensors_without_plain_data_are_refused() -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.zeros(3, device="meta")):
        with pytest.raises(UnsupportedPayload, match="dense"):
            encode(tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_are_moved() -> None:
    tensor = torch.arange(5, device="cuda")
    assert_same(Area(tensor).decode(True), np.arange(5))
    assert_same(Area([tensor]).decode(True), [np.arange(5)])
