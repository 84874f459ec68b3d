"""Channels between two workers of one machine through memory of the host (the protocol: slots.py).

The memory is a file without a name; it is gone when both workers are, however they end.
"""

from __future__ import annotations

import mmap
import socket
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdtool.run.messages.routes import Route
from pdtool.run.messages.slots import SlotLayout, SlotReceiver, SlotSender, TensorView


class SharedMemory(NamedTuple):
    """Memory that the two workers of a route share, and the socket between them.

    Attributes:
        memory: slots x slot_bytes bytes.
        connection: its timeout is how long a message, or a free slot, is waited for.
    """

    memory: mmap.mmap
    connection: socket.socket


class SharedMemorySender(SlotSender):
    """Sends through shared memory.

    Args:
        waiting: context that times a wait for a free slot.
    """

    def __init__(
        self, route: Route, layout: SlotLayout, shared: SharedMemory, waiting: AbstractContextManager[None]
    ) -> None:
        memory = torch.frombuffer(shared.memory, dtype=torch.uint8)
        super().__init__(route, layout, memory, shared.connection, waiting)

    def flush(self) -> None:
        """Return at once: what was sent is in memory that outlives this worker."""


class SharedMemoryReceiver(SlotReceiver):
    """Receives through shared memory."""

    def __init__(self, route: Route, layout: SlotLayout, shared: SharedMemory) -> None:
        super().__init__(route, layout, shared.connection)
        self._memory = shared.memory

    def _open_slot(self, slot: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._memory, np.uint8, self._layout.slot_bytes, slot * self._layout.slot_bytes)

    def _tensor(self, opened: np.ndarray[Any, Any], view: TensorView) -> Tensor:
        tensor = torch.from_numpy(np.ndarray(view.shape, view.numpy_dtype, opened, view.start))
        return tensor.view(view.dtype) if view.is_reinterpreted else tensor
