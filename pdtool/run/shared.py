"""Channels between two workers of one machine: messages in memory that both see, announced over a socket.

The memory is a file without a name, cut into slots of one message each; it is gone when both workers are, however
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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdtool.run.channel import not_away, not_here
from pdtool.run.peers import PeerError
from pdtool.run.wiring import Hop

HEADER = struct.Struct("<qqq")  # minibatch, slot, bytes
SLOT = struct.Struct("=H")
ALIGN = 64
CLOSED = "Connection closed by peer"


@dataclass(frozen=True)
class Slots:
    """How the memory of a hop is cut.

    Attributes:
        depth: messages that the schedule may have under way; there are twice as many slots.
        starts: byte in a slot where each wire's tensor begins, and where the slot ends.
    """

    depth: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, hop: Hop, batch_size: int, depth: int) -> Slots:
        """For minibatches of at most `batch_size` samples."""
        starts = [0]
        for wire in hop.wires:
            size = math.prod(wire.sizes(batch_size)) * wire.carried.itemsize
            starts.append(starts[-1] + -(-size // ALIGN) * ALIGN)
        return cls(depth, (*starts[:-1], max(starts[-1], ALIGN)))

    @property
    def count(self) -> int:
        """Number of slots."""
        return 2 * self.depth

    @property
    def size(self) -> int:
        """Bytes of a slot."""
        return self.starts[-1]


class SharedSender:
    """The sender of a hop.

    Args:
        memory: count * size bytes.
        line: socket to the receiver; its timeout is how long a free slot is waited for.
        waiting: context of a wait, to account for its time.
    """

    def __init__(
        self,
        hop: Hop,
        slots: Slots,
        memory: mmap.mmap,
        line: socket.socket,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.hop, self.slots, self.line, self.waiting = hop, slots, line, waiting
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._free = list(range(slots.count))[::-1]  # the last one freed is used next: it is in the cache
        self._places: dict[tuple[int, int, torch.Size], Tensor] = {}

    def send(self, minibatch: int, tensors: Sequence[Tensor]) -> int:
        """Copy into a slot; waits only when the receiver has not yet got what the schedule says it has."""
        try:
            self._take_back()
            slot, size = self._free.pop(), 0
            for k, tensor in enumerate(tensors):
                place = self._places.get((slot, k, tensor.shape))
                if place is None:
                    place = self._places[slot, k, tensor.shape] = self._place(slot, k, tensor.shape)
                place.copy_(tensor)
                size += place.nbytes
            self.line.send(HEADER.pack(minibatch, slot, size))
        except OSError as error:
            raise PeerError(
                f"{not_away(self.hop, minibatch)} ({_reason(error, self.line)})", peer=self.hop.receiver
            ) from error
        return size

    def finish(self) -> None:
        """What was sent is in memory that outlives this worker."""

    def close(self) -> None:
        """End the connection."""
        self.line.close()

    def _take_back(self) -> None:
        """The slots that the receiver has freed; at least one is free afterwards."""
        with suppress(BlockingIOError):
            self._add(os.read(self.line.fileno(), 4096))
        if not self._free:
            with self.waiting():
                self._add(self.line.recv(4096))

    def _add(self, freed: bytes) -> None:
        if not freed:
            raise ConnectionError(CLOSED)
        self._free.extend(slot for (slot,) in SLOT.iter_unpack(freed))

    def _place(self, slot: int, k: int, shape: torch.Size) -> Tensor:
        """Where the tensor of wire k goes."""
        dtype, start = self.hop.wires[k].carried, self.slots.starts[k]
        size = shape.numel() * dtype.itemsize
        assert size <= self.slots.starts[k + 1] - start, f"{self.hop.wires[k].name}{list(shape)} is too large"
        start += slot * self.slots.size
        return self._memory[start : start + size].view(dtype).view(shape)


class SharedReceiver:
    """The receiver of a hop; its tensors can be written to, and kept.

    Args:
        memory: count * size bytes.
        line: socket to the sender; its timeout is how long a message is waited for.
    """

    def __init__(self, hop: Hop, slots: Slots, memory: mmap.mmap, line: socket.socket) -> None:
        self.hop, self.slots, self.line = hop, slots, line
        self._memory = memory
        self._expected: deque[tuple[int, int]] = deque()
        self._lent: dict[int, Any] = {}  # slot -> weak reference to what all its tensors refer to
        self._pieces: dict[int, tuple[int, list[_Piece]]] = {}

    def expect(self, minibatch: int, samples: int) -> None:
        """Remember the size; a sender does not wait to be asked."""
        self._expected.append((minibatch, samples))

    def receive(self, minibatch: int) -> list[Tensor]:
        """Wait for the announcement."""
        expected, samples = self._expected.popleft()
        assert expected == minibatch, f"minibatch {minibatch} was asked for, {expected} was expected"
        pieces = self._pieces.get(samples) or self._pieces.setdefault(samples, self._cut(samples))
        try:
            said = self.line.recv(HEADER.size)
            if len(said) < HEADER.size:
                raise ConnectionError(CLOSED)
        except OSError as error:
            raise self._lost(minibatch, _reason(error, self.line)) from error
        number, slot, size = HEADER.unpack(said)
        if (number, size) != (minibatch, pieces[0]):
            raise self._lost(minibatch, f"{size} bytes of minibatch {number} came, not {pieces[0]}")
        return self._tensors(slot, pieces[1])

    def close(self) -> None:
        """End the connection; tensors received stay."""
        self.line.close()

    def _tensors(self, slot: int, pieces: list[_Piece]) -> list[Tensor]:
        """Each has a version counter of its own, and refers to one array of the slot, whose end frees it."""
        whole = np.frombuffer(self._memory, np.uint8, self.slots.size, slot * self.slots.size)
        self._lent[slot] = weakref.ref(whole, partial(self._give_back, slot))
        tensors = [piece.tensor(whole) for piece in pieces]
        return [tensor.clone() for tensor in tensors] if len(self._lent) > self.slots.depth else tensors

    def _give_back(self, slot: int, _: Any) -> None:
        del self._lent[slot]
        with suppress(OSError):  # the sender is gone, or this end is closed
            self.line.send(SLOT.pack(slot))

    def _cut(self, samples: int) -> tuple[int, list[_Piece]]:
        """Bytes and pieces of a message of so many samples."""
        parts = zip(self.hop.wires, self.slots.starts, strict=False)
        pieces = [_Piece(start, wire.sizes(samples), wire.carried) for wire, start in parts]
        return sum(piece.size for piece in pieces), pieces

    def _lost(self, minibatch: int, reason: str) -> PeerError:
        return PeerError(f"{not_here(self.hop, minibatch)} ({reason})", peer=self.hop.sender)


class _Piece:
    """One tensor of a message: where it is in the slot, and what it is."""

    def __init__(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.start, self.shape, self.dtype = start, shape, dtype
        self.size = math.prod(shape) * dtype.itemsize
        try:
            self.kind, self.foreign = torch.empty(0, dtype=dtype).numpy().dtype, False
        except TypeError:  # numpy has no bfloat16
            self.kind, self.foreign = np.dtype(f"i{dtype.itemsize}"), True

    def tensor(self, whole: np.ndarray[Any, Any]) -> Tensor:
        """In the slot."""
        found = torch.from_numpy(np.ndarray(self.shape, self.kind, whole, self.start))
        return found.view(self.dtype) if self.foreign else found


def _reason(error: OSError, line: socket.socket) -> str:
    if isinstance(error, TimeoutError):
        return f"Timed out waiting {line.gettimeout():g} s"
    return error.strerror or str(error)
