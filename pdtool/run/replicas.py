"""What the replicas of one stage share: the gradients of each round, and buffers at the end of an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdtool.run.peers import Blame

BUCKET_BYTES = 25_000_000


class Replicas:
    """The replicas of one stage; alone, nothing is sent.

    Gradients are summed in buckets, few large messages instead of many small ones, each started as soon as its last
    gradient is there, while the backward goes on. All replicas start the buckets in the same order.

    Args:
        group: their process group, or None for one replica.
        parameters: of the stage, those that need no gradient left out.
        who: how the stage is called in errors.
        device: where numbers are summed.
        waiting: context of a wait, to account for its time.
        sent: called with the bytes this worker sends.
        message: called with lane, name, start, end and bytes of what the trace shows, see Meter.message.
    """

    def __init__(
        self,
        group: Any,
        size: int,
        parameters: Iterable[nn.Parameter],
        who: str,
        device: torch.device,
        waiting: Callable[[], AbstractContextManager[None]],
        sent: Callable[[int], None],
        message: Callable[[str, str, float, float, int], None],
    ) -> None:
        self.group, self.size, self.who, self.device = group, size, who, device
        self.waiting, self.sent, self.message = waiting, sent, message
        self.parameters = [p for p in parameters if p.requires_grad][::-1]  # the last gradient comes first
        self._buckets = [[self.parameters[i] for i in bucket] for bucket in _buckets(self.parameters)]
        self._bucket_of = {id(p): b for b, bucket in enumerate(self._buckets) for p in bucket}
        self._begin()

    def _begin(self) -> None:
        """A round of minibatches begins."""
        self._missing = [len(bucket) for bucket in self._buckets]
        self._started: list[tuple[Any, Tensor]] = []
        self._since = 0.0

    def final(self, parameter: nn.Parameter) -> None:
        """The round's gradient of this parameter is there: start the buckets that are complete."""
        if id(parameter) in self._bucket_of:
            self._missing[self._bucket_of[id(parameter)]] -= 1
            while len(self._started) < len(self._buckets) and not self._missing[len(self._started)]:
                self._start_bucket()

    def average_gradients(self, weight: float, loss: float) -> tuple[float, float]:
        """Replace each gradient, a sum over samples, by its mean over the samples of all replicas.

        A parameter that no replica has a gradient for keeps none, so that the optimizer leaves it alone.

        Args:
            weight: samples behind this replica's gradients (in minibatches; 0 when it had none in a short round).
            loss: sum of losses over the same samples.

        Returns:
            weight and loss, summed over the replicas.
        """
        if self.group:
            numbers = [weight, loss, *(p.grad is not None for p in self.parameters)]
            while len(self._started) < len(self._buckets):
                self._start_bucket()
            weight, loss, *present = self._sum(numbers)
            self._take_sums()
            for p, n in zip(self.parameters, present, strict=True):
                p.grad = p.grad if n else None
        if weight != 1.0:
            for p in self.parameters:
                if p.grad is not None:
                    p.grad.div_(weight)
        return weight, loss

    def _start_bucket(self) -> None:
        self._since = self._since or time.perf_counter()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._buckets[len(self._started)]]
        flat = torch.cat([(g.to_dense() if g.is_sparse else g).reshape(-1) for g in gradients])
        self._started.append((self._reduce(flat), flat))

    def _take_sums(self) -> None:
        with self.waiting(), self._blame("gradients"):
            for work, _ in self._started:
                work.wait()
        if self._started:
            size = sum(self._cost(flat) for _, flat in self._started)
            self.message("all-reduce", "gradients", self._since, time.perf_counter(), size)
        for bucket, (_, flat) in zip(self._buckets, self._started, strict=True):
            for p, part in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                p.grad = part.view_as(p)
        self._begin()

    def _sum(self, numbers: Sequence[float]) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        with self.waiting(), self._blame("numbers"):
            self._reduce(total).wait()
        return total.tolist()

    def _reduce(self, tensor: Tensor) -> Any:
        self.sent(self._cost(tensor))
        with self._blame("gradients"):
            return dist.all_reduce(tensor, group=self.group, async_op=True)

    def average_buffers(self, buffers: Iterable[Tensor], weight: float) -> None:
        """Let all replicas hold the same buffers: floating-point ones (running statistics) are averaged, weighted by
        the minibatches each replica saw; of others (counters) replica 0's are taken."""
        if not self.group:
            return
        [total] = self._sum([weight])
        for buffer in buffers:
            with self.waiting(), self._blame("buffers"):
                if buffer.is_floating_point():
                    self._reduce(buffer.mul_(weight / total)).wait()
                else:
                    dist.broadcast(buffer, group=self.group, group_src=0)

    def _cost(self, tensor: Tensor) -> int:
        """Bytes that a member of a ring sends (Patarasuk and Yuan, JPDC 2009)."""
        return round(2 * (self.size - 1) / self.size * tensor.nbytes)

    def _blame(self, what: str) -> Blame:
        return Blame(f"{what} were not averaged with the other replicas of {self.who}")


def _buckets(tensors: Sequence[Tensor]) -> Iterable[list[int]]:
    """Positions of tensors of one dtype and device, in order, up to BUCKET_BYTES together."""
    kinds = [(tensor.dtype, tensor.device) for tensor in tensors]
    for kind in dict.fromkeys(kinds):
        bucket: list[int] = []
        size = 0
        for i, tensor in enumerate(tensors):
            if kinds[i] != kind:
                continue
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(i)
            size += tensor.nbytes
        if bucket:
            yield bucket
