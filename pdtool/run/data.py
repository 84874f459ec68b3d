"""Which samples are in which minibatch, and loading them: seed and epoch decide, never the plan."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from pdtool.artifacts.bundle import TensorSpec
from pdtool.errors import ModelError
from pdtool.frontend.model_io import register_containers
from pdtool.frontend.modelfile import ModelFile
from pdtool.run.config import RunConfig, derive_seed
from pdtool.run.messages.routes import dtype_of


@dataclass(frozen=True)
class DatasetSplit:
    """What every worker must know of a split of the dataset.

    Attributes:
        samples: its length.
        target: of a minibatch of one sample, which shows the structure of any target.
    """

    samples: int
    target: Any

    @cached_property
    def leaves(self) -> list[Any]:
        """The tensors of that target, [1, ...] each; it may hold None besides."""
        return _tensors_of(self.target)

    @cached_property
    def shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each of these tensors."""
        return _shapes_of(self.leaves)

    def unflatten(self, leaves: Sequence[Tensor]) -> Any:
        """Return a target as the user's loss takes it, from its tensors, [samples, ...] each."""
        if isinstance(self.target, Tensor):
            return leaves[0]
        remaining, (flat, structure) = iter(leaves), self._flat
        return tree_unflatten([None if leaf is None else next(remaining) for leaf in flat], structure)

    @cached_property
    def _flat(self) -> tuple[list[Any], TreeSpec]:
        register_containers(self.target)
        return tree_flatten(self.target)


@dataclass(frozen=True)
class Minibatches:
    """The samples of an epoch in minibatches of `size`; the last may be short."""

    order: Sequence[int]
    size: int

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def __getitem__(self, minibatch: int) -> Sequence[int]:
        return self.order[minibatch * self.size : (minibatch + 1) * self.size]

    def samples(self, minibatch: int) -> int:
        """Return the number of samples in a minibatch."""
        return min(self.size, len(self.order) - minibatch * self.size)

    def weight(self, minibatch: int) -> float:
        """Return the number of samples in a minibatch as a fraction of a full one."""
        return self.samples(minibatch) / self.size


@dataclass(frozen=True)
class DataPass:
    """One pass over a split: an epoch of training, or a validation."""

    split_name: str
    split: DatasetSplit
    minibatches: Minibatches
    run_seed: int
    epoch: int

    def seed(self, minibatch: int) -> int:
        """Return the seed of random augmentation of a minibatch."""
        return derive_seed(self.run_seed, self.split_name, self.epoch, "data", minibatch)


def samples_in_epoch(samples: int, config: RunConfig, *, drop_last: bool) -> int:
    """Return how many samples of the training set are in an epoch.

    Args:
        samples: of the training set, or those that sampler() chooses.
        drop_last: whether a short last minibatch is left out.

    Raises:
        ModelError: none is.
    """
    size = config.plan.batch_size
    count = min(samples, config.steps * size) if config.steps else samples
    count -= count % size if drop_last else 0
    if not count:
        what = f"with DROP_LAST the training set of {samples} samples has no minibatch of {size}"
        raise ModelError(what, "leave DROP_LAST out of model.py, or plan for a smaller minibatch")
    return count


def sample_order(seed: int, epoch: int, samples: int) -> list[int]:
    """Return the permutation of the training set in `epoch`: a function of these numbers only (law 8)."""
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, "order"))
    return torch.randperm(samples, generator=generator).tolist()


def seed_torch(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of the CPU and of `device`.

    torch.manual_seed seeds those of all devices, and where CUDA is not in use formats a stack trace each time: most of
    a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    if device and device.type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of torch, as `seed_torch` does, of Python and of numpy."""
    seed_torch(seed, device)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class MinibatchLoader:
    """Loads minibatches of one split of the user's dataset, at a worker of the first stage.

    Attributes:
        data: what dataset() returned.
        open_files: paths of files that dataset() left open.
    """

    def __init__(
        self, file: ModelFile, split: str, inputs: Sequence[TensorSpec], arguments: Sequence[str] = ()
    ) -> None:
        self.file, self.where = file, f"dataset({split!r})"
        before = _open_files()
        self.data: Any = file.dataset(split)
        self.open_files = [path for number, path in _open_files().items() if before.get(number) != path]
        self.inputs, self.arguments = inputs, arguments
        self._described: DatasetSplit | None = None

    def describe(self) -> DatasetSplit:
        """Return what the other workers must know; `load` checks the targets by it."""
        _, target = self.file.collate(self.data, [0], self.where)
        self._described = DatasetSplit(self.file.samples(self.data, self.where), target)
        self._check_target(target, 1)
        return self._described

    def sample_order(self, run_seed: int, epoch: int) -> list[int]:
        """Return the samples that the user's sampler() chooses for an epoch: a function of seed and epoch only.

        Raises:
            ModelError: it fails, or gives no samples, or one that the dataset does not have.
        """
        seed_generators(derive_seed(run_seed, epoch, "order"))
        order, samples = self.file.sampler(self.data, epoch), self.file.samples(self.data, self.where)
        wrong = [index for index in order if not 0 <= index < samples]
        if wrong or not order:
            what = f"gives sample {wrong[0]}, of {samples} samples" if wrong else "gives no samples"
            raise self.file.error(f"sampler() {what}, in epoch {epoch}", "return numbers from 0 to len(dataset) - 1")
        return order

    def load(self, indices: Sequence[int], seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """Load one minibatch.

        Args:
            indices: of its samples.
            seed: of random augmentation.

        Returns:
            The input tensors and the tensors of the target, [samples, ...] each.

        Raises:
            ModelError: a sample cannot be read or does not go with the others, or the inputs are not what the stages
                were generated for.
        """
        seed_generators(seed)
        given, target = self.file.collate(self.data, indices, self.where)
        arguments = self.file.as_inputs(given)
        self.file.check_arguments(arguments, self.arguments, self.where)
        inputs = arguments.tensors
        loaded = _shapes_of(inputs)
        expected = [(tensor.sizes(len(indices)), dtype_of(tensor)) for tensor in self.inputs]
        if loaded != expected:
            raise self.file.error(
                f"{self.where} gives inputs {_shapes(loaded)}; the stages take {_shapes(expected)}",
                "let samples be of that type"
                if [shape for shape, _ in loaded] == [shape for shape, _ in expected]
                else "let collate() pad to a fixed length, for stages have fixed shapes apart from the minibatch's size"
                if self.file.has("collate")
                else "generate the stages from inputs of the shape of the dataset's",
            )
        return inputs, self._check_target(target, len(indices))

    def _check_target(self, target: Any, samples: int) -> list[Any]:
        """Return the tensors of a minibatch's target, [samples, ...] each as those of one sample are [1, ...]."""
        leaves = _tensors_of(target)
        if self._described is None:
            return leaves
        expected = [((samples, *shape[1:]), dtype) for shape, dtype in self._described.shapes]
        loaded = _shapes_of(leaves)
        if loaded != expected:
            raise self.file.error(
                f"{self.where} gives targets {_shapes(loaded)}, where the first sample alone makes them "
                f"{_shapes(expected)}",
                "let targets have one row for each sample, and pad to a fixed length",
            )
        return leaves


def _open_files() -> dict[str, str]:
    """The regular files that this process has open: path by descriptor; none where the system does not say."""
    found = {}
    with suppress(OSError):
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # that of the listing itself is gone
                path = os.readlink(link)
                if Path(path).is_file() and not path.startswith(("/dev/", "/proc/")):
                    found[link.name] = path
    return found


def _tensors_of(target: Any) -> list[Any]:
    """The tensors of a target, and whatever else but None it holds."""
    if isinstance(target, Tensor):
        return [target]
    register_containers(target)
    return [leaf for leaf in tree_leaves(target) if leaf is not None]


def _shapes_of(values: Sequence[Any]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor among the values."""
    return [(tuple(value.shape), value.dtype) for value in values if isinstance(value, Tensor)]


def _shapes(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in shapes)
