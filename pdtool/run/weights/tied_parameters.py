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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdtool.run.measure.meter import WorkerMeter
from pdtool.run.processes.collectives import PeerErrorContext
from pdtool.run.weights.gradient_norm import clip
from pdtool.run.weights.host_all_reduce import HostAllReduce
from pdtool.run.weights.optimizer import NamedOptimizer


@dataclass(frozen=True)
class TiedHolders:
    """The stages that hold a tied parameter, as one of them sees it.

    Attributes:
        group: gloo group of all replicas of all holders.
        count: number of holders.
        lag: rounds between a gradient and its step at this holder; 0 in flushing schedules.
        is_first: whether this is the first holder.
    """

    group: Any
    count: int
    lag: int
    is_first: bool


@dataclass(frozen=True)
class _StartedSum:
    """A sum under way.

    Attributes:
        wait: waits for the sum and returns it, in CPU memory.
        at_s: when it was started, in seconds of time.perf_counter.
    """

    wait: Callable[[], Tensor]
    at_s: float


class TiedParameterSync:
    """One tied parameter at one holder.

    Args:
        optimizer: of this parameter alone, under its name at the first holder.
        max_norm: that its gradient is clipped to by itself; None where it is not clipped, or together with others.
    """

    def __init__(
        self, optimizer: NamedOptimizer, holders: TiedHolders, meter: WorkerMeter, max_norm: float | None = None
    ) -> None:
        self.optimizer, self.holders, self._meter, self._max_norm = optimizer, holders, meter, max_norm
        [(self._name, self.parameter)] = optimizer.parameters.items()
        self._all_reduce = HostAllReduce(holders.group, self.parameter.device)
        self._due: deque[_StartedSum] = deque()

    def start_sum(self, weight: float) -> None:
        """Take this round's gradient, a sum over samples, and start summing it over the holders.

        Args:
            weight: number of these samples, in minibatches.
        """
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None:
            gradient = torch.zeros_like(self.parameter)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        message = torch.cat([gradient.detach().reshape(-1), gradient.new_full((1,), weight)])
        with self._peer_error():
            wait = self._all_reduce.start(message)
        self._due.append(_StartedSum(wait, time.perf_counter()))
        self._meter.count_sent(message.nbytes)

    @property
    def is_step_due(self) -> bool:
        """Whether a step is due in this round."""
        return len(self._due) > self.holders.lag

    @property
    def is_drained(self) -> bool:
        """Whether all steps were taken."""
        return not self._due

    def take_sum(self) -> None:
        """Give the parameter its oldest gradient: summed over the holders, the mean over the samples of its round."""
        started = self._due.popleft()
        with self._meter.averaging, self._peer_error():
            total = started.wait()
        self._meter.all_reduce_ended(started.at_s, total.nbytes)
        total = total.to(self.parameter.device, non_blocking=True)
        gradient = total[:-1].div_(total[-1] / self.holders.count)
        self.parameter.grad = gradient.view_as(self.parameter)
        if self._max_norm:
            clip([self.parameter], self._max_norm)

    def step(self) -> None:
        """Step with the gradient that `take_sum` has given."""
        self.optimizer.step()

    def _peer_error(self) -> PeerErrorContext:
        return PeerErrorContext(
            f"the gradient of the tied parameter {self._name} was not summed over the stages that hold it"
        )
