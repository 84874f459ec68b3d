"""Which tensor goes from which stage to which: the same list on every worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.bundle import Tensor as Described
from pdtool.errors import ModelError

TARGET = "the target"


@dataclass(frozen=True)
class Wire:
    """One tensor from one stage straight to another, once per minibatch; its gradient comes back the same way.

    Attributes:
        number: its position in the list of all wires, which tells its messages apart.
        name: the tensor, or TARGET and a number.
    """

    number: int
    name: str
    source: int
    destination: int
    tensor: Described

    @property
    def dtype(self) -> torch.dtype:
        """`float32` -> torch.float32."""
        return dtype_of(self.tensor)

    def sizes(self, samples: int) -> tuple[int, ...]:
        """The shape for a minibatch of `samples`."""
        return self.tensor.sizes(samples)


def wires(bundle: Bundle, targets: Sequence[Described]) -> list[Wire]:
    """All wires; what stage 0's workers load (model inputs used later, targets) leaves from stage 0."""
    last = len(bundle.stages) - 1
    ends = [(tensor.name, max(tensor.producer, 0), consumer, tensor)
            for tensor in bundle.tensors for consumer in tensor.consumers]  # fmt: skip
    ends += [(f"{TARGET} {i}", 0, last, target) for i, target in enumerate(targets)]
    return [Wire(n, *end) for n, end in enumerate(end for end in ends if end[1] != end[2])]


def describe_targets(leaves: Sequence[Any]) -> list[Described]:
    """How the tensors of a target look in any minibatch, from those of a minibatch of one sample."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ModelError(
                f"a target of the dataset holds {type(leaf).__name__}, which cannot be sent to another worker",
                "let dataset() give tensors or numbers, or tuples and dicts of them",
            )
    return [
        Described(
            name=f"target_{i}", producer=-1, consumers=(), shape=("batch", *leaf.shape[1:]),
            dtype=str(leaf.dtype).removeprefix("torch."), gradient=False,
        )
        for i, leaf in enumerate(leaves)
    ]  # fmt: skip


def dtype_of(tensor: Described) -> torch.dtype:
    """The tensor's dtype, whose name the artifact has checked."""
    found = getattr(torch, tensor.dtype)
    assert isinstance(found, torch.dtype)
    return found
