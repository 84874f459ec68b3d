"""Loader of one split of the user's dataset; it checks that minibatches match the stages' inputs.

`SampleStream` reads an IterableDataset by sample numbers, so that any dataset is dealt out in the same way.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdtool.artifacts.bundle import TensorSpec
from pdtool.errors import ModelError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import Structure, dtype_of
from pdtool.frontend.model_rules import target_fault
from pdtool.frontend.random_numbers import (
    derive_seed,
    generator_state,
    has_known_state,
    random_state_kept,
    seed_generators,
    set_generator_state,
)
from pdtool.frontend.user_code import is_stream
from pdtool.runtime.loading.minibatches import (
    VALIDATION_PASS,
    DatasetSplit,
    Shape,
    outline,
    shapes_of,
    tensors_of_target,
)
from pdtool.units import counted, format_seconds


class MinibatchLoader:
    """Loads minibatches of one split of the user's dataset.

    Args:
        inputs: the tensors of a minibatch that the stages take.
        arguments: the model's arguments when it was traced.
        seed: seed of the run.

    Attributes:
        data: the result of dataset().
        is_stream: whether it is an IterableDataset.
        open_files: paths of files that dataset() left open.
    """

    def __init__(
        self, file: ModelFile, split: str, inputs: Sequence[TensorSpec], arguments: Sequence[str] = (), *, seed: int = 0
    ) -> None:
        self.file, self.where = file, f"dataset({split!r})"
        before = _open_files()
        self.data: Any = file.dataset(split)
        self.open_files = [path for number, path in _open_files().items() if before.get(number) != path]
        self.is_stream = is_stream(self.data)
        self._stream = SampleStream(file, self.data, self.where, seed)
        self.inputs, self.arguments, self._split = inputs, arguments, split
        self._described: DatasetSplit | None = None

    def describe(self, counts_within_s: float = math.inf) -> DatasetSplit:
        """Describe the split for other workers; `load` checks targets against this. The attributes of a stream, and
        generators in them, are then as before.

        Args:
            counts_within_s: a validation set without a length is read once, to count it, within these seconds.

        Raises:
            ModelError: the first sample cannot be read, its target cannot be described to other workers, or the
                validation set is empty or does not end in time.
        """
        samples = self.file.samples(self.data, self.where)
        with _attributes_kept(self.data) if self.is_stream else nullcontext():
            if samples is None and self._split == "valid":
                samples = self._stream.count(VALIDATION_PASS, counts_within_s)
            _, target = self.file.collate(self._read([0], VALIDATION_PASS), [0], self.where)
            self._stream.close()
        self._described = DatasetSplit(samples, Structure.of(target), self.is_stream)
        self._check_target(target, 1)
        return self._described

    def try_first_minibatch(self, batch_size: int) -> None:
        """Load the first minibatch of the described validation set, so that its errors do not come after an epoch;
        raises ModelError."""
        samples = self._described.samples if self._described else None
        with _attributes_kept(self.data) if self.is_stream else nullcontext():
            self.load(range(min(batch_size, samples or batch_size)), 0, VALIDATION_PASS)
            self._stream.close()

    def check_length(self, epoch: int) -> None:
        """Check that the dataset is as long as it was when it was described; raises ModelError."""
        samples = self.file.samples(self.data, self.where)
        if self._described and samples != self._described.samples:
            before = self._described.samples
            what = f"{self.where} has {samples} samples at the start of epoch {epoch}, but had {before}"
            raise self.file.error(what, "keep its length, which the run's schedule needs, or set --steps")

    def order_by_sampler(self, run_seed: int, epoch: int) -> list[int]:
        """Return the samples that the user's sampler() chooses for an epoch: a function of seed and epoch only.

        Raises:
            ModelError: it fails, or returns no samples, or one that the dataset does not have.
        """
        seed_generators(derive_seed(run_seed, epoch, "order"))
        order, samples = self.file.sampler(self.data, epoch), len(self.data)
        wrong = [index for index in order if not 0 <= index < samples]
        if wrong or not order:
            what = f"index {wrong[0]}, but the dataset has {samples} samples" if wrong else "no indices"
            remedy = "return indices from 0 to len(dataset) - 1"
            raise self.file.error(f"in epoch {epoch}, sampler() returned {what}", remedy)
        return order

    def load(
        self, indices: Sequence[int], seed: int, stream_pass: int | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Load one minibatch.

        Args:
            indices: numbers of its samples.
            seed: seed of random augmentation.
            stream_pass: for an IterableDataset, the pass that the numbers count in (see SampleStream.read).

        Returns:
            The input tensors and the tensors of the target, [samples, ...] each.

        Raises:
            ModelError: a sample cannot be read or does not match the others, or the inputs do not match the stages.
        """
        seed_generators(seed)
        given, target = self.file.collate(self._read(indices, stream_pass), indices, self.where)
        arguments = self.file.as_inputs(given)
        self.file.check_arguments(arguments, self.arguments, self.where)
        inputs = arguments.tensors
        self._check_inputs(inputs, len(indices))
        return inputs, self._check_target(target, len(indices))

    def _read(self, indices: Sequence[int], stream_pass: int | None) -> Any:
        if self.is_stream:
            return self._stream.read(stream_pass, indices)
        return self.file.read(self.data, indices, self.where)

    def _check_inputs(self, inputs: Sequence[Tensor], samples: int) -> None:
        """Check that the stages take the inputs, [samples, ...] each."""
        loaded = shapes_of(inputs)
        expected = [(tensor.sizes(samples), dtype_of(tensor)) for tensor in self.inputs]
        if loaded != expected:
            what = f"{self.where} gives inputs {_shapes(loaded)}, but the stages take {_shapes(expected)}"
            raise self.file.error(what, self._remedy(loaded, expected))

    def _remedy(self, loaded: Sequence[Shape], expected: Sequence[Shape]) -> str:
        if [shape for shape, _ in loaded] == [shape for shape, _ in expected]:
            wrong = (
                f"{tensor.name} to {tensor.dtype}, for example with .to(torch.{tensor.dtype})"
                for tensor, found, wanted in zip(self.inputs, loaded, expected, strict=True)
                if found != wanted
            )
            return "convert " + ", and ".join(wrong)
        if self.file.has("collate"):
            return "pad to a fixed length in collate(): between stages only the minibatch size may vary"
        if self.file.has("example_inputs"):
            return "let example_inputs() return tensors with the shapes of the dataset's samples, and profile again"
        return "give all samples of both splits the same shape: between stages only the minibatch size may vary"

    def _check_target(self, target: Any, samples: int) -> list[Any]:
        """Return the tensors of a minibatch's target, [samples, ...] each as those of one sample are [1, ...]."""
        if self._described is None:
            return tensors_of_target(target, samples)
        try:
            leaves, has_structure = self._described.flatten(target, samples), True
        except ValueError:
            leaves, has_structure = tensors_of_target(target, samples), False
        expected = [((samples, *shape[1:]), dtype) for shape, dtype in self._described.shapes]
        loaded = shapes_of(leaves)
        if loaded != expected:
            if fault := target_fault(target, self._described.target, samples):
                raise self.file.error(f"{self.where} {fault[0]}", fault[1])
            given = f"{self.where} gives targets {_shapes(loaded)} for {counted(samples, 'sample')}"
            raise self.file.error(f"{given}, not {_shapes(expected)}", "give all targets the same dtypes")
        if not has_structure:
            what = (
                f"{self.where} gives a target {outline(target)}, but its first sample {outline(self._described.target)}"
            )
            raise self.file.error(what, "give all targets the same containers and keys, and None in the same places")
        return leaves


@contextmanager
def _attributes_kept(stream: Any) -> Iterator[None]:
    """Restore a stream's attributes at the end, and the states of generators in them: each pass may change them.

    All of them, because one may count what is in another; so data that it loads in its first pass are loaded again.
    """
    before = vars(stream).copy()
    states = [(value, generator_state(value)) for value in before.values() if has_known_state(value)]
    yield
    for name in vars(stream).keys() - before.keys():
        del vars(stream)[name]
    vars(stream).update(before)
    for generator, state in states:
        set_generator_state(generator, state)


def _open_files() -> dict[str, str]:
    """The regular files that this process has open: path by descriptor."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own descriptor is gone
            path = os.readlink(link)
            if Path(path).is_file() and not path.startswith(("/dev/", "/proc/")):
                found[link.name] = path
    return found


def _shapes(shapes: Sequence[Shape]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in shapes)


class SampleStream:
    """The samples of an IterableDataset, read by their numbers.

    pass 1                 pass 2
    0  1  2  3  4  5  6    7  8  9 ...       numbers over all passes, if epochs go on from each other
    0  1  2  3  4  5  6    0  1  2 ...       numbers in one pass, if each epoch is one

    It skips samples of other replicas, and samples that a resumed run has already trained.

    Samples draw from random generators of their own, seeded for each pass. So a sample does not depend on other draws,
    on skipped samples, or on the minibatch size. If the dataset has `set_epoch`, as Hugging Face's do, it gets the
    number of the pass.

    Args:
        data: the dataset.
        name: name of the split, for errors.
        seed: seed of the run.
    """

    def __init__(self, file: ModelFile, data: Any, name: str, seed: int) -> None:
        self._file, self._data, self._name, self._seed = file, data, name, seed
        self._counted_pass: int | None = None
        self._next, self._pass, self._read_of_pass = 0, 0, 0
        self._samples: Iterator[Any] | None = None
        self._has_warned, self._is_empty = False, True
        # The states of torch's, numpy's and Python's generators between reads.
        self._generator_states: tuple[Any, ...] | None = None

    def read(self, pass_number: int | None, numbers: Sequence[int]) -> list[Any]:
        """Return consecutive samples.

        Args:
            pass_number: the pass that the numbers count in; None: they count over all passes from pass 1 on.
            numbers: numbers of the samples.

        Raises:
            ModelError: a sample cannot be made, or the pass has fewer, or is empty.
        """
        with self._own_generators():
            if self._samples is None or pass_number != self._counted_pass or numbers[0] < self._next:
                self._warn_of_samples_beyond_the_length()
                self._counted_pass, self._next = pass_number, 0
                self._samples = self._samples_from(pass_number)
            first, self._next = numbers[0] - self._next, numbers[0] + len(numbers)
            return list(islice(self._samples, first, first + len(numbers)))

    def count(self, pass_number: int, within_s: float) -> int:
        """Return how many samples a pass has, by reading it.

        Raises:
            ModelError: it does not end in time.
        """
        end_s = time.monotonic() + within_s
        with self._own_generators():
            for _ in self._pass_of(pass_number):
                if time.monotonic() > end_s:
                    raise self._file.error(
                        f"{self._name} has no length and did not end within {format_seconds(within_s)}, after "
                        f"{self._read_of_pass} samples",
                        "define __len__, which limits the validation, or pass a longer --timeout",
                    )
        return self._read_of_pass

    def close(self) -> None:
        """Stop reading, which closes the files that the dataset has opened meanwhile."""
        self._samples = None

    def _samples_from(self, pass_number: int | None) -> Iterator[Any]:
        """Yield the samples of a pass, or of all passes; raises ModelError if they run out."""
        for number in itertools.count(1) if pass_number is None else [pass_number]:
            yield from self._pass_of(number)
            if not self._read_of_pass:
                break
        raise self._ended()

    def _pass_of(self, number: int) -> Iterator[Any]:
        self._pass, self._read_of_pass = number, 0
        seed_generators(derive_seed(self._seed, self._name, number, "stream"))
        if hasattr(self._data, "set_epoch"):
            try:
                self._data.set_epoch(number)
            except Exception as error:
                raise self._file.error_at(error, f"set_epoch({number}) of {self._name}") from error
        for sample in self._file.stream(self._data, self._name):
            self._read_of_pass += 1
            self._is_empty = False
            yield sample

    def _warn_of_samples_beyond_the_length(self) -> None:
        """Warn once if a pass has more samples than its length says."""
        length = self._file.samples(self._data, self._name)
        if self._has_warned or not self._samples or self._counted_pass is None or self._read_of_pass != length:
            return
        with suppress(ModelError):  # it ends, or fails in a sample that nobody needs
            next(self._samples)
            self._has_warned = True
            sys.stderr.write(
                f"warning: {self._name} has more samples than its length of {length}: the rest are not used\n"
            )

    def _ended(self) -> ModelError:
        if self._is_empty:
            return self._file.error(f"{self._name} is empty: its __iter__ gives no samples")
        if not self._read_of_pass:
            what = f"{self._name} gives no samples in pass {self._pass} over it"
            return self._file.error(what, "start again each time __iter__ is called")
        return self._file.error(
            f"{self._name} ends after {self._read_of_pass} samples, before its length",
            "give each pass as many samples as __len__ says, or remove __len__ and pass --steps",
        )

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Swap in this stream's generator states, and restore the process's own at the end."""
        with random_state_kept():
            if self._generator_states:
                of_torch, of_numpy, of_python = self._generator_states
                torch.default_generator.set_state(of_torch)
                np.random.set_state(of_numpy)
                random.setstate(of_python)
            try:
                yield
            finally:
                self._generator_states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
