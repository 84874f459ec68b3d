"""Sum tensors over workers by gloo, which takes them from CPU memory; the worker's own thread waits for no GPU.

host      start ───────────────────────────────── goes on to compute ─────────▶ wait
stream            copy to pinned memory
thread                                  wait for the copy, sum over the workers ──▶
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class HostAllReduce:
    """Sums tensors, one after the other, in the same order at all workers of a group.

    Args:
        group: of gloo.
        device: where the tensors are.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._thread: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._thread = ThreadPoolExecutor(1, "pdtool-sum", torch.cuda.set_device, (device,))

    def start(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start the sum of a tensor, of the same shape everywhere, whose memory it may take.

        Returns:
            What waits for the sum and returns it, in CPU memory; it raises what gloo raises when a worker is lost.
        """
        if self._thread is None:
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
            return partial(_waited_for, work, tensor)
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            copied.record(self._copies)
        kept = tensor  # the stream reads it; nobody else may get its memory before
        return self._thread.submit(self._sum_when_copied, copied, pinned, kept).result

    def _sum_when_copied(self, copied: torch.cuda.Event, pinned: Tensor, kept: Tensor) -> Tensor:
        copied.synchronize()
        dist.all_reduce(pinned, group=self._group)
        return pinned


def _waited_for(work: Any, tensor: Tensor) -> Tensor:
    work.wait()
    return tensor
