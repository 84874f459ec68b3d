"""What the user's file says of data: `dataset`, `example_inputs`, `sampler` and `collate`."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from pdtool.frontend.model_io import LEAVES, ModelInputs
from pdtool.frontend.user_code import collate, is_stream, read_samples, stream_samples
from pdtool.frontend.user_functions.prepare_model import seed_all_generators
from pdtool.frontend.user_functions.user_file import UserFile


class DataFunctions(UserFile):
    """The functions of a user's file that give data."""

    def example_inputs(self, batch_size: int) -> ModelInputs:
        """Return the model's arguments for a minibatch: from `example_inputs`, or the first of the training set.

        Raises:
            ModelError: the user's function fails, or an input is neither tensor nor constant.
        """
        if self.has("example_inputs"):
            inputs = self.call_with_settings("example_inputs", batch_size)
        else:
            inputs = self.example_batch(batch_size)[0]
        return self.as_inputs(inputs)

    def as_inputs(self, inputs: Any) -> ModelInputs:
        """Return the inputs of a minibatch as the model's arguments; raises ModelError for what is no input."""
        arguments = ModelInputs.of(inputs)
        leaves = arguments.leaves
        allowed = LEAVES if any(isinstance(value, Tensor) for _, value in leaves) else (Tensor,)
        for name, value in leaves:
            if not isinstance(value, allowed):
                raise self.error(
                    f"input {name} of a minibatch is {type(value).__name__}, not a tensor",
                    "let inputs be a tensor, or a tuple or dict of tensors, in example_inputs and in dataset",
                )
        return arguments

    def check_arguments(self, inputs: ModelInputs, expected: Sequence[str], where: str) -> None:
        """Check that a minibatch is passed to the model as `expected`, a signature, says; raises ModelError."""
        if inputs.signature != tuple(expected):
            given, taken = (", ".join(names) or "tensors by position" for names in (inputs.signature, expected))
            what = f"{where} gives the model other arguments ({given}) than it was traced with ({taken})"
            raise self.error(what, "let example_inputs and dataset give the same; a dict is passed by name")

    def example_batch(self, batch_size: int) -> tuple[Any, Any]:
        """Return (inputs, target): the first `batch_size` samples of the training set, collated."""
        data, name, indices = self.dataset("train"), "dataset('train')", range(batch_size)
        if is_stream(data):
            samples = list(islice(self.stream(data, name), batch_size))
        else:
            samples = self.read(data, indices[: self.samples(data, name)], name)
        if len(samples) < batch_size:
            what = f"the training set has {len(samples)} samples, fewer than one minibatch of {batch_size}"
            raise self.error(what, "profile with a smaller --batch-size")
        return self.collate(samples, indices, name)

    def dataset(self, split: str) -> Dataset[Any]:
        """Return the samples (inputs, target) of `split`, which is "train" or "valid".

        Both are made from the same random numbers, whatever the seed of the run: `random_split` in `dataset()` divides
        the samples alike each time, so that those of one split are never in the other.
        """
        seed_all_generators(0)
        data = self.call_with_settings("dataset", split)
        if not is_stream(data) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            what = f"dataset({split!r}) returned {type(data).__name__}, not a torch Dataset"
            remedy = "return one with __len__ and __getitem__, an IterableDataset, or a list of samples"
            raise self.error_in("dataset", what, remedy)
        if is_stream(data) and split == "train" and self.has("sampler"):
            what = f"sampler() chooses samples by number, and those of a {type(data).__name__}, a stream, have none"
            raise self.error_in("sampler", what, "leave it out, or let dataset() return one with __getitem__")
        if self.samples(data, f"dataset({split!r})") == 0:
            raise self.error_in("dataset", f"dataset({split!r}) is empty")
        return data  # type: ignore[no-any-return]

    def samples(self, data: Any, name: str) -> int | None:
        """Return the length of a split of the dataset, which `name` names in an error.

        None for an IterableDataset that does not know it: it has no length, or says so by the error that is usual.
        """
        try:
            return len(data)
        except Exception as error:
            if is_stream(data) and isinstance(error, (TypeError, NotImplementedError)):
                return None
            raise self.error_at(error, f"the length of {name}") from error

    def sampler(self, data: Any, epoch: int) -> list[int]:
        """Return which samples of the training set `data` an epoch has, in order, as the user's function says.

        Raises:
            ModelError: it fails, or gives something else than numbers.
        """
        returned = self.call_with_settings("sampler", data, epoch)
        try:
            return [operator.index(index) for index in returned]
        except TypeError as error:
            what = f"sampler() returned {returned!r:.80}, which does not give numbers of samples ({error})"
            raise self.error(what, "return a list of them, or a torch Sampler") from error

    def read(self, data: Any, indices: Iterable[int], name: str) -> list[Any]:
        """Return some samples of a split of the dataset, which `name` names in an error; raises ModelError."""
        return read_samples(self.path, data, indices, name)

    def stream(self, data: Any, name: str) -> Iterator[Any]:
        """Iterate over a split that is an IterableDataset, which `name` names in an error; raises ModelError."""
        return stream_samples(self.path, data, name)

    def collate(self, samples: Sequence[Any], indices: Sequence[int], name: str) -> tuple[Any, Any]:
        """Return (inputs, target) of some samples of a split of the dataset.

        Args:
            indices: the numbers of the samples, for errors.
            name: of the split, for errors.

        Raises:
            ModelError: a sample does not go with the others, or there is no pair of them.
        """
        function = partial(self.module.collate, **self.settings_of("collate")) if self.has("collate") else None
        return collate(self.path, samples, indices, name, function)
