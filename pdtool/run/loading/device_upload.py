"""Copies of loaded tensors to a GPU, on a stream of their own beside the kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class DeviceUpload:
    """Copies the tensors of one minibatch after another to a device: `start`, and later `finish`.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies: dict[str, Tensor] = {}

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """Start the copies.

        The memory of those in pinned memory is not used for something else before they are copied: torch's allocator
        of pinned memory knows of the copies.

        Args:
            tensors: by name, in the CPU's memory, of any shapes.
        """
        pinned = {name: tensor if tensor.is_pinned() else tensor.pin_memory() for name, tensor in tensors.items()}
        with torch.cuda.stream(self._stream):
            self._copies = {name: tensor.to(self._device, non_blocking=True) for name, tensor in pinned.items()}

    def finish(self) -> dict[str, Tensor]:
        """Return the copies, by name; kernels that are started from now on see them."""
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._stream)
        for tensor in self._copies.values():
            tensor.record_stream(compute)  # whose kernels read what was allocated for the other stream
        copies, self._copies = self._copies, {}
        return copies
