"""One parameter held by several stages (tied weights): every copy takes the same steps.

At its round j a holder starts summing the gradient of that round over all replicas of all holders, and applies the
sum of round j - lag. With a flush lag is 0 and the result is that of the unsplit model. Without one, the gradient of
round j is complete when the *first* holder has done its backward, and a later holder s is ahead of it by

    lag_s = ceil((r[f] w[f] - r[s] w[s]) / k) rounds      f: the first holder, r: replicas, w: in flight,
                                                          k: minibatches in a round (the same for all holders)

so it waits, if at all, for a message that the first holder's schedule sends without needing anything of s in between.
Each copy thus takes the steps 0, 1, 2, ... with the same gradients, only later in its own count of rounds, and when
the pipeline drains at an epoch's end the sums still due are applied: the copies are equal again.

A step is taken before the stage's next action, not in the update: with several stages on a worker the other holder may
need what they have yet to do.

That is so with vertical sync and 2bw too: of a tied parameter a later holder's version has `lag` steps fewer.

Tied parameters have an optimizer and a learning-rate schedule of their own, so that step j is the same everywhere.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdtool.run.optimize import Updater
from pdtool.run.peers import Blame


class Tied:
    """One tied parameter at one holder.

    Args:
        group: gloo group of all replicas of all holders.
        holders: number of stages that hold it.
        waiting, sent, message: as for Replicas.
        lag: rounds between a gradient and its step; 0 in flushing schedules.
        first: whether this is the first holder.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        updater: Updater,
        group: Any,
        holders: int,
        lag: int,
        name: str,
        waiting: Callable[[], AbstractContextManager[None]],
        sent: Callable[[int], None],
        message: Callable[[str, str, float, float, int], None],
        *,
        first: bool,
    ) -> None:
        self.first = first
        self.parameter, self.updater = parameter, updater
        self.group, self.holders, self.lag, self.name = group, holders, lag, name
        self.waiting, self.sent, self.message = waiting, sent, message
        self._due: deque[tuple[Any, Tensor, float]] = deque()

    def start(self, weight: float) -> None:
        """Take this round's gradient (a sum over samples; `weight`: samples, in minibatches) and start its exchange."""
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None:
            gradient = torch.zeros_like(self.parameter)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        message = torch.cat([gradient.detach().reshape(-1).cpu(), torch.tensor([weight], dtype=gradient.dtype)])
        with self._blame():
            self._due.append((dist.all_reduce(message, group=self.group, async_op=True), message, time.perf_counter()))
        self.sent(message.nbytes)

    @property
    def ready(self) -> bool:
        """Whether a step is due in this round."""
        return len(self._due) > self.lag

    @property
    def drained(self) -> bool:
        """Whether all steps were taken."""
        return not self._due

    def step(self) -> None:
        """Apply the oldest sum: over the holders, and the mean over the samples of its round."""
        work, message, since = self._due.popleft()
        with self.waiting(), self._blame():
            work.wait()
        self.message("all-reduce", "gradients", since, time.perf_counter(), message.nbytes)
        gradient = message[:-1].div_(message[-1] / self.holders)
        self.parameter.grad = gradient.view_as(self.parameter).to(self.parameter.device)
        self.updater.step()

    def _blame(self) -> Blame:
        return Blame(f"the gradient of the tied parameter {self.name} was not summed over the stages that hold it")
