"""Channels between two workers of one machine through memory of a GPU (CUDA IPC; the protocol: slots.py).

The slots are memory of the receiver's GPU, which the sender has mapped; both workers may be on one GPU. The hosts
announce slots over their socket as soon as copies are enqueued, and the devices wait for each other by events:

      sender's device    wait for freed[3] ─▶ copy into slot 3 ─▶ record written[3]
      receiver's device                       wait for written[3] ─▶ kernels that read slot 3 ─▶ record freed[3]

A device waits only for events that were recorded before its host was told, so that it never waits for what another
host has yet to do. No kernel waits, and nothing needs a communicator.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdtool.run.messages.routes import Route
from pdtool.run.messages.slots import SlotLayout, SlotReceiver, SlotSender, TensorView

SPARE_SLOTS = 2  # what the receiver may not keep: one is written while another one is on its way back


class DeviceMemory(NamedTuple):
    """Memory of a GPU that the two workers of a route share, and the socket between them.

    Attributes:
        memory: slots x slot_bytes bytes, as a tensor of this worker's device.
        connection: its timeout is how long a message, or a free slot, is waited for.
        written: of each slot, an event that the sender records.
        freed: of each slot, an event that the receiver records.
    """

    memory: Tensor
    connection: socket.socket
    written: list[torch.cuda.Event]
    freed: list[torch.cuda.Event]


class CudaIpcSender(SlotSender):
    """Copies into memory of the receiver's GPU, on a stream of its own beside the kernels.

    Args:
        waiting: context that times a wait for a free slot.
    """

    def __init__(
        self, route: Route, layout: SlotLayout, shared: DeviceMemory, waiting: AbstractContextManager[None]
    ) -> None:
        super().__init__(route, layout, shared.memory, shared.connection, waiting)
        self._shared, self._device = shared, shared.memory.device
        self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._under_way: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    def flush(self) -> None:
        """Wait until everything is in the receiver's memory."""
        if self._under_way:
            self._under_way[-1][0].synchronize()
        self._under_way.clear()

    def _next_slot(self) -> int:
        """Take the slot that was freed first: the receiver's device is most likely done with it."""
        return self._free.pop(0)

    def _copy(self, slot: int, views: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Enqueue the copies; the tensors are kept until they are read."""
        while self._under_way and self._under_way[0][0].query():  # type: ignore[no-untyped-call]
            self._under_way.popleft()
        sources = [_pinned(tensor) for tensor in tensors]
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        self._copies.wait_event(self._shared.freed[slot])
        with torch.cuda.stream(self._copies):
            for view, source in zip(views, sources, strict=True):
                view.copy_(source, non_blocking=True)
        self._shared.written[slot].record(self._copies)
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record(self._copies)
        self._under_way.append((read, sources))


class CudaIpcReceiver(SlotReceiver):
    """Receives through memory of this worker's GPU: kernels that are started later see the tensors."""

    def __init__(self, route: Route, layout: SlotLayout, shared: DeviceMemory) -> None:
        super().__init__(route, layout, shared.connection)
        self._shared, self._device = shared, shared.memory.device
        self._compute = torch.cuda.current_stream(self._device)  # also of the threads that backwards run in
        self._error: RuntimeError | None = None

    def receive(self, minibatch: int, samples: int) -> list[Tensor]:
        """Wait for the announcement of a message; the device waits for its copy. Raises as SlotReceiver does."""
        if self._error:
            raise self._error
        return super().receive(minibatch, samples)

    def _tensors(self, slot: int, views: list[TensorView]) -> list[Tensor]:
        self._compute.wait_event(self._shared.written[slot])
        return super()._tensors(slot, views)

    def _open_slot(self, slot: int) -> _Slot:
        return _Slot(self._shared.memory.data_ptr() + slot * self._layout.slot_bytes)

    def _tensor(self, opened: _Slot, view: TensorView) -> Tensor:
        tensor = torch.as_tensor(_DeviceArray(opened, view), device=self._device)
        return tensor.view(view.dtype) if view.is_reinterpreted else tensor

    def _give_back(self, slot: int, collected: Any) -> None:
        """Free a slot once the kernels that were started until now are done."""
        try:
            self._shared.freed[slot].record(self._compute)
        except RuntimeError as error:  # which Python would only print: a tensor's end is no place for errors
            self._error = error
        super()._give_back(slot, collected)


class _Slot:
    """A slot that was received, at its address on the device."""

    def __init__(self, address: int) -> None:
        self.address = address


class _DeviceArray:
    """The bytes of a tensor, as torch.as_tensor takes them; the tensor's memory keeps the slot alive."""

    def __init__(self, slot: _Slot, view: TensorView) -> None:
        self._slot = slot
        self.__cuda_array_interface__ = {
            "shape": view.shape,
            "typestr": view.numpy_dtype.str,
            "data": (slot.address + view.start, False),  # False: it may be written to
            "version": 2,
        }


def _pinned(tensor: Tensor) -> Tensor:
    """What the first stage loaded, in pinned memory, from which a copy does not make the host wait."""
    return tensor if tensor.is_cuda else tensor.pin_memory()
