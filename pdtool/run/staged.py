"""Channels between GPUs where NCCL cannot be used: through pinned CPU memory, and from there by another channel.

Copies run on a stream of their own beside the kernels. What leaves is handed on by a thread once its copy is there, so
that the worker goes on to compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from pdtool.run.channel import Receiver, Sender
from pdtool.run.wiring import Hop


class StagedSender:
    """Copies from the device, then sends by `inner`."""

    def __init__(self, hop: Hop, inner: Sender, device: torch.device) -> None:
        self.hop, self.inner, self.device = hop, inner, device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "pdtool-send")
        self._under_way: deque[Future[int]] = deque()

    def send(self, minibatch: int, tensors: Sequence[Tensor]) -> int:
        """Start the copies; raises what an earlier message met with."""
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        there = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            moved = [tensor.to(wire.carried) for wire, tensor in zip(self.hop.wires, tensors, strict=True)]
            pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in moved]
            there.record(self._copies)
        kept = (tensors, moved)  # the stream reads them; nobody else may get their memory before
        self._under_way.append(self._thread.submit(self._hand_on, there, minibatch, pinned, kept))
        return sum(tensor.nbytes for tensor in pinned)

    def finish(self) -> None:
        """Wait until everything is handed on, and needed no longer."""
        while self._under_way:
            self._under_way.popleft().result()
        self.inner.finish()

    def _hand_on(self, there: torch.cuda.Event, minibatch: int, pinned: Sequence[Tensor], kept: object) -> int:
        there.synchronize()
        return self.inner.send(minibatch, pinned)


class StagedReceiver:
    """Receives by `inner`, then copies to the device; kernels started later see the tensors."""

    def __init__(self, inner: Receiver, device: torch.device) -> None:
        self.inner, self.device = inner, device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def expect(self, minibatch: int, samples: int) -> None:
        """The inner channel expects it."""
        self.inner.expect(minibatch, samples)

    def receive(self, minibatch: int) -> list[Tensor]:
        """Wait for the message and start its copies."""
        pinned = [tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in self.inner.receive(minibatch)]
        with torch.cuda.stream(self._copies):
            moved = [tensor.to(self.device, non_blocking=True) for tensor in pinned]
        compute = torch.cuda.current_stream(self.device)
        compute.wait_stream(self._copies)
        for tensor in moved:
            tensor.record_stream(compute)
        return moved
