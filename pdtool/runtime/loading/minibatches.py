"""Minibatches as sample numbers. The seed and the epoch decide which samples a minibatch has, never the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from pdtool.errors import ModelError, UsageError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import Structure, children, named_leaves, register_containers
from pdtool.frontend.random_numbers import derive_seed
from pdtool.runtime.config import RunConfig

NO_LENGTH = "dataset('train') is an IterableDataset without a length, so the length of an epoch is unknown"
VALIDATION_PASS = 0  # over a stream: each validation reads the same pass
Shape = tuple[tuple[int, ...], torch.dtype]
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class DatasetSplit:
    """What every worker must know about a split of the dataset.

    Attributes:
        samples: its length; None for a training set that is a stream of unknown length.
        structure: structure of the target of a minibatch of one sample.
        is_stream: whether it is an IterableDataset.
    """

    samples: int | None
    structure: Structure
    is_stream: bool = False

    @cached_property
    def target(self) -> Any:
        """A target of that structure; raises ModelError if this process cannot make it."""
        return self.structure.example()

    @cached_property
    def leaves(self) -> list[Any]:
        """The tensors of that target, [1, ...] each, without None."""
        return tensors_of_target(self.target, 1)

    @cached_property
    def shapes(self) -> list[Shape]:
        """Shape and dtype of each of these tensors."""
        return shapes_of(self.leaves)

    def flatten(self, target: Any, samples: int) -> list[Any]:
        """Return the tensors of a target with this structure, [samples, ...] each, as `tensors_of_target` does.

        Raises:
            ValueError: it has other containers, keys, numbers or None.
        """
        if isinstance(self.target, Tensor) and isinstance(target, Tensor):
            return [target]
        register_containers(target)
        described, found = (dict(named_leaves(each, "target")) for each in (self.target, target))
        if described.keys() != found.keys() or _dataclasses(self.target) != _dataclasses(target):
            raise ValueError("it has other parts")
        leaves = [found[name] for name in described]  # a dict's keys may be in another order
        for own, leaf in zip(described.values(), leaves, strict=True):
            if not (isinstance(leaf, Tensor) and isinstance(own, Tensor)) and type(leaf) is not type(own):
                raise ValueError(f"a part is of type {type(leaf)}, not {type(own)}")
        if not all(leaf is None or isinstance(leaf, Tensor) or type(leaf) in _NUMBERS for leaf in leaves):
            return tensors_of_target(target, samples)  # with a container that has no names for its parts
        return [_in_tensor(leaf, samples) for leaf in leaves if leaf is not None]

    def unflatten(self, leaves: Sequence[Tensor]) -> Any:
        """Return a target as the user's loss takes it, from its tensors, [samples, ...] each."""
        if isinstance(self.target, Tensor):
            return leaves[0]
        remaining, (flat, structure) = iter(leaves), self._flat
        values = [None if leaf is None else _as_collated(leaf, next(remaining)) for leaf in flat]
        return tree_unflatten(values, structure)

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

    def __getitem__(self, minibatch: int) -> list[int]:
        return list(self.order[minibatch * self.size : (minibatch + 1) * self.size])

    def samples(self, minibatch: int) -> int:
        """Return the number of samples in a minibatch."""
        return min(self.size, len(self.order) - minibatch * self.size)

    def weight(self, minibatch: int) -> float:
        """Return the number of samples in a minibatch as a fraction of a full one."""
        return self.samples(minibatch) / self.size


@dataclass(frozen=True)
class DataPass:
    """One pass over a split: an epoch of training, or a validation.

    Attributes:
        stream_pass: the pass over an IterableDataset that its samples count in; None: they count over all passes,
            because each epoch continues the one before.
    """

    split_name: str
    split: DatasetSplit
    minibatches: Minibatches
    run_seed: int
    epoch: int
    stream_pass: int | None = None

    def seed(self, minibatch: int) -> int:
        """Return the seed of random augmentation of a minibatch."""
        return derive_seed(self.run_seed, self.split_name, self.epoch, "data", minibatch)


class TrainingData:
    """The data of a run at one worker.

    Args:
        sampled: returns an epoch's samples, in order, if model.py has a sampler(); all workers call it together.
        check_length: if this worker loads minibatches, checks in an epoch that the training set is as long as before;
            other workers only need to know the number of samples in each minibatch.
        loader_workers: number of its loader workers.

    Attributes:
        splits: the training set and the validation set, `train` and `valid`.
        epoch_samples, epoch_minibatches: samples of the training set in an epoch, and the minibatches that they make.

    Raises:
        ModelError: an epoch has no minibatch.
        UsageError: the number of samples in an epoch is unknown.
    """

    def __init__(
        self,
        config: RunConfig,
        file: ModelFile,
        splits: Mapping[str, DatasetSplit],
        sampled: Callable[[int], Sequence[int]] | None,
        *,
        check_length: Callable[[int], None] | None = None,
        loader_workers: int = 0,
    ) -> None:
        self.file, self.splits, self._check_length, self.loader_workers = file, splits, check_length, loader_workers
        self._seed, self._sampled = config.seed, sampled
        self._first_order = sampled(1) if sampled else None  # for its length; sampler() is called once for each epoch
        self._chosen = splits["train"].samples if self._first_order is None else len(self._first_order)
        self.epoch_samples = samples_in_epoch(self._chosen, config, drop_last=file.training.drop_last)
        self.epoch_minibatches = -(-self.epoch_samples // config.plan.batch_size)
        self._takes_all = not config.steps
        self._epochs_go_on = epochs_go_on(splits["train"], config)

    def order_of_epoch(self, epoch: int, trained: int) -> Sequence[int]:
        """Return the samples of an epoch, in order; all workers call it together.

        A worker that loads nothing gets a range of the same length.

        Args:
            trained: samples of all earlier epochs, for a stream that continues from epoch to epoch.

        Raises:
            ModelError: there are more or fewer samples than in the first epoch.
        """
        if self._sampled:
            order = self._first_order if epoch == 1 and self._first_order else self._sampled(epoch)
            self._first_order = None
        elif self._chosen is None or self.splits["train"].is_stream:
            first = trained if self._epochs_go_on else 0
            return range(first, first + self.epoch_samples)
        elif self._check_length:
            if self._takes_all:
                self._check_length(epoch)
            order = sample_order(self._seed, epoch, self._chosen)
        else:
            order = range(self._chosen)
        if len(order) != self._chosen:
            what = f"sampler() gives {len(order)} samples in epoch {epoch}, but {self._chosen} in epoch 1"
            raise self.file.error(what, "return the same number in each epoch, as the run's schedule needs it")
        return order[: self.epoch_samples] if self._check_length else range(self.epoch_samples)

    def data_pass(self, split: str, epoch: int, minibatches: Minibatches) -> DataPass:
        """Return an epoch of training ("train"), or the validation after it ("valid")."""
        stream_pass = VALIDATION_PASS if split == "valid" else None if self._epochs_go_on else epoch
        return DataPass(split, self.splits[split], minibatches, self._seed, epoch, stream_pass)


def samples_in_epoch(samples: int | None, config: RunConfig, *, drop_last: bool) -> int:
    """Return how many samples of the training set are in an epoch.

    Args:
        samples: samples of the training set, or chosen by sampler(); None for a stream of unknown length.
        drop_last: whether to leave out a short last minibatch.

    Raises:
        ModelError: no minibatch is left.
        UsageError: the number is unknown.
    """
    size = config.plan.batch_size
    limit = config.steps * size if config.steps else None
    count = min((number for number in (samples, limit) if number is not None), default=None)
    if count is None:
        raise UsageError(NO_LENGTH, "give it with --steps: each epoch then continues where the one before ended")
    count -= count % size if drop_last else 0
    if not count:
        what = f"with DROP_LAST the training set of {samples} samples has no minibatch of {size}"
        raise ModelError(what, "remove DROP_LAST from the model file, or plan for a smaller minibatch")
    return count


def epochs_go_on(split: DatasetSplit, config: RunConfig) -> bool:
    """Whether an epoch is a part of a stream that the next one continues; else it is a pass over the stream."""
    if not split.is_stream or not config.steps:
        return False
    return split.samples is None or config.steps * config.plan.batch_size < split.samples


def sample_order(seed: int, epoch: int, samples: int) -> memoryview[int]:
    """Return the permutation of the training set in `epoch`: a function of these numbers only (law 8).

    It takes four bytes a sample, or eight from 2^31 samples on, and is the same in both.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, "order"))
    dtype = torch.int32 if samples < 2**31 else torch.int64
    order: Any = torch.randperm(samples, generator=generator, dtype=dtype).numpy()
    return memoryview(order)


def tensors_of_target(target: Any, samples: int) -> list[Any]:
    """Return the tensors of a target, and everything else in it except None.

    A Python number, such as a count from collate(), becomes a tensor [samples], so that it can travel.
    """
    if isinstance(target, Tensor):
        return [target]
    register_containers(target)
    return [_in_tensor(leaf, samples) for leaf in tree_leaves(target) if leaf is not None]


def outline(target: Any) -> str:
    """Return a target's class and parts for a message: `dict (target.hard: Tensor, target.soft: None)`."""
    register_containers(target)
    parts = ", ".join(f"{name}: {_type_name(leaf)}" for name, leaf in named_leaves(target, "target"))
    return _type_name(target) if parts.startswith("target:") else f"{_type_name(target)} ({parts})"


def _dataclasses(value: Any) -> list[str]:
    """The classes of the dataclasses in a target, sorted."""
    inner = [name for _, child in children(value) or () for name in _dataclasses(child)]
    return sorted([*inner, type(value).__qualname__] if is_dataclass(value) else inner)


def _type_name(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _in_tensor(leaf: Any, samples: int) -> Any:
    dtype = _NUMBERS.get(type(leaf))
    if dtype is None or (dtype == torch.int64 and leaf.bit_length() > 63):
        return leaf
    return torch.full((samples,), leaf, dtype=dtype)


def _as_collated(described: Any, leaf: Tensor) -> Any:
    """A part of a target in its original form: a tensor or a number."""
    return leaf[0].item() if type(described) in _NUMBERS else leaf


def shapes_of(values: Sequence[Any]) -> list[Shape]:
    """Return shape and dtype of each tensor among the values."""
    return [(tuple(value.shape), value.dtype) for value in values if isinstance(value, Tensor)]
