"""Which samples are in which minibatch, and loading them: seed and epoch decide, never the plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten
from torch.utils.data import default_collate

from pdtool.artifacts.bundle import TensorSpec
from pdtool.errors import ModelError
from pdtool.frontend.modelfile import ModelFile, user_line
from pdtool.run.spec import seed_of
from pdtool.run.wiring import dtype_of


@dataclass(frozen=True)
class Split:
    """What every worker must know of a dataset: its length, and the target of a minibatch of one sample."""

    samples: int
    target: Any

    @property
    def leaves(self) -> list[Any]:
        """The tensors of the target."""
        return tree_leaves(self.target)

    def unflatten(self, leaves: Sequence[Tensor]) -> Any:
        """A target as the user's loss takes it."""
        return tree_unflatten(list(leaves), tree_structure(self.target))


@dataclass(frozen=True)
class Minibatches:
    """An epoch's samples cut into minibatches of `size`; the last may be short."""

    order: Sequence[int]
    size: int

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def __getitem__(self, minibatch: int) -> Sequence[int]:
        return self.order[minibatch * self.size : (minibatch + 1) * self.size]

    def samples(self, minibatch: int) -> int:
        """Number of samples in it."""
        return min(self.size, len(self.order) - minibatch * self.size)

    def weight(self, minibatch: int) -> float:
        """The same as a fraction of a whole minibatch."""
        return self.samples(minibatch) / self.size


def sample_order(seed: int, epoch: int, samples: int) -> list[int]:
    """The permutation of the training set in `epoch`: a function of these numbers only (law 8)."""
    generator = torch.Generator().manual_seed(seed_of(seed, epoch, "order"))
    return torch.randperm(samples, generator=generator).tolist()


def seed_torch(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of the CPU and of `device`.

    torch.manual_seed seeds those of all devices, and where CUDA is not in use formats a stack trace each time: most of
    a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    if device and device.type == "cuda":
        torch.cuda.manual_seed(seed)


class Loader:
    """One split of the user's data, at a worker of the first stage."""

    def __init__(self, file: ModelFile, split: str, inputs: Sequence[TensorSpec]) -> None:
        self.file = file
        self.where = f"{file.path.name}: dataset({split!r})"
        self.data: Any = file.dataset(split)
        self.inputs = inputs

    def describe(self) -> Split:
        """What the other workers must know."""
        _, target = self._collate([0])
        return Split(len(self.data), target)

    def load(self, indices: Sequence[int], seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """Input tensors and the tensors of the target of one minibatch; `seed` fixes random augmentation.

        Raises:
            ModelError: the inputs are not what the stages were generated for.
        """
        seed_torch(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        inputs, target = self._collate(indices)
        inputs = list(self.file.as_inputs(inputs))
        found = [(tuple(value.shape), value.dtype) for value in inputs]
        expected = [(tensor.sizes(len(indices)), dtype_of(tensor)) for tensor in self.inputs]
        if found != expected:
            raise ModelError(
                f"{self.where} gives inputs {_shapes(found)}; the stages take {_shapes(expected)}",
                "generate the stages from inputs of the shape of the dataset's",
            )
        return inputs, tree_leaves(target)

    def _collate(self, indices: Sequence[int]) -> tuple[Any, Any]:
        try:
            samples = [self.data[i] for i in indices]
        except Exception as error:
            line = user_line(error, self.file.path)
            raise ModelError(f"{line}{self.where} raised {type(error).__name__}: {error}") from error
        if not all(isinstance(sample, (tuple, list)) and len(sample) == 2 for sample in samples):
            raise ModelError(f"{self.where}: a sample is not a pair (inputs, target)")
        inputs, target = default_collate(samples)
        return inputs, target


def _shapes(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in shapes)
