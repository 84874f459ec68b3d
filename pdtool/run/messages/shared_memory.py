"""Channels between two workers of one machine: messages in memory that both see, announced over a socket.

The memory is a file without a name, divided into slots of one message each; it is gone when both workers are, however
they end. Sending copies the tensors into a free slot and says so. What is received is the slot itself, no copy: when
its last tensor is gone the slot goes back to the sender. A sender has half of the slots for messages under way
whatever the receiver keeps: with more than the other half in use, the receiver copies.

      sender   copy into slot 3   (minibatch, 3, bytes) -->   tensors in slot 3   receiver
               slot 3 is free     <-- 3                       the last one is collected
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdtool.run.messages.routes import Route
from pdtool.run.processes.out_of_memory import is_out_of_memory

_HEADER = struct.Struct("<qqq")  # minibatch, slot, bytes
_SLOT = struct.Struct("=H")
_ALIGNMENT_BYTES = 64
_CLOSED = "Connection closed by peer"


class SharedMemory(NamedTuple):
    """Memory that the two workers of a route share, and the socket between them.

    Attributes:
        memory: slots x slot_bytes bytes.
        connection: its timeout is how long a message, or a free slot, is waited for.
    """

    memory: mmap.mmap
    connection: socket.socket


@dataclass(frozen=True)
class SlotLayout:
    """How the memory of a route is divided.

    Attributes:
        depth: messages that the schedule may have under way; there are twice as many slots.
        starts: byte in a slot where each edge's tensor begins, and where the slot ends.
    """

    depth: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, route: Route, batch_size: int, depth: int) -> SlotLayout:
        """Return the layout for minibatches of at most `batch_size` samples."""
        starts = [0]
        for edge in route.edges:
            size = math.prod(edge.shape(batch_size)) * edge.sent_dtype.itemsize
            starts.append(starts[-1] + -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        return cls(depth, (*starts[:-1], max(starts[-1], _ALIGNMENT_BYTES)))

    @property
    def slots(self) -> int:
        """Number of slots."""
        return 2 * self.depth

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.starts[-1]

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes


class SharedMemorySender:
    """Sends through shared memory.

    Args:
        waiting: context that times a wait for a free slot.
    """

    def __init__(
        self, route: Route, layout: SlotLayout, shared: SharedMemory, waiting: AbstractContextManager[None]
    ) -> None:
        self._route, self._layout, self._waiting = route, layout, waiting
        self._connection = shared.connection
        self._memory = torch.frombuffer(shared.memory, dtype=torch.uint8)
        self._free = list(range(layout.slots))[::-1]  # the last one freed is used next: it is in the cache
        self._views: dict[tuple[int, int, torch.Size], Tensor] = {}

    def send(self, minibatch: int, tensors: Sequence[Tensor]) -> int:
        """Copy the tensors into a slot; wait only when the receiver has not yet got what the schedule says it has."""
        try:
            self._take_back_slots()
            slot, size_bytes = self._free.pop(), 0
            for k, tensor in enumerate(tensors):
                view = self._views.get((slot, k, tensor.shape))
                if view is None:
                    view = self._views[slot, k, tensor.shape] = self._view(slot, k, tensor.shape)
                view.copy_(tensor)
                size_bytes += view.nbytes
            self._connection.send(_HEADER.pack(minibatch, slot, size_bytes))
        except OSError as error:
            raise self._route.not_sent(minibatch, _reason(error, self._connection)) from error
        return size_bytes

    def flush(self) -> None:
        """Return at once: what was sent is in memory that outlives this worker."""

    def _take_back_slots(self) -> None:
        """Take back the slots that the receiver has freed; at least one is free afterwards."""
        with suppress(BlockingIOError):
            self._add_free(os.read(self._connection.fileno(), 4096))
        if not self._free:
            with self._waiting:
                self._add_free(self._connection.recv(4096))

    def _add_free(self, slots: bytes) -> None:
        if not slots:
            raise ConnectionError(_CLOSED)
        self._free.extend(slot for (slot,) in _SLOT.iter_unpack(slots))

    def _view(self, slot: int, k: int, shape: torch.Size) -> Tensor:
        """The memory of edge k's tensor in a slot."""
        edge, start, end = self._route.edges[k], self._layout.starts[k], self._layout.starts[k + 1]
        size = shape.numel() * edge.sent_dtype.itemsize
        assert size <= end - start, f"{edge.name}{list(shape)} is too large"
        start += slot * self._layout.slot_bytes
        return self._memory[start : start + size].view(edge.sent_dtype).view(shape)


class SharedMemoryReceiver:
    """Receives through shared memory; the tensors can be written to, and kept."""

    def __init__(self, route: Route, layout: SlotLayout, shared: SharedMemory) -> None:
        self._route, self._layout, self._connection, self._memory = route, layout, shared.connection, shared.memory
        self._lent: dict[int, Any] = {}  # slot -> weak reference to the array that all its tensors refer to
        self._views: dict[int, tuple[int, list[_TensorView]]] = {}

    def expect(self, minibatch: int, samples: int) -> None:
        """Do nothing: a sender does not wait to be asked."""

    def receive(self, minibatch: int, samples: int) -> list[Tensor]:
        """Wait for the announcement of a message and return the tensors in its slot.

        Raises:
            PeerError: the sender is lost, or it sends another message than this one.
        """
        size_bytes, views = self._views.get(samples) or self._views.setdefault(samples, self._message_views(samples))
        try:
            header = self._connection.recv(_HEADER.size)
            if len(header) < _HEADER.size:
                raise ConnectionError(_CLOSED)
        except OSError as error:
            raise self._route.not_received(minibatch, _reason(error, self._connection)) from error
        number, slot, sent_bytes = _HEADER.unpack(header)
        if (number, sent_bytes) != (minibatch, size_bytes):
            raise self._route.not_received(
                minibatch, f"{sent_bytes} bytes of minibatch {number} came, not {size_bytes}"
            )
        return self._tensors(slot, views)

    def _tensors(self, slot: int, views: list[_TensorView]) -> list[Tensor]:
        """Each has a version counter of its own, and refers to one array of the slot, whose end frees it."""
        array = np.frombuffer(self._memory, np.uint8, self._layout.slot_bytes, slot * self._layout.slot_bytes)
        self._lent[slot] = weakref.ref(array, partial(self._give_back, slot))
        tensors = [view.tensor(array) for view in views]
        return [tensor.clone() for tensor in tensors] if len(self._lent) > self._layout.depth else tensors

    def _give_back(self, slot: int, _: Any) -> None:
        del self._lent[slot]
        with suppress(OSError):  # the sender is gone, or this end is closed
            self._connection.send(_SLOT.pack(slot))

    def _message_views(self, samples: int) -> tuple[int, list[_TensorView]]:
        """Bytes and views of a message of so many samples."""
        edges = zip(self._route.edges, self._layout.starts, strict=False)
        views = [_TensorView(start, edge.shape(samples), edge.sent_dtype) for edge, start in edges]
        return sum(view.size_bytes for view in views), views


class _TensorView:
    """One tensor of a message: where it is in the slot, its shape and its dtype."""

    def __init__(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._start, self._shape, self._dtype = start, shape, dtype
        self.size_bytes = math.prod(shape) * dtype.itemsize
        try:
            self._numpy_dtype, self._is_reinterpreted = torch.empty(0, dtype=dtype).numpy().dtype, False
        except TypeError:  # numpy has no bfloat16
            self._numpy_dtype, self._is_reinterpreted = np.dtype(f"i{dtype.itemsize}"), True

    def tensor(self, slot: np.ndarray[Any, Any]) -> Tensor:
        """Return the tensor in the bytes of a slot."""
        tensor = torch.from_numpy(np.ndarray(self._shape, self._numpy_dtype, slot, self._start))
        return tensor.view(self._dtype) if self._is_reinterpreted else tensor


def _reason(error: OSError, connection: socket.socket) -> str:
    """Why a message did not come or go; raises `error` itself where this worker ran out of memory."""
    if is_out_of_memory(error):
        raise error
    if isinstance(error, TimeoutError):
        return f"Timed out waiting {connection.gettimeout():g} s"
    return error.strerror or str(error)
