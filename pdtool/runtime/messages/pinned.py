"""Copies between a GPU and pinned CPU memory, on a stream of their own beside the kernels.

`PinnedSender` and `PinnedReceiver` are a channel between GPUs if NCCL cannot be used: messages go through pinned memory
and from there by another channel. A thread hands each message to the other channel once its copy is complete, so the
worker goes on to compute. `DeviceUpload` copies loaded minibatches to a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from pdtool.runtime.messages.routes import Receiver, Route, Sender


class PinnedSender:
    """Copies from the device to pinned memory, then sends by `inner`."""

    def __init__(self, route: Route, inner: Sender, device: torch.device) -> None:
        self._route, self._inner, self._device = route, inner, device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "pdtool-send", torch.cuda.set_device, (device,))  # which each thread has
        self._under_way: deque[Future[int]] = deque()

    def send(self, minibatch: int, tensors: Sequence[Tensor]) -> int:
        """Start the copies; raises what an earlier message met with."""
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            cast = [tensor.to(edge.sent_dtype) for edge, tensor in zip(self._route.edges, tensors, strict=True)]
            pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in cast]
            copied.record(self._copies)
        kept = (tensors, cast)  # the stream reads them; nobody else may get their memory before
        self._under_way.append(self._thread.submit(self._send_when_copied, copied, minibatch, pinned, kept))
        return sum(tensor.nbytes for tensor in pinned)

    def flush(self) -> None:
        """Wait until everything is handed to the other channel, and needed there no longer."""
        while self._under_way:
            self._under_way.popleft().result()
        self._inner.flush()

    def _send_when_copied(
        self, copied: torch.cuda.Event, minibatch: int, pinned: Sequence[Tensor], kept: object
    ) -> int:
        copied.synchronize()
        return self._inner.send(minibatch, pinned)


class PinnedReceiver:
    """Receives by `inner`, then copies to the device; kernels started later see the tensors."""

    def __init__(self, inner: Receiver, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def expect(self, minibatch: int, samples: int) -> None:
        """Let the other channel expect the message."""
        self._inner.expect(minibatch, samples)

    def receive(self, minibatch: int, samples: int) -> list[Tensor]:
        """Wait for the message and start its copies."""
        received = self._inner.receive(minibatch, samples)
        pinned = [tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in received]
        with torch.cuda.stream(self._copies):
            copies = [tensor.to(self._device, non_blocking=True) for tensor in pinned]
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._copies)
        for tensor in copies:
            tensor.record_stream(compute)
        return copies


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
