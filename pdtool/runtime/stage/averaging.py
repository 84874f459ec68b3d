"""Averages over the replicas of one stage: `ReplicaAverager` averages the gradients of each round, and buffers at the
end of an epoch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _take_tensors

from pdtool.runtime.groups import PeerErrorContext, ReplicaGroup, all_gather
from pdtool.runtime.meter import WorkerMeter
from pdtool.runtime.stage.losses import RoundLoss


class ReplicaAverager:
    """Averages over the replicas of one stage; with one replica nothing is sent.

    Gradients are summed in buckets: few large messages instead of many small ones. Each bucket starts as soon as its
    last gradient is there, while the backward goes on. All replicas start the buckets in the same order.

    Args:
        parameters: parameters of the stage; those that need no gradient are left out.
        bucket_bytes: gradients in one message, or little more.

    Attributes:
        parameters: those that need a gradient now, the last of the stage first, in the order of their gradients.
    """

    def __init__(
        self, replicas: ReplicaGroup, parameters: Iterable[nn.Parameter], meter: WorkerMeter, bucket_bytes: int
    ) -> None:
        self._replicas, self._meter = replicas, meter
        self._group, self._of_stage, self._bucket_bytes = replicas.group, list(parameters), bucket_bytes
        self.select_parameters()

    def select_parameters(self) -> None:
        """From the next round on, average the gradients of these parameters that need one; call it between two
        rounds."""
        self.parameters = [p for p in self._of_stage if p.requires_grad][::-1]
        buckets = _take_tensors(self.parameters, self._bucket_bytes)  # type: ignore[no-untyped-call]  # of one dtype each
        self._buckets: list[list[nn.Parameter]] = list(buckets)
        self._bucket_of = {id(p): b for b, bucket in enumerate(self._buckets) for p in bucket}
        self._begin_round()

    @property
    def sums_in_backward(self) -> bool:
        """Whether sums start while the backward goes on.

        With NCCL, only at the first stage: a started sum holds up anything that synchronises the device. Gradients for
        the stage before would then wait until the other replicas have theirs.
        """
        is_gloo = self._group is self._replicas.host_group
        return self._group is not None and (self._replicas.stage == 0 or is_gloo)

    def _begin_round(self) -> None:
        self._missing = [len(bucket) for bucket in self._buckets]
        self._ready: set[int] = set()  # ids of parameters
        self._with_gradient: set[int] = set()
        self._started: list[tuple[Any, Tensor]] = []
        self._started_s = 0.0

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Note that the round's gradient of this parameter seems complete, and start complete buckets.

        More of it may come: a reentrant checkpoint that uses a parameter again runs a backward of its own for each use.
        """
        if id(parameter) in self._bucket_of and id(parameter) not in self._ready:
            self._ready.add(id(parameter))
            self._missing[self._bucket_of[id(parameter)]] -= 1
            while len(self._started) < len(self._buckets) and not self._missing[len(self._started)]:
                self._start_bucket()

    def average_gradients(self, weight: float, loss: RoundLoss | None) -> RoundLoss | None:
        """Replace each gradient, a sum over samples, by its mean over the samples of all replicas; raises PeerError.

        If no replica has a gradient for a parameter, it keeps none, so that the optimizer leaves it alone.

        Args:
            weight: samples behind this replica's gradients, in minibatches; 0 if it had none in a short round.
            loss: loss of this or an earlier round; all replicas pass the same round's, or none.

        Returns:
            The loss, summed over the replicas.
        """
        if self._group:
            losses = [loss.total, loss.weight] if loss else [0.0, 0.0]
            while len(self._started) < len(self._buckets):
                self._start_bucket()
            is_late = any(p.grad is not None for p in self.parameters)
            numbers = [weight, *losses, is_late, *(id(p) in self._with_gradient for p in self.parameters)]
            weight, total, loss_weight, late, *replicas_with_gradient = self._sum(numbers)
            loss = replace(loss, total=total, weight=loss_weight) if loss else None
            for _ in self._buckets if late else ():  # at some replica, more came after its bucket had left
                self._start_bucket()
            self._take_sums()
            for p, n in zip(self.parameters, replicas_with_gradient, strict=True):
                p.grad = p.grad if n else None
        if weight != 1.0 and (gradients := [p.grad for p in self.parameters if p.grad is not None]):
            torch._foreach_div_(gradients, weight)
        return loss

    def sum_loss(self, loss: RoundLoss) -> RoundLoss:
        """Sum the loss of a round over the replicas; raises PeerError."""
        if not self._group:
            return loss
        total, weight = self._sum([loss.total, loss.weight])
        return replace(loss, total=total, weight=weight)

    def average_buffers(self, buffers: Mapping[str, Tensor], minibatches: int) -> None:
        """Make the buffers of all replicas equal.

        Floating-point buffers (running statistics) are averaged, weighted by each replica's minibatches. This is done
        in fp64, so that equal values stay unchanged. Other buffers (counters) are copied from replica 0. A buffer that
        some replica lacks, such as one that a forward makes, is left alone.

        Args:
            buffers: by name, of any shape, the same at every replica; changed in place.
            minibatches: this replica's minibatches in the epoch.
        """
        if not self._group:
            return
        [total] = self._sum([minibatches])
        with self._meter.averaging, self._peer_error("buffers"):
            shapes = {name: tuple(buffer.shape) for name, buffer in buffers.items()}
            held = all_gather(shapes, dict[str, tuple[int, ...]], self._replicas.host_group, "the buffers")
            for name, shape in held[0].items():
                if all(other.get(name) == shape for other in held):
                    buffer = without_repetition(buffers[name])
                    if buffer.is_floating_point() or buffer.is_complex():
                        buffer.copy_(self._average(buffer, minibatches, total))
                    else:
                        buffer.copy_(self._of_replica_0(buffer))

    def _average(self, buffer: Tensor, minibatches: int, total: float) -> Tensor:
        precise = torch.promote_types(buffer.dtype, torch.float64)
        average = buffer.to(precise, copy=True, memory_format=torch.contiguous_format)
        values = torch.view_as_real(average) if average.is_complex() else average
        self._all_reduce(values.mul_(minibatches) if minibatches else values.zero_()).wait()  # 0 times infinity is NaN
        values.div_(total)
        return average

    def _of_replica_0(self, buffer: Tensor) -> Tensor:
        values = buffer.contiguous().reshape(-1).view(torch.uint8)  # gloo does not take all dtypes
        dist.broadcast(values, group=self._group, group_src=0)
        return values.view(buffer.dtype).view(buffer.shape)

    def _start_bucket(self) -> None:
        self._started_s = self._started_s or time.perf_counter()
        bucket = self._buckets[len(self._started) % len(self._buckets)]
        flat = torch.cat([flat_gradient(p) for p in bucket])
        self._started.append((self._all_reduce(flat), flat))
        self._with_gradient |= {id(p) for p in bucket if p.grad is not None}
        for p in bucket:
            p.grad = None

    def _take_sums(self) -> None:
        """Wait for all sums, and give each parameter its gradient; late additions are in a second sum of its bucket."""
        with self._meter.averaging, self._peer_error("gradients"):
            for work, _ in self._started:
                work.wait()
        if self._started:
            size_bytes = sum(self._ring_bytes(flat) for _, flat in self._started)
            self._meter.all_reduce_ended(self._started_s, size_bytes)
        for bucket, (_, flat) in zip(cycle(self._buckets), self._started, strict=False):
            for p, gradient in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                total = shaped_gradient(gradient, p)
                p.grad = total if p.grad is None else p.grad.add_(total)
        self._begin_round()

    def _sum(self, numbers: Sequence[float]) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64)
        self._meter.count_sent(self._ring_bytes(total))
        with self._meter.averaging, self._peer_error("numbers"):
            dist.all_reduce(total, group=self._replicas.host_group)
        return total.tolist()

    def _all_reduce(self, tensor: Tensor) -> Any:
        self._meter.count_sent(self._ring_bytes(tensor))
        with self._peer_error("gradients"):
            return dist.all_reduce(tensor, group=self._group, async_op=True)

    def _ring_bytes(self, tensor: Tensor) -> int:
        """Bytes that each member of a ring sends (Patarasuk and Yuan, JPDC 2009)."""
        size = len(self._replicas.ranks)
        return round(2 * (size - 1) / size * tensor.nbytes)

    def _peer_error(self, what: str) -> PeerErrorContext:
        stage, ranks = self._replicas.stage, self._replicas.ranks
        return PeerErrorContext(f"{what} were not averaged with the other replicas of stage {stage} (ranks {ranks})")


def flat_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, or zeros, in one dimension, in the parameter's memory order."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    if not parameter.is_contiguous():
        strides = _dense_strides(parameter)
        gradient = gradient.permute(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))
    return gradient.reshape(-1)


def shaped_gradient(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a result of `flat_gradient` in the shape of the parameter and, if that is dense, with its strides.

    Fused optimizers read the gradient by the strides of the parameter.
    """
    if parameter.is_contiguous():
        return flat.view_as(parameter)
    return flat.as_strided(parameter.shape, _dense_strides(parameter))


def _dense_strides(parameter: nn.Parameter) -> tuple[int, ...]:
    return torch.empty_like(parameter, device="meta").stride()


def without_repetition(tensor: Tensor, expanded: Tensor | None = None) -> Tensor:
    """Return the part of an expanded tensor that is in memory once and can be written; any other tensor unchanged.

    Args:
        expanded: a tensor of the same shape that decides which part; None: the tensor itself.
    """
    strides = (tensor if expanded is None else expanded).stride()
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in strides)]
