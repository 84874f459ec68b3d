"""Messages in slots of memory that two workers of one machine share, announced through pipes.

The memory is divided into slots of one message each. The sender copies the parts into a free slot and announces it. The
receiver gets the slot itself, without a copy: when its last tensor is gone, the slot goes back to the sender. The
receiver may keep as many slots as the schedule has messages under way. Beyond that it copies, so that the sender always
has slots.

      sender   copy into slot 3   (minibatch, 3, bytes) -->   tensors in slot 3   receiver
               slot 3 is free     <-- 3                       the last one is collected

`shared_memory.py` has the slots in memory of the host, `cuda_ipc.py` in that of a GPU.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import select
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdtool.runtime.messages.routes import Part, Receiver, Route, Sender

_HEADER = struct.Struct("<qqq")  # minibatch, slot, bytes
_SLOT = struct.Struct("=H")
_ALIGNMENT_BYTES = 64
_SLICE_S = 1.0  # of a wait; a process that is stopped (Ctrl-Z) loses at most one of them


@dataclass(frozen=True)
class SlotLayout:
    """How the memory of a route is divided.

    Attributes:
        depth: messages that the schedule may have under way, and slots that the receiver may keep.
        slots: number of slots.
        starts: byte offset of each part in a slot, and of the slot's end.
    """

    depth: int
    slots: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, route: Route, batch_size: int, depth: int, spare: int) -> SlotLayout:
        """Return the layout for minibatches of at most `batch_size` samples, with `spare` slots besides `depth`."""
        starts = [0]
        for part in route.parts(batch_size):
            size = math.prod(part.shape) * part.dtype.itemsize
            starts.append(starts[-1] + -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        return cls(depth, depth + spare, (*starts[:-1], max(starts[-1], _ALIGNMENT_BYTES)))

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.starts[-1]

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes


class SlotPipes:
    """One worker's ends of the two pipes of a route, one in each direction.

    Each has room for a record of every slot, so that no worker waits until the other reads. A socket does not: it
    counts a record of two bytes as three kilobytes, and is full after 70.

    Args:
        incoming, outgoing: descriptors to read from and to write to, which this object closes.

    Attributes:
        timeout_s: limit of the wait for a record.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.descriptors = (incoming, outgoing)
        self.timeout_s = 0.0
        os.set_blocking(incoming, False)
        self._poll = select.poll()
        self._poll.register(incoming, select.POLLIN)

    def write(self, record: bytes) -> None:
        """Write at once. Raises OSError: the other worker is gone."""
        os.write(self.descriptors[1], record)

    def read(self, size: int) -> bytes:
        """Wait for a record, and return those that have come, up to `size` bytes.

        Raises:
            TimeoutError: none came.
            ConnectionError: the other worker is gone.
        """
        left_s = self.timeout_s
        while not (records := self.read_now(size)):
            if left_s <= 0:
                raise TimeoutError(f"Timed out waiting {self.timeout_s:g} s")
            if not self._poll.poll(1e3 * min(left_s, _SLICE_S)):
                left_s -= _SLICE_S
        return records

    def read_now(self, size: int) -> bytes:
        """Return the records that have come, up to `size` bytes.

        Raises:
            ConnectionError: the other worker is gone.
        """
        try:
            records = os.read(self.descriptors[0], size)
        except BlockingIOError:
            return b""
        if not records:
            raise ConnectionError("Connection closed by peer")
        return records

    def close(self) -> None:
        """Close both; the other worker reads what was written before."""
        for descriptor in self.descriptors:
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptors = (-1, -1)

    __del__ = close


def open_pipes(slots: int) -> tuple[SlotPipes, SlotPipes]:
    """Open the pipes of a route and return its two ends.

    Raises:
        OSError: the system allows no more pipes, or none of this size.
    """
    there, back = os.pipe(), os.pipe()
    ends = SlotPipes(back[0], there[1]), SlotPipes(there[0], back[1])  # which close themselves after an error
    pages = 1 + -(-slots // (mmap.PAGESIZE // _HEADER.size))  # one may be partly read
    for _, written in (there, back):
        if fcntl.fcntl(written, fcntl.F_GETPIPE_SZ) < pages * mmap.PAGESIZE:
            fcntl.fcntl(written, fcntl.F_SETPIPE_SZ, pages * mmap.PAGESIZE)
    return ends


class SlotSender(Sender, ABC):
    """Sends through slots.

    Args:
        memory: bytes of all slots, as this worker sees them.
        pipes: to the receiver; their timeout limits the wait for a free slot.
        waiting: context that times a wait for a free slot.
    """

    _next_free = -1  # take the slot that was freed last, because it is in the cache

    def __init__(
        self, route: Route, layout: SlotLayout, memory: Tensor, pipes: SlotPipes, waiting: AbstractContextManager[None]
    ) -> None:
        self._route, self._layout, self._memory, self._waiting = route, layout, memory, waiting
        self._pipes = pipes
        self._free = list(range(layout.slots))[::-1]
        self._views: dict[tuple[int, int, torch.Size], Tensor] = {}

    def send(self, minibatch: int, parts: Sequence[Tensor]) -> int:
        """Copy the parts into a slot; wait only if the receiver is behind the schedule."""
        try:
            self._take_back_slots()
            slot, views, size_bytes = self._free.pop(self._next_free), [], 0
            for k, part in enumerate(parts):
                view = self._views.get((slot, k, part.shape))
                if view is None:
                    view = self._views[slot, k, part.shape] = self._view(slot, k, part.shape)
                views.append(view)
                size_bytes += view.nbytes
            self._copy(slot, views, parts)
            self._pipes.write(_HEADER.pack(minibatch, slot, size_bytes))
        except OSError as error:
            raise self._route.not_sent(minibatch, error) from error
        return size_bytes

    def _copy(self, slot: int, views: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Copy each part to its place in the slot, which converts it to its dtype there."""
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)

    def _take_back_slots(self) -> None:
        """Take back the slots that the receiver has freed; at least one is free afterwards."""
        freed = self._pipes.read_now(4096)
        if not freed and not self._free:
            with self._waiting:
                freed = self._pipes.read(4096)
        self._free.extend(chain.from_iterable(_SLOT.iter_unpack(freed)))

    def _view(self, slot: int, k: int, shape: torch.Size) -> Tensor:
        """The memory of part k in a slot."""
        dtype, start, end = self._route.dtypes[k], self._layout.starts[k], self._layout.starts[k + 1]
        size = shape.numel() * dtype.itemsize
        assert size <= end - start, f"part {k} of {self._route.describe(0)} is too large for its slot: {list(shape)}"
        start += slot * self._layout.slot_bytes
        return self._memory[start : start + size].view(dtype).view(shape)


class SlotReceiver(Receiver, ABC):
    """Receives through slots; the tensors can be written to, and kept."""

    def __init__(self, route: Route, layout: SlotLayout, pipes: SlotPipes) -> None:
        self._route, self._layout, self._pipes = route, layout, pipes
        self._lent: dict[int, Any] = {}  # slot -> weak reference to the object that all its tensors hold
        self._views: dict[int, tuple[int, list[PartView]]] = {}

    def receive(self, minibatch: int, samples: int) -> list[Tensor]:
        """Wait for the announcement of a message and return the tensors in its slot.

        Raises:
            PeerError: the sender is lost, or sends a different message.
        """
        size_bytes, views = self._views.get(samples) or self._views.setdefault(samples, self._message_views(samples))
        try:
            header = self._pipes.read(_HEADER.size)
        except OSError as error:
            raise self._route.not_received(minibatch, error) from error
        number, slot, sent_bytes = _HEADER.unpack(header)
        if (number, sent_bytes) != (minibatch, size_bytes):
            reason = f"got {sent_bytes} bytes of minibatch {number}, not {size_bytes}"
            raise self._route.not_received(minibatch, ConnectionError(reason))
        return self._tensors(slot, views)

    @abstractmethod
    def _open_slot(self, slot: int) -> Any:
        """Return an object for all tensors of the slot to hold; its end frees the slot."""

    @abstractmethod
    def _tensor(self, opened: Any, view: PartView) -> Tensor:
        """Return one of the tensors; each has a version counter of its own."""

    def _tensors(self, slot: int, views: list[PartView]) -> list[Tensor]:
        opened = self._open_slot(slot)
        self._lent[slot] = weakref.ref(opened, partial(self._give_back, slot))
        tensors = [self._tensor(opened, view) for view in views]
        return [tensor.clone() for tensor in tensors] if len(self._lent) > self._layout.depth else tensors

    def _give_back(self, slot: int, _: Any) -> None:
        del self._lent[slot]
        with suppress(OSError):  # the sender is gone, or this end is closed
            self._pipes.write(_SLOT.pack(slot))

    def _message_views(self, samples: int) -> tuple[int, list[PartView]]:
        """Size and views of a message of so many samples."""
        parts = self._route.parts(samples)
        views = [PartView(start, part) for start, part in zip(self._layout.starts, parts, strict=False)]
        return sum(view.size_bytes for view in views), views


class PartView:
    """One part of a message: where it is in the slot, its shape and its dtype.

    Attributes:
        start: its first byte in the slot.
        numpy_dtype: its dtype, or an integer of the same size if numpy lacks it (bfloat16).
        is_reinterpreted: whether it is such an integer.
    """

    def __init__(self, start: int, part: Part) -> None:
        self.start, (self.shape, self.dtype) = start, part
        self.size_bytes = math.prod(self.shape) * self.dtype.itemsize
        try:
            self.numpy_dtype, self.is_reinterpreted = torch.empty(0, dtype=self.dtype).numpy().dtype, False
        except TypeError:
            self.numpy_dtype, self.is_reinterpreted = np.dtype(f"i{self.dtype.itemsize}"), True
