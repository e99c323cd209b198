"""Values that are not ours: torch tensors and memory maps become plain arrays, everything else gets a message that says what to send instead."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gpuworker.errors import UnsupportedPayload

PICKLE_ADVICE = ", or start the worker with allow_pickle=True"

# Looked up along the method resolution order, so that no module has to be imported to recognise its classes.
_ADVICE = {
    "collections.abc.Set": "list(value)",
    "builtins.set": "list(value)",
    "builtins.frozenset": "list(value)",
    "builtins.str": "str(value)",
    "builtins.bytes": "bytes(value)",
    "builtins.bytearray": "bytes(value)",
    "builtins.int": "int(value)",
    "builtins.float": "float(value)",
    "builtins.complex": "complex(value)",
    "builtins.dict": "dict(value)",
    "builtins.list": "list(value)",
    "builtins.tuple": "tuple(value)",
    "builtins.range": "list(value)",
    "builtins.generator": "list(value)",
    "builtins.slice": "(value.start, value.stop, value.step)",
    "collections.deque": "list(value)",
    "enum.Enum": "value.value",
    "datetime.date": "value.isoformat() or numpy.datetime64(value)",
    "datetime.time": "value.isoformat()",
    "datetime.timedelta": "value.total_seconds() or numpy.timedelta64(value)",
    "decimal.Decimal": "str(value)",
    "fractions.Fraction": "str(value)",
    "uuid.UUID": "str(value) or value.bytes",
    "pathlib.PurePath": "str(value)",
    "array.array": "numpy.asarray(value)",
    "numpy.record": "value.item()",
    "numpy.ma.MaskedArray": "value.filled(...), or a dict of value.data and value.mask",
    "numpy.ma.core.MaskedArray": "value.filled(...), or a dict of value.data and value.mask",
    "numpy.ndarray": "numpy.asarray(value)",
    "numpy.generic": "value.item()",
    "pandas.core.series.Series": "value.to_numpy()",
    "pandas.core.frame.DataFrame": "{name: column.to_numpy() for name, column in value.items()}",
    "PIL.Image.Image": "numpy.asarray(value), or the encoded file as bytes",
    "msgspec.Struct": "msgspec.to_builtins(value)",
    "pydantic.main.BaseModel": "value.model_dump()",
}


def to_array(value: object) -> np.ndarray[Any, Any]:
    """A plain array of a torch tensor (moved to the CPU) or a memory map. Raises UnsupportedPayload for every other value."""
    if type(value) is np.memmap:
        return value.view(np.ndarray)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
        return _tensor_to_array(value, torch)
    raise refusal(value)


def _tensor_to_array(tensor: Any, torch: Any) -> np.ndarray[Any, Any]:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise UnsupportedPayload(f"a {tensor.layout} torch tensor on {tensor.device} has no plain data: send a dense one, as of tensor.to_dense()")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        array: np.ndarray[Any, Any] = tensor.numpy()
    except TypeError:
        advice = "cast it with tensor.float(), or send its bits with tensor.view(torch.uint16) or tensor.view(torch.uint8)"
        raise UnsupportedPayload(f"numpy has no dtype for {tensor.dtype}: {advice}{PICKLE_ADVICE}") from None
    return array


def refusal(value: object) -> UnsupportedPayload:
    """The error for a value of an unsupported type: what it is, and what to convert it to."""
    kind = type(value)
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    if hasattr(kind, "__dataclass_fields__"):
        advice = "dataclasses.asdict(value)"
    elif issubclass(kind, tuple) and hasattr(kind, "_asdict"):
        advice = "tuple(value) or value._asdict()"
    else:
        advice = next((_ADVICE[name] for name in names if name in _ADVICE), "bytes, str, a numpy array, numbers, or dict, list, tuple of these")
    return UnsupportedPayload(f"{names[0].removeprefix('builtins.')} does not cross processes as it is: send {advice}{PICKLE_ADVICE}")


def too_deep(limit: int) -> UnsupportedPayload:
    """The error for a structure that contains itself or is nested absurdly."""
    return UnsupportedPayload(f"the value contains itself or is nested more than {limit} levels deep: flatten it{PICKLE_ADVICE}")
