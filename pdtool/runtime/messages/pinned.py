"""Copies between a GPU and pinned CPU memory, on a stream of their own beside the kernels.

`PinnedSender` and `PinnedReceiver` are a channel between GPUs without NCCL: messages go through pinned memory and from
there by another channel. `DeviceUpload` also copies loaded minibatches to a GPU. `DeviceDownload` also copies the
gradients that gloo sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from pdtool.runtime.messages.routes import Receiver, Route, Sender

Result = TypeVar("Result")


class DeviceDownload:
    """Copies tensors from a GPU; a thread waits for them and goes on with them while the worker computes.

    host      start ───────────────────────────────── goes on to compute
    stream            copy to pinned memory
    thread                                  wait for the copy, then work with it ──▶

    Args:
        device: a GPU.
        thread: a name for the thread.
    """

    def __init__(self, device: torch.device, thread: str) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, thread, torch.cuda.set_device, (device,))  # which each thread has

    def start(
        self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], work: Callable[[list[Tensor]], Result]
    ) -> Future[Result]:
        """Start the copies; return a future of `work`'s result. `work` runs when they, and all earlier ones, are done.

        Args:
            tensors: of any shapes.
            dtypes: dtypes of the copies.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            pinned = [
                torch.empty(tensor.shape, dtype=dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor, dtype in zip(tensors, dtypes, strict=True)
            ]
            copied.record(self._stream)
        kept = list(tensors)  # the stream still reads them: nobody else may get their memory

        def work_when_copied() -> Result:
            copied.synchronize()
            kept.clear()
            return work(pinned)

        return self._thread.submit(work_when_copied)


def in_pinned_memory(tensor: Tensor) -> Tensor:
    """Return a tensor of a GPU itself, and one of the host in pinned memory, so that no copy makes the host wait."""
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()


class DeviceUpload:
    """Copies the tensors of each minibatch to a device: `start`, and later `finish`.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies: dict[Any, Tensor] = {}

    def start(self, tensors: Mapping[Any, Tensor]) -> None:
        """Start the copies.

        Pinned memory is not reused before it is copied, because torch's allocator of pinned memory knows of the copies.

        Args:
            tensors: by any keys, of any shapes.
        """
        pinned = {key: in_pinned_memory(tensor) for key, tensor in tensors.items()}
        with torch.cuda.stream(self._stream):
            self._copies = {key: tensor.to(self._device, non_blocking=True) for key, tensor in pinned.items()}

    def finish(self) -> dict[Any, Tensor]:
        """Return the copies, by their keys; kernels started from now on see them."""
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._stream)
        for tensor in self._copies.values():
            tensor.record_stream(compute)  # its kernels read memory that was allocated for the other stream
        copies, self._copies = self._copies, {}
        return copies


class PinnedSender:
    """Copies from the device to pinned memory, then sends by `inner`.

    Args:
        depth: messages that may be under way. In a validation nothing else holds up the first stage.
        waiting: context that times a wait for the receiver.
    """

    def __init__(
        self, route: Route, inner: Sender, depth: int, device: torch.device, waiting: AbstractContextManager[None]
    ) -> None:
        self._route, self._inner, self._depth, self._waiting = route, inner, depth, waiting
        self._download = DeviceDownload(device, "pdtool-send")
        self._under_way: deque[Future[int]] = deque()

    def send(self, minibatch: int, parts: Sequence[Tensor]) -> int:
        """Start the copies; wait only when `depth` messages are under way. Raises an earlier message's error."""
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()
        while len(self._under_way) >= self._depth:
            with self._waiting:
                self._under_way.popleft().result()
        dtypes = self._route.dtypes
        self._under_way.append(self._download.start(parts, dtypes, partial(self._inner.send, minibatch)))
        return sum(part.numel() * dtype.itemsize for part, dtype in zip(parts, dtypes, strict=True))

    def flush(self) -> None:
        """Wait until the other channel has everything and needs it no longer."""
        while self._under_way:
            self._under_way.popleft().result()
        self._inner.flush()


class PinnedReceiver:
    """Receives by `inner`, then copies to the device; kernels started later see the tensors."""

    def __init__(self, inner: Receiver, device: torch.device) -> None:
        self._inner, self._upload = inner, DeviceUpload(device)

    def expect(self, minibatch: int, samples: int) -> None:
        """Let the other channel expect the message."""
        self._inner.expect(minibatch, samples)

    def receive(self, minibatch: int, samples: int) -> list[Tensor]:
        """Wait for the message and start its copies."""
        self._upload.start(dict(enumerate(self._inner.receive(minibatch, samples))))
        return list(self._upload.finish().values())
