"""What kind of error it is, and what is said before a device is used."""

from types import SimpleNamespace

import pytest
import torch

from gpuworker.execution.failures import Failure, check_device, check_memory, first_cause, kind_of


def coded(text, code):
    error = torch.AcceleratorError(text)
    error.error_code = code
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        coded("CUDA error: speicher voll", 2),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
)
def test_out_of_memory(error):
    assert kind_of(error) is Failure.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("CUDA error: misaligned address"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("CUDA error: unknown error"),
        coded("CUDA error: etwas anderes", 700),
        coded("CUDA error: etwas anderes", 719),
    ],
)
def test_device_lost(error):
    assert kind_of(error) is Failure.DEVICE_LOST


@pytest.mark.parametrize(
    "error",
    [
        ValueError("illegal memory access"),
        RuntimeError("the user's own: illegal instruction in request 7"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
        coded("CUDA error: operation failed due to a previous error during capture", 901),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        coded("CUDA error: invalid configuration argument", 9),
        KeyError("x"),
        KeyboardInterrupt(),
    ],
)
def test_ordinary(error):
    assert kind_of(error, lambda: None) is Failure.ORDINARY


def fails():
    raise torch.AcceleratorError("CUDA error: again")


def test_a_doubtful_error_of_the_device_is_decided_by_synchronising():
    doubtful = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`")
    assert kind_of(doubtful) is Failure.ORDINARY
    assert kind_of(doubtful, lambda: None) is Failure.ORDINARY
    assert kind_of(doubtful, fails) is Failure.DEVICE_LOST


def test_nobody_synchronises_for_errors_that_have_nothing_to_do_with_the_device():
    for error in (ValueError("x"), RuntimeError("shapes"), torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")):
        assert kind_of(error, lambda: pytest.fail("asked")) is Failure.ORDINARY


def raised(cause, text="wrapped"):
    try:
        try:
            raise cause
        except Exception as error:
            raise ValueError(text) from error
    except ValueError as error:
        return error


def test_an_error_is_what_it_was_raised_from():
    assert kind_of(raised(torch.OutOfMemoryError("CUDA out of memory"))) is Failure.OUT_OF_MEMORY
    assert kind_of(raised(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))) is Failure.DEVICE_LOST
    assert kind_of(raised(KeyError("x"))) is Failure.ORDINARY


def test_first_cause_ends_with_rings():
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    assert first_cause(first) is second


def cuda(count, available=True):
    return SimpleNamespace(is_available=lambda: available and count > 0, device_count=lambda: count)


def built():
    return True


@pytest.mark.parametrize(
    ("name", "count", "found"),
    [
        (None, 0, "cpu"),
        (None, 2, "cuda:0"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_devices_are_found(name, count, found):
    assert check_device(name, cuda(count), built) == torch.device(found)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cpu:1", "", "CUDA", "cuda:1:2"])
def test_unknown_names_are_refused(name):
    with pytest.raises(RuntimeError, match="is not known; write 'cpu', 'cuda' or 'cuda:1'"):
        check_device(name, cuda(2), built)


def test_a_torch_without_cuda_is_named():
    with pytest.raises(RuntimeError, match=r"built without CUDA; install one .* or use device='cpu'"):
        check_device("cuda", cuda(0), lambda: False)
    assert check_device(None, cuda(0), lambda: False) == torch.device("cpu")


def test_no_device_says_where_to_look(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(RuntimeError, match=r"no CUDA device is there .*nvidia-smi"):
        check_device("cuda", cuda(0), built)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES is ''"):
        check_device("cuda:0", cuda(0), built)
    with pytest.raises(RuntimeError, match="no CUDA device is there"):
        check_device("cuda:0", cuda(3, available=False), built)


def test_an_index_out_of_range_says_what_there_is():
    with pytest.raises(RuntimeError, match="no such device; only cuda:0 is there"):
        check_device("cuda:1", cuda(1), built)
    with pytest.raises(RuntimeError, match="cuda:0 to cuda:3 are there"):
        check_device("cuda:4", cuda(4), built)


def test_this_torch_s_own_answer():
    if torch.cuda.is_available():
        assert check_device("cuda") == torch.device("cuda:0")
    else:
        with pytest.raises(RuntimeError, match="device 'cuda'"):
            check_device("cuda")


def test_too_little_memory_names_numbers_and_options():
    api = SimpleNamespace(mem_get_info=lambda device: (100 << 20, 200 << 20))
    device = torch.device("cuda:0")
    check_memory(30 << 20, 2, 40 << 20, device, api)
    with pytest.raises(RuntimeError) as caught:
        check_memory(31 << 20, 2, 40 << 20, device, api)
    text = str(caught.value)
    for part in ("cuda:0", "102.0 MiB", "2 x 31.0 MiB", "40.0 MiB", "100.0 MiB of 200.0 MiB", "max_batch_size", "pipeline_depth", "cuda_graphs"):
        assert part in text
    with pytest.raises(RuntimeError) as caught:
        check_memory(200 << 20, 1, 0, device, api)
    assert "pipeline_depth" not in str(caught.value)
    assert "cuda_graphs" not in str(caught.value)
