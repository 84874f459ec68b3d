"""Modules that take the time of a stage by sleeping, and send its bytes: what a slept emulation trains.

The files that `sleeping_model` writes import them. A minibatch is one sample of bytes that nobody reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

_HOST_AHEAD_S = 5e-4  # what a host does between two operators costs no time where it is so far ahead of its device


class Segment(NamedTuple):
    """Consecutive operators of one stage.

    Attributes:
        forward_s, backward_s, update_s: seconds that they take.
        floats: number of their parameters that no other stage holds, of 4 bytes each.
        shared: name -> number of each parameter that other stages hold, too.
    """

    forward_s: float
    backward_s: float
    update_s: float
    floats: int
    shared: Mapping[str, int] = {}


class SleepingDevice:
    """A device on which one thing is computed after the other, each for a given time."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def compute(self, seconds: float) -> None:
        """Return when the device has computed for `seconds`, from when it was free or this was asked for."""
        now_s = time.perf_counter()
        begin_s = self._free_s if now_s - self._free_s < _HOST_AHEAD_S else now_s
        self._free_s = begin_s + seconds
        time.sleep(max(0.0, self._free_s - now_s))


_DEVICE = SleepingDevice()  # of this process


class _Compute(torch.autograd.Function):
    """Takes the time of a segment; what it returns stands for its output, and is not looked at."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, segment: Segment, *parameters: Tensor) -> Tensor:
        ctx.segment, ctx.parameters = segment, parameters
        _DEVICE.compute(segment.forward_s)
        return torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = [torch.zeros_like(parameter) for parameter in ctx.parameters]
        _DEVICE.compute(ctx.segment.backward_s)
        return torch.zeros_like(gradients[0]), None, *made


class _Receive(torch.autograd.Function):
    """Takes the tensors that a stage receives; their gradients are of the same sizes."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.inputs = inputs
        return torch.zeros(1, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            torch.zeros_like(x) if needed else None for x, needed in zip(ctx.inputs, ctx.needs_input_grad, strict=True)
        )


class _Send(torch.autograd.Function):
    """Makes a tensor that a stage sends, of [1, floats]."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, floats: int) -> Tensor:
        return torch.zeros(1, floats)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return torch.zeros(1, 1), None


def _sent(token: Tensor, floats: int) -> Tensor:
    tensor: Tensor = _Send.apply(token, floats)  # type: ignore[no-untyped-call]
    return tensor


class SleepingSegment(nn.Module):
    """Takes the time of a segment while it trains, and none in a validation."""

    def __init__(self, segment: Segment) -> None:
        super().__init__()
        self.segment = segment
        self.weight = nn.Parameter(torch.zeros(max(1, segment.floats)))  # so that it has a backward
        for name, floats in segment.shared.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(floats)))

    def forward(self, token: Tensor) -> Tensor:
        """Return a token for the next segment, [1, 1]."""
        if not self.training:
            return token
        computed: Tensor = _Compute.apply(token, self.segment, *self.parameters())  # type: ignore[no-untyped-call]
        return computed


class SleepingStage(nn.Module):
    """A stage of segments, which a generated file gives.

    Attributes:
        SEGMENTS: name -> segment, in order.
        SENDS: floats of each tensor that it sends, and whether a gradient comes back; empty for the last stage.
    """

    SEGMENTS: ClassVar[Mapping[str, Segment]] = {}
    SENDS: ClassVar[Sequence[tuple[int, bool]]] = ()

    def __init__(self) -> None:
        super().__init__()
        for name, segment in self.SEGMENTS.items():
            self.add_module(name, SleepingSegment(segment))

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Take what other stages sent; return the tensors for other stages, or the model's output, [1, 1]."""
        token: Tensor = _Receive.apply(*inputs)  # type: ignore[no-untyped-call]
        for segment in self.children():
            token = segment(token)
        if not self.SENDS:
            return token
        sent = tuple(_sent(token if gradient else token.detach(), floats) for floats, gradient in self.SENDS)
        return sent[0] if len(sent) == 1 else sent


class SleepingModel(nn.Module):
    """All segments of a model; a shared parameter is the same tensor in each segment that has it.

    Args:
        segments: name -> segment, of all stages.
    """

    def __init__(self, segments: Mapping[str, Segment]) -> None:
        super().__init__()
        first: dict[str, nn.Parameter] = {}
        for name, segment in segments.items():
            module = SleepingSegment(segment)
            for shared in segment.shared:
                module.register_parameter(shared, first.setdefault(shared, module.get_parameter(shared)))
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, [1, 1]."""
        for segment in self.children():
            x = segment(x)
        return x


class SleepingSGD(torch.optim.Optimizer):
    """An optimizer whose step takes the time of its segments' updates, and changes nothing."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], segments: Mapping[str, Segment]) -> None:
        groups = []
        for name, parameter in named_parameters:
            segment, _, kind = name.rpartition(".")
            groups.append({"params": [parameter], "update_s": segments[segment].update_s if kind == "weight" else 0.0})
        super().__init__(groups, {"update_s": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no optimizer here takes a closure
        """Sleep."""
        _DEVICE.compute(sum(group["update_s"] for group in self.param_groups if group["params"]))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=0.0)


def empty_samples(count: int) -> Dataset[Any]:
    """Return a data set of `count` pairs of a number and a target."""
    return TensorDataset(torch.zeros(count, 1), torch.zeros(count, dtype=torch.long))
