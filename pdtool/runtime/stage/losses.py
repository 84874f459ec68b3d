"""Losses and metrics: the training loss of each round, and the figures of a validation.

`LossReader` spares the host waiting for the device. On a GPU it copies a loss to the CPU behind the kernels that
compute it, and reads it one round later. On a CPU it reads the losses of a round at its end.

    host    F0  B0  end of round 0      F1  B1  end of round 1: reads loss 0      ...  end of the epoch: the last
    device  .   F0  B0  loss 0 copied   .   F1  B1  loss 1 copied

`MetricTotals` adds up a validation over the minibatches, then over the workers.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdtool.errors import PdtoolError
from pdtool.frontend.model_file import ModelFile
from pdtool.runtime.groups import all_gather
from pdtool.runtime.status import Status


@dataclass(frozen=True)
class RoundLoss:
    """The loss of one round at one replica.

    Attributes:
        step: number of the update that ends the round, from 1.
        total: sum of the loss over the samples, in minibatches.
        weight: number of these samples, in minibatches.
        lr: learning rate of that update; None if unknown.
    """

    step: int
    total: float
    weight: float
    lr: float | None = None


class LossReader:
    """Reads the losses of a replica of the last stage.

    Args:
        device: where they are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_late = is_read_late(device)
        self._copies: dict[int, _HostCopy] = {}
        self._unread: Callable[[], RoundLoss] | None = None

    def add(self, minibatch: int, loss: Tensor) -> None:
        """Start reading the loss of a minibatch, a scalar."""
        self._copies[minibatch] = _HostCopy(loss.detach())

    def end_round(
        self, step: int, weights: Mapping[int, float], epoch: int, lr: float | None = None
    ) -> RoundLoss | None:
        """End a round; return the round that can be read now (on a GPU the one before).

        Args:
            step: number of the update that ends the round.
            weights: minibatch of the round -> its samples over those of a full one.
            lr: learning rate of that update.

        Raises:
            PdtoolError: a loss is not a number.
        """
        copies = {i: self._copies.pop(i) for i in weights if i in self._copies}
        ended = partial(_read, step, epoch, dict(weights), copies, lr)
        due, self._unread = (self._unread, ended) if self._is_late else (ended, None)
        return due() if due else None

    def end_epoch(self) -> RoundLoss | None:
        """Return the round that is still unread, if there is one; raises as `end_round` does."""
        due, self._unread = self._unread, None
        return due() if due else None


def is_read_late(device: torch.device) -> bool:
    """Whether losses are read a round later."""
    return device.type == "cuda"


class _HostCopy:
    """A scalar on its way to the CPU."""

    def __init__(self, scalar: Tensor) -> None:
        self._value, self._copied = scalar, None
        if scalar.is_cuda:
            self._value = torch.empty(scalar.shape, dtype=scalar.dtype, pin_memory=True)
            self._value.copy_(scalar, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> float:
        """Wait for the copy, and so for the workers whose messages the loss depends on."""
        if self._copied:
            Status.of_this_process.wait_begins()
            self._copied.synchronize()
            Status.of_this_process.wait_ends()
        return float(self._value.item())


def _read(
    step: int, epoch: int, weights: Mapping[int, float], copies: Mapping[int, _HostCopy], lr: float | None
) -> RoundLoss:
    """Read and sum the losses of the minibatches of a round that has ended; raises PdtoolError if one is not
    finite."""
    total = 0.0
    for i, copy in copies.items():
        loss = copy.read()
        if not math.isfinite(loss):
            remedy = "try a lower learning rate, and check the data and the loss for division by zero or log(0)"
            raise PdtoolError(f"the loss is {loss} in minibatch {i} of epoch {epoch}", remedy)
        total += weights[i] * loss
    return RoundLoss(step, total, sum(weights.values()), lr)


class MetricTotals:
    """Sums and counts by name; those of a worker without the last stage stay empty.

    Attributes:
        undefined: names of metrics with a count of 0, which so have no figure.
    """

    def __init__(self, file: ModelFile) -> None:
        self._file, self.undefined = file, frozenset[str]()
        self._totals: dict[str, tuple[Any, float]] = {}

    def add(self, loss: Tensor, output: Any, target: Any, samples: int) -> None:
        """Add a minibatch: its loss, its output and target, and its number of samples."""
        metrics = {"loss": (float(loss) * samples, float(samples)), **self._file.metrics(output, target)}
        self._totals = _sum([self._totals, metrics])

    def summarize(self, group: Any, where: str) -> dict[str, float]:
        """Return the loss and the figures over all workers of `group`, on each of them.

        Args:
            where: names the validation in an error.

        Raises:
            PdtoolError: one of them is not a number.
        """
        own = {name: (_as_data(total), count) for name, (total, count) in self._totals.items()}
        gathered = all_gather(own, dict[str, tuple[float | bytes, float]], group, "the validation metrics")
        totals = _sum([{name: (_of_data(t), n) for name, (t, n) in each.items()} for each in gathered])  # in order
        loss, samples = totals.pop("loss")
        figures = {"loss": loss / samples} | self._file.summarize_metrics(totals)
        self.undefined = frozenset(name for name, (_, count) in totals.items() if not count and name not in figures)
        for name, value in figures.items():
            if not math.isfinite(value):
                remedy = "try a lower learning rate"
                if name != "loss":
                    remedy = f"look for a division by zero in metrics() or summarize_metrics(), or {remedy}"
                raise PdtoolError(f"{where} gives {name} {value}", remedy)
        return figures


def _as_data(total: Any) -> float | bytes:
    """A total in a form for other workers; a tensor, which `_wide` has made, as a file of numpy."""
    if not isinstance(total, Tensor):
        return float(total)
    file = io.BytesIO()
    np.save(file, total.detach().to_dense().resolve_conj().resolve_neg().numpy(), allow_pickle=False)
    return file.getvalue()


def _of_data(total: float | bytes) -> Any:
    return torch.from_numpy(np.load(io.BytesIO(total), allow_pickle=False)) if isinstance(total, bytes) else total


def _sum(parts: list[dict[str, tuple[Any, float]]]) -> dict[str, tuple[Any, float]]:
    total: dict[str, tuple[Any, float]] = {}
    for part in parts:
        for name, (value, count) in part.items():
            before = total.get(name)
            total[name] = (before[0] + value, before[1] + count) if before else (_wide(value), count)
    return total


def _wide(value: Any) -> Any:
    """A tensor of its own to add to, in which counts stay exact."""
    if not isinstance(value, Tensor):
        return value
    is_real = value.is_floating_point() or value.is_complex()
    return value.to(torch.promote_types(value.dtype, torch.float32) if is_real else torch.int64, copy=True)
