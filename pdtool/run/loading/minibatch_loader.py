"""Loads minibatches of one split of the user's dataset, and checks that they are what the stages take."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from pdtool.artifacts.bundle import TensorSpec
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import dtype_of
from pdtool.frontend.random_numbers import derive_seed, seed_generators
from pdtool.frontend.user_code import is_stream
from pdtool.run.data import DatasetSplit, Shape, shapes_of, tensors_of_target
from pdtool.run.loading.sample_stream import VALIDATION_PASS, SampleStream


class MinibatchLoader:
    """Loads minibatches of one split of the user's dataset.

    Args:
        inputs: what the stages take of a minibatch.
        arguments: how the model was called with it when it was traced.
        seed: of the run.

    Attributes:
        data: what dataset() returned.
        is_stream: whether that is an IterableDataset.
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
        """Return what the other workers must know; `load` checks the targets by it.

        Args:
            counts_within_s: seconds in which a validation set without a length is to be read once, which counts it.

        Raises:
            ModelError: the first sample cannot be read, or the validation set is empty or does not end in time.
        """
        samples = self.file.samples(self.data, self.where)
        if samples is None and self._split == "valid":
            samples = self._stream.count(VALIDATION_PASS, counts_within_s)
        _, target = self.file.collate(self._read([0], VALIDATION_PASS), [0], self.where)
        self._stream.close()
        self._described = DatasetSplit(samples, target, self.is_stream)
        self._check_target(target, 1)
        return self._described

    def sample_order(self, run_seed: int, epoch: int) -> list[int]:
        """Return the samples that the user's sampler() chooses for an epoch: a function of seed and epoch only.

        Raises:
            ModelError: it fails, or gives no samples, or one that the dataset does not have.
        """
        seed_generators(derive_seed(run_seed, epoch, "order"))
        order, samples = self.file.sampler(self.data, epoch), len(self.data)
        wrong = [index for index in order if not 0 <= index < samples]
        if wrong or not order:
            what = f"gives sample {wrong[0]}, of {samples} samples" if wrong else "gives no samples"
            raise self.file.error(f"sampler() {what}, in epoch {epoch}", "return numbers from 0 to len(dataset) - 1")
        return order

    def load(
        self, indices: Sequence[int], seed: int, stream_pass: int | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Load one minibatch.

        Args:
            indices: of its samples.
            seed: of random augmentation.
            stream_pass: in which the samples of an IterableDataset are counted, as SampleStream.read takes it.

        Returns:
            The input tensors and the tensors of the target, [samples, ...] each.

        Raises:
            ModelError: a sample cannot be read or does not go with the others, or the inputs are not what the stages
                were generated for.
        """
        seed_generators(seed)
        given, target = self.file.collate(self._read(indices, stream_pass), indices, self.where)
        arguments = self.file.as_inputs(given)
        self.file.check_arguments(arguments, self.arguments, self.where)
        self._check_inputs(arguments.tensors, len(indices))
        return arguments.tensors, self._check_target(target, len(indices))

    def _read(self, indices: Sequence[int], stream_pass: int | None) -> list[Any]:
        if self.is_stream:
            return self._stream.read(stream_pass, indices)
        return self.file.read(self.data, indices, self.where)

    def _check_inputs(self, inputs: Sequence[Tensor], samples: int) -> None:
        """Check that the stages take the inputs, [samples, ...] each."""
        loaded = shapes_of(inputs)
        expected = [(tensor.sizes(samples), dtype_of(tensor)) for tensor in self.inputs]
        if loaded != expected:
            what = f"{self.where} gives inputs {_shapes(loaded)}; the stages take {_shapes(expected)}"
            raise self.file.error(what, self._remedy(loaded, expected))

    def _remedy(self, loaded: Sequence[Shape], expected: Sequence[Shape]) -> str:
        if [shape for shape, _ in loaded] == [shape for shape, _ in expected]:
            wrong = (
                f"{tensor.name} be {tensor.dtype}, as by .to(torch.{tensor.dtype})"
                for tensor, found, wanted in zip(self.inputs, loaded, expected, strict=True)
                if found != wanted
            )
            return "let " + ", and ".join(wrong)
        if self.file.has("collate"):
            return "let collate() pad to a fixed length, for stages have fixed shapes apart from the minibatch's size"
        return "generate the stages from inputs of the shape of the dataset's"

    def _check_target(self, target: Any, samples: int) -> list[Any]:
        """Return the tensors of a minibatch's target, [samples, ...] each as those of one sample are [1, ...]."""
        leaves = tensors_of_target(target)
        if self._described is None:
            return leaves
        expected = [((samples, *shape[1:]), dtype) for shape, dtype in self._described.shapes]
        loaded = shapes_of(leaves)
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


def _shapes(shapes: Sequence[Shape]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in shapes)
