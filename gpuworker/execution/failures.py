"""What kind of error a device has raised, and what is checked before it is used, so that the errors at start say what to do."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Failure(enum.Enum):
    """What an error means for the batches after it."""

    OUT_OF_MEMORY = "out of memory"
    """A smaller batch may do."""
    DEVICE_LOST = "device lost"
    """Nothing runs on the device any more in this process (a sticky CUDA error): only another process helps."""
    ORDINARY = "ordinary"
    """The batch's own affair."""


# cudaError_t, of driver_types.h. Sticky are those of which it says that "the process must be terminated and relaunched", and those of a device that is gone.
_OUT_OF_MEMORY_CODES = {2}
_STICKY_CODES = {46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 802, 810, 999}

_OUT_OF_MEMORY = re.compile(
    r"CUDA error: out of memory|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|can't allocate memory", re.I
)
_STICKY = re.compile(
    r"illegal memory access|device-side assert|unspecified launch failure|illegal instruction|misaligned address|launch timed out"
    r"|uncorrectable (ECC|NVLink) error|hardware stack error|invalid program counter|operation not supported on global/shared address space"
    r"|context is destroyed|GPU is lost|fallen off the bus|CUDA error: unknown error",
    re.I,
)
_CAPTURE = re.compile(r"captur", re.I)
_OF_THE_DEVICE = re.compile(r"CUDA|cuBLAS|cuDNN|CUBLAS_STATUS|CUDNN_STATUS|cuSPARSE|cuFFT|cuSOLVER|NVRTC|Triton", re.I)


def kind_of(error: BaseException, synchronize: Callable[[], None] | None = None) -> Failure:
    """What `error`, or what it came from, means. synchronize: waits for the device; asked where the text leaves it in doubt whether the device still works,
    because after a sticky error every call fails.
    """
    is_doubtful = False
    for cause in causes(error):
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
            return Failure.OUT_OF_MEMORY
        if not isinstance(cause, RuntimeError):
            continue
        code, text = getattr(cause, "error_code", None), str(cause)
        if code in _STICKY_CODES or (_STICKY.search(text) and _is_of_the_device(cause)):
            return Failure.DEVICE_LOST
        if code in _OUT_OF_MEMORY_CODES or _OUT_OF_MEMORY.search(text):
            return Failure.OUT_OF_MEMORY
        is_doubtful = is_doubtful or (_is_of_the_device(cause) and not _CAPTURE.search(text))
    if is_doubtful and synchronize is not None:
        try:
            synchronize()
        except Exception:
            return Failure.DEVICE_LOST
    return Failure.ORDINARY


def _is_of_the_device(error: BaseException) -> bool:
    return isinstance(error, torch.AcceleratorError) or bool(_OF_THE_DEVICE.search(str(error)))


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, what that was raised from, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def first_cause(error: BaseException) -> BaseException:
    """Where a chain of errors began: what ends a capture is only followed by errors about a capture that was ended."""
    return list(causes(error))[-1]


def check_device(name: str | None, api: Any = torch.cuda, is_built: Callable[[], bool] = torch.backends.cuda.is_built) -> torch.device:
    """The device of this name: "cpu", "cuda", "cuda:1"; None: cuda if there is one, else cpu. Raises RuntimeError saying what is missing.

    api, is_built: what knows about CUDA.
    """
    if name is None:
        return torch.device("cuda", 0) if is_built() and api.is_available() else torch.device("cpu")
    found = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", name)
    if not found or (found[1] == "cpu" and found[2]):
        raise RuntimeError(f"device {name!r} is not known; write 'cpu', 'cuda' or 'cuda:1', or leave it out")
    if found[1] == "cpu":
        return torch.device("cpu")
    index = int(found[2] or 0)
    if not is_built():
        raise RuntimeError(
            f"device {name!r}: this torch ({torch.__version__}) is built without CUDA; install one that has it (https://pytorch.org/get-started), "
            "or use device='cpu'"
        )
    count = api.device_count() if api.is_available() else 0
    if not count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "see whether nvidia-smi shows one" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
        raise RuntimeError(f"device {name!r}: no CUDA device is there ({hint}); make one visible to this process, or use device='cpu'")
    if index >= count:
        there = "only cuda:0 is" if count == 1 else f"cuda:0 to cuda:{count - 1} are"
        raise RuntimeError(f"device {name!r}: there is no such device; {there} there")
    return torch.device("cuda", index)


def check_memory(lane_bytes: int, depth: int, static_bytes: int, device: torch.device, api: Any = torch.cuda) -> None:
    """Raises RuntimeError if the inputs of the grid's largest batches do not fit into the device's free memory.

    lane_bytes: of one lane's inputs, which there are `depth` of. static_bytes: of the inputs that all graphs share.
    """
    free_bytes, total_bytes = api.mem_get_info(device)
    needed_bytes = lane_bytes * depth + static_bytes
    if needed_bytes > free_bytes:
        lower = ["max_batch_size", "max_extents"] + ["pipeline_depth"] * (depth > 1) + ["cuda_graphs (False)"] * bool(static_bytes)
        raise RuntimeError(
            f"too little memory on {device}: the inputs of the largest batches take {_mib(needed_bytes)} ({depth} x {_mib(lane_bytes)} of the pipeline, "
            f"{_mib(static_bytes)} of the CUDA graphs), and {_mib(free_bytes)} of {_mib(total_bytes)} are free; lower {' or '.join(lower)}"
        )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
