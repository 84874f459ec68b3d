"""Update the stages of a worker, with gradients clipped by their norm (`MAX_GRAD_NORM` of model.py).

With a flush all stages update at the same moment, and the norm is that of all parameters of the model, as
torch.nn.utils.clip_grad_norm_ computes it in a plain loop: one worker of each stage adds its part, and a parameter
that several stages hold counts once.

Without a flush stages update at different moments, so that there is no common norm: the gradients of a stage are
clipped by the norm of these alone, those of a tied parameter, whose copies take the same steps at different moments,
by their own. What a plain loop would not clip is not clipped here either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pdtool.run.measure.meter import WorkerMeter
from pdtool.run.processes.collectives import PeerErrorContext
from pdtool.run.stage_replica import StageReplica
from pdtool.run.weights.gradient_norm import clip, scale, squared_norm


class ClippedUpdates:
    """Updates the stages of this worker.

    Args:
        max_norm: None clips nothing.
        group: gloo group of all workers, which update at the same moment; None when stages do not.
        stages: number of stages of this worker.
        is_replica_0: whether this worker adds the norms of its stages to the sum; other replicas have the same ones.
    """

    def __init__(
        self, max_norm: float | None, group: Any, *, stages: int, is_replica_0: bool, meter: WorkerMeter
    ) -> None:
        self._max_norm, self._group = max_norm, group
        self._stages, self._is_replica_0, self._meter = stages, is_replica_0, meter
        self._waiting: list[StageReplica] = []

    def update(self, replica: StageReplica) -> None:
        """Update a stage, whose gradients are averaged; together with the worker's other stages where these count."""
        if not self._max_norm:
            replica.step()
        elif not self._group:
            clip(replica.averager.parameters, self._max_norm)
            replica.step()
        else:
            self._waiting.append(replica)
            if len(self._waiting) == self._stages:
                self._update_together(self._max_norm)

    def _update_together(self, max_norm: float) -> None:
        """Update all stages of the worker, at the end of its round: no other worker needs anything more of it."""
        counted: list[nn.Parameter] = []
        held: list[nn.Parameter] = []
        for replica in self._waiting:
            for tied in replica.tied:
                tied.take_sum()
            own = replica.averager.parameters
            counted += [*own, *(tied.parameter for tied in replica.tied if tied.holders.is_first)]
            held += [*own, *(tied.parameter for tied in replica.tied)]
        norm = math.sqrt(self._sum_over_stages(counted))
        scale(held, norm, max_norm)
        for replica in self._waiting:
            replica.step()
            for tied in replica.tied:
                tied.step()
        self._waiting.clear()

    def _sum_over_stages(self, parameters: Iterable[nn.Parameter]) -> float:
        own = squared_norm(parameters) if self._is_replica_0 else 0.0
        total = torch.tensor(own, dtype=torch.float64)
        with self._meter.averaging, PeerErrorContext("the norm of the gradients was not summed over all workers"):
            dist.all_reduce(total, group=self._group)
        self._meter.count_sent(total.nbytes)
        return total.item()
