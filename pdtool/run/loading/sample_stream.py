"""Reads an IterableDataset by the numbers of its samples, as other datasets are read, so that both are dealt out alike.

    pass 1                 pass 2
    0  1  2  3  4  5  6    7  8  9 ...       numbers over all passes, where epochs go on from each other
    0  1  2  3  4  5  6    0  1  2 ...       numbers in one pass, where each epoch is one

Samples before one that is asked for are read past: those of other replicas, and those that a resumed run has trained.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from pdtool.errors import ModelError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.random_numbers import derive_seed, seed_generators
from pdtool.units import format_seconds

VALIDATION_PASS = 0  # each validation reads the same pass
_END = object()


class SampleStream:
    """The samples of an IterableDataset.

    They draw from random generators of their own, seeded for each pass: neither what others draw meanwhile, nor how
    many samples are read past, nor the size of minibatches changes a sample. A dataset that has `set_epoch`, as those
    of Hugging Face do, is told the number of the pass.

    Args:
        data: the dataset.
        name: of the split, for errors.
        seed: of the run.
    """

    def __init__(self, file: ModelFile, data: Any, name: str, seed: int) -> None:
        self._file, self._data, self._name, self._seed = file, data, name, seed
        self._counted_pass: int | None = None
        self._next, self._pass, self._read_of_pass = 0, 0, 0
        self._samples: Iterator[Any] | None = None
        self._has_warned, self._is_empty = False, True
        self._generators = _Generators()

    def read(self, pass_number: int | None, numbers: Sequence[int]) -> list[Any]:
        """Return samples that follow each other.

        Args:
            pass_number: the pass that the numbers are counted in; None counts over all passes from pass 1 on.
            numbers: of the samples.

        Raises:
            ModelError: a sample cannot be made, or the pass has fewer, or is empty.
        """
        with self._generators.in_use():
            if self._samples is None or pass_number != self._counted_pass or numbers[0] < self._next:
                self._warn_of_samples_beyond_the_length()
                self._counted_pass, self._next = pass_number, 0
                self._begin_pass(1 if pass_number is None else pass_number)
            while self._next < numbers[0]:
                self._read_next()
            return [self._read_next() for _ in numbers]

    def count(self, pass_number: int, within_s: float) -> int:
        """Return how many samples a pass has, by reading it.

        Raises:
            ModelError: it does not end in time.
        """
        end_s = time.monotonic() + within_s
        with self._generators.in_use():
            self._begin_pass(pass_number)
            while self._try_next() is not _END:
                if time.monotonic() > end_s:
                    raise self._file.error(
                        f"{self._name} has no length, and has not ended within {format_seconds(within_s)}, after "
                        f"{self._read_of_pass} samples",
                        "let it have a length (__len__), of which a validation takes no more, or give more --timeout",
                    )
        self.close()
        return self._read_of_pass

    def close(self) -> None:
        """Stop to read: files that the dataset has opened since are closed."""
        self._samples = None

    def _begin_pass(self, number: int) -> None:
        self.close()
        self._pass, self._read_of_pass = number, 0
        seed_generators(derive_seed(self._seed, self._name, number, "stream"))
        if hasattr(self._data, "set_epoch"):
            try:
                self._data.set_epoch(number)
            except Exception as error:
                raise self._file.error_at(error, f"set_epoch({number}) of {self._name}") from error
        self._samples = self._file.stream(self._data, self._name)

    def _try_next(self) -> Any:
        """The next sample of the pass, or _END."""
        sample = next(self._samples or iter(()), _END)
        if sample is not _END:
            self._read_of_pass += 1
            self._is_empty = False
        return sample

    def _read_next(self) -> Any:
        sample = self._try_next()
        if sample is _END:
            if self._counted_pass is not None or not self._read_of_pass:
                raise self._ended()
            self._begin_pass(self._pass + 1)
            return self._read_next()
        self._next += 1
        return sample

    def _warn_of_samples_beyond_the_length(self) -> None:
        """Say once, at the end of a pass that was read up to its length, that it goes on after that."""
        if self._has_warned or self._counted_pass is None or self._read_of_pass != self._length:
            return
        with suppress(ModelError):  # of what nobody has asked for
            if self._try_next() is not _END:
                self._has_warned = True
                sys.stderr.write(
                    f"warning: {self._name} has more than the {self._length} samples that its length promises: the "
                    "others are not used\n"
                )

    @property
    def _length(self) -> int | None:
        return len(self._data) if hasattr(self._data, "__len__") else None

    def _ended(self) -> ModelError:
        if self._is_empty:
            return self._file.error(f"{self._name} is empty: its __iter__ gives no samples")
        if not self._read_of_pass:
            what = f"{self._name} gives no samples in pass {self._pass} over it"
            return self._file.error(what, "let __iter__ begin anew each time that it is called")
        return self._file.error(
            f"{self._name} ends after {self._read_of_pass} samples, where its length promises more",
            "let each pass have as many samples as __len__ says, or leave that out and give --steps",
        )


class _Generators:
    """The states of the generators of torch, numpy and Python, while they are not in use."""

    def __init__(self) -> None:
        self._states: tuple[Any, ...] | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let these be the generators of the process; they go on from where they were."""
        others = _states()
        if self._states:
            _set_states(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _set_states(others)


def _states() -> tuple[Any, ...]:
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def _set_states(states: tuple[Any, ...]) -> None:
    of_torch, of_numpy, of_python = states
    torch.default_generator.set_state(of_torch)
    np.random.set_state(of_numpy)
    random.setstate(of_python)
