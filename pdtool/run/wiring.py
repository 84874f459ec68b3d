"""Which tensor goes from which stage to which: the same list on every worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdtool.artifacts.bundle import Bundle, TensorSpec
from pdtool.errors import ModelError

TARGET = "the target"


@dataclass(frozen=True)
class Wire:
    """One tensor from one stage straight to another, once per minibatch; its gradient comes back the same way.

    Attributes:
        number: its position in the list of all wires, which tells its messages apart.
        name: the tensor, or TARGET and a number.
        narrow: the dtype that float32 has on its way, if another.
    """

    number: int
    name: str
    source: int
    destination: int
    tensor: TensorSpec
    narrow: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """`float32` -> torch.float32."""
        return dtype_of(self.tensor)

    @property
    def carried(self) -> torch.dtype:
        """The dtype on its way."""
        return self.narrow if self.narrow and self.dtype == torch.float32 else self.dtype

    def sizes(self, samples: int) -> tuple[int, ...]:
        """The shape for a minibatch of `samples`."""
        return self.tensor.sizes(samples)


@dataclass(frozen=True)
class Hop:
    """What one worker sends to another between two stages in one direction: one message for each of its minibatches.

    Attributes:
        number: its position in the list of all hops.
        lane: `forward` or `backward`.
        source, target: stages, the way the messages go.
        sender, receiver: ranks.
        every, first: its minibatches are those i with i mod every == first.
        wires: those whose tensors, or gradients, are in a message, in this order.
    """

    number: int
    lane: str
    source: int
    target: int
    sender: int
    receiver: int
    every: int
    first: int
    wires: tuple[Wire, ...]

    def has(self, minibatch: int) -> bool:
        """Whether this minibatch goes this way."""
        return minibatch % self.every == self.first

    def message(self, minibatch: int) -> str:
        """`forward 'b' of minibatch 4`."""
        return f"{self.lane} {', '.join(repr(wire.name) for wire in self.wires)} of minibatch {minibatch}"


def wires(bundle: Bundle, targets: Sequence[TensorSpec], narrow: torch.dtype | None = None) -> list[Wire]:
    """All wires; what stage 0's workers load (model inputs used later, targets) leaves from stage 0."""
    last = len(bundle.stages) - 1
    ends = [
        (tensor.name, max(tensor.producer, 0), consumer, tensor)
        for tensor in bundle.tensors
        for consumer in tensor.consumers
    ]
    ends += [(f"{TARGET} {i}", 0, last, target) for i, target in enumerate(targets)]
    return [Wire(n, *end, narrow) for n, end in enumerate(end for end in ends if end[1] != end[2])]


def hops(wires: Sequence[Wire], members: Sequence[Sequence[int]]) -> list[Hop]:
    """All hops of both lanes; minibatch i is at replica i mod r of each stage.

    Args:
        members: the ranks of each stage's replicas.
    """
    between: dict[tuple[str, int, int], list[Wire]] = {}
    for wire in wires:
        between.setdefault(("forward", wire.source, wire.destination), []).append(wire)
        if wire.tensor.gradient:
            between.setdefault(("backward", wire.destination, wire.source), []).append(wire)
    ends = [
        (lane, source, target, from_[i % len(from_)], to[i % len(to)], every, i, tuple(group))
        for (lane, source, target), group in between.items()
        for from_, to in [(members[source], members[target])]
        for every in [math.lcm(len(from_), len(to))]
        for i in range(every)
    ]
    return [Hop(number, *end) for number, end in enumerate(ends)]


def describe_targets(leaves: Sequence[Any]) -> list[TensorSpec]:
    """How the tensors of a target look in any minibatch, from those of a minibatch of one sample."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ModelError(
                f"a target of the dataset holds {type(leaf).__name__}, which cannot be sent to another worker",
                "let dataset() give tensors or numbers, or tuples and dicts of them",
            )
    return [
        TensorSpec(
            name=f"target_{i}",
            producer=-1,
            consumers=(),
            shape=("batch", *leaf.shape[1:]),
            dtype=str(leaf.dtype).removeprefix("torch."),
            gradient=False,
        )
        for i, leaf in enumerate(leaves)
    ]


def dtype_of(tensor: TensorSpec) -> torch.dtype:
    """The tensor's dtype, whose name the artifact has checked."""
    found = getattr(torch, tensor.dtype)
    assert isinstance(found, torch.dtype)
    return found
