"""Tied weights: one parameter that several stages hold; every copy takes the same steps.

At its round j a holder starts summing that round's gradient over all replicas of all holders, and applies the sum of
round j - lag. With a flush lag is 0 and the result is that of the unsplit model. Without one, the gradient of round j
is complete after the *first* holder's backward, and a later holder s is ahead of that by

    lag_s = ceil((r[f] w[f] - r[s] w[s]) / k) rounds      f: the first holder, r: replicas, w: in flight,
                                                          k: minibatches in a round (the same for all holders)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdtool.runtime.groups import PeerErrorContext
from pdtool.runtime.messages.pinned import DeviceDownload
from pdtool.runtime.meter import WorkerMeter
from pdtool.runtime.stage.averaging import flat_gradient, shaped_gradient
from pdtool.runtime.stage.optimizer import NamedOptimizer


@dataclass(kw_only=True)
class TiedParameterSync:
    """One tied parameter at one holder, with an optimizer and a learning-rate schedule of its own.

    It has its own optimizer and schedule so that step j is the same everywhere. A later holder never waits in a circle:
    it waits only for a message that the first holder sends without needing anything from it meanwhile. Each copy takes
    the steps 0, 1, 2, ... with the same gradients, only later in its own count of rounds. When the pipeline drains at
    the end of an epoch, the remaining sums are applied and the copies are equal again. With vertical sync and 2bw, too,
    a later holder runs `lag` steps behind.

    A step is taken before the stage's next action, not in the update: if a worker has several stages, the other holder
    may still need their output.

    Attributes:
        optimizer: optimizer of this parameter alone, under its name at the first holder.
        group: gloo group of all replicas of all holders.
        holders: number of stages that hold the parameter.
        lag: rounds between a gradient and its step at this holder; 0 in flushing schedules.
        is_first: whether this is the first holder.
        max_norm: the norm that its gradient is clipped to by itself; None: not clipped, or only together with others.
    """

    optimizer: NamedOptimizer
    group: Any
    holders: int
    lag: int
    is_first: bool
    max_norm: float | None
    meter: WorkerMeter

    def __post_init__(self) -> None:
        [(self._name, self.parameter)] = self.optimizer.parameters.items()
        self._all_reduce = HostAllReduce(self.group, self.parameter.device)
        self._due: deque[tuple[Callable[[], Tensor], float]] = deque()  # waits for a sum; when that sum was started

    def start_sum(self, weight: float) -> None:
        """Take this round's gradient, a sum over samples, and start summing it over the holders.

        Args:
            weight: number of these samples, in minibatches.
        """
        is_there = self.parameter.grad is not None
        gradient, self.parameter.grad = flat_gradient(self.parameter), None
        # filled by kernels: the host would wait for the copy of a number
        message = torch.cat([gradient, gradient.new_full((1,), weight), gradient.new_full((1,), is_there)])
        with self._peer_error():
            wait = self._all_reduce.start(message)
        self._due.append((wait, time.perf_counter()))
        self.meter.count_sent(message.nbytes)

    def has_step_due(self, *, is_drained: bool) -> bool:
        """Whether a step is due in this round; when the pipeline is drained, all remaining steps are."""
        return len(self._due) > (0 if is_drained else self.lag)

    def take_sum(self) -> None:
        """Give the parameter its oldest gradient: summed over the holders, and the mean over the samples of its round.

        If no holder has a gradient, it keeps none, so that the optimizer leaves it alone.
        """
        wait, started_s = self._due.popleft()
        with self.meter.averaging, self._peer_error():
            total = wait()
        self.meter.all_reduce_ended(started_s, total.nbytes)
        weight, holders_with_gradient = total[-2:].tolist()
        total = total.to(self.parameter.device, non_blocking=True)
        gradient = total[:-2].div_(weight / self.holders)
        self.parameter.grad = shaped_gradient(gradient, self.parameter) if holders_with_gradient else None
        if self.max_norm:
            nn.utils.clip_grad_norm_(self.parameter, self.max_norm)

    def _peer_error(self) -> PeerErrorContext:
        return PeerErrorContext(
            f"the gradient of the tied parameter {self._name} was not summed over the stages that hold it"
        )


class HostAllReduce:
    """Sums tensors, one after the other, in the same order at all workers of a group.

    gloo takes tensors from CPU memory. A GPU's tensors are copied there first and then summed in a thread, so that the
    worker's own thread never waits for the GPU.

    Args:
        group: a gloo group.
        device: where the tensors are.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._download = DeviceDownload(device, "pdtool-sum") if device.type == "cuda" else None

    def start(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start the sum of a tensor of the same shape everywhere; it may reuse the tensor's memory.

        Returns:
            A function that waits for the sum and returns it, in CPU memory; it raises gloo's error if a worker is lost.
        """
        if self._download:
            return self._download.start([tensor], [tensor.dtype], self._sum).result
        work: Any = dist.all_reduce(tensor, group=self._group, async_op=True)

        def summed() -> Tensor:
            work.wait()
            return tensor

        return summed

    def _sum(self, pinned: Sequence[Tensor]) -> Tensor:
        [tensor] = pinned
        dist.all_reduce(tensor, group=self._group)
        return tensor
