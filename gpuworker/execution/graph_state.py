"""What a run of a program changes besides its outputs, kept and put back: so that warming up, capturing and comparing leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

State = Callable[[], list[torch.Tensor]]


class Snapshot:
    """The tensors of `state()` and the states of the random number generators (host and device), as they are now in the order of the current stream.

    Python's and numpy's generators, and whatever else a program keeps on the host, are left alone.
    """

    def __init__(self, state: State, device: torch.device, api: Any) -> None:
        self._state, self._device, self._api = state, device, api
        self._host_random = torch.get_rng_state()
        self._device_random = api.get_rng_state(device)
        with torch.inference_mode():
            self._tensors = list(state())
            self._values = [tensor.clone() for tensor in self._tensors]

    def restore(self) -> None:
        """Puts everything back, in place: graphs know tensors by their addresses."""
        torch.set_rng_state(self._host_random)
        self._api.set_rng_state(self._device_random, self._device)
        with torch.inference_mode():
            for tensor, value in zip(self._state(), self._values, strict=False):  # a tensor that has taken another's place gets its value, too
                if tensor.shape == value.shape:
                    tensor.copy_(value)

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """What state was, under names for messages."""
        return {f"buffer {number}": value for number, value in enumerate(self._values)}

    @property
    def is_rebound(self) -> bool:
        """Whether state now lies in other tensors: a graph would go on using the old ones."""
        now = self._state()
        return [tensor.data_ptr() for tensor in now] != [tensor.data_ptr() for tensor in self._tensors]
