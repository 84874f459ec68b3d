"""The data of a run as one worker has it: what all workers know of the splits, and which samples an epoch has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdtool.frontend.model_file import ModelFile
from pdtool.runtime.config import RunConfig
from pdtool.runtime.groups import broadcast
from pdtool.runtime.loading.minibatch_loader import VALIDATION_PASS, MinibatchLoader
from pdtool.runtime.loading.minibatch_source import MinibatchSource
from pdtool.runtime.loading.minibatches import (
    DataPass,
    DatasetSplit,
    Minibatches,
    epochs_go_on,
    sample_order,
    samples_in_epoch,
)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The samples that sampler() of model.py chooses for the first worker.

    Each worker that loads asks its own sampler(), which may tell its dataset the epoch.

    Attributes:
        loader: of the training set, at the first stage.
        source: rank of the first worker.
    """

    loader: MinibatchLoader | None
    seed: int
    source: int

    def order(self, epoch: int) -> list[int]:
        """Return the samples of an epoch, in order; all workers call it together."""
        own = self.loader.sample_order(self.seed, epoch) if self.loader else []
        return broadcast(own, list[int], self.source, "the order of the samples")


class TrainingData:
    """The data of a run at one worker.

    Args:
        sampler: None if model.py has none.

    Attributes:
        splits: the training set and the validation set, `train` and `valid`.
        source: of the minibatches, at the first stage.
        epoch_samples: samples of the training set in an epoch.

    Raises:
        ModelError: an epoch has no minibatch.
        UsageError: nobody knows how many samples an epoch has.
    """

    def __init__(
        self,
        config: RunConfig,
        file: ModelFile,
        splits: Mapping[str, DatasetSplit],
        source: MinibatchSource | None,
        sampler: Sampler | None,
    ) -> None:
        self.file, self.splits, self.source = file, splits, source
        self._seed, self._sampler = config.seed, sampler
        self._chosen = len(sampler.order(1)) if sampler else splits["train"].samples
        self.epoch_samples = samples_in_epoch(self._chosen, config, drop_last=file.training.drop_last)
        self._epochs_go_on = epochs_go_on(splits["train"], config)

    def sample_order(self, epoch: int, trained: int) -> Sequence[int]:
        """Return the samples of an epoch, in order; the same on all workers, which call it together.

        Args:
            trained: samples of all epochs before, which a stream that goes on from epoch to epoch has given.

        Raises:
            ModelError: sampler() chooses another number of samples than in the first epoch.
        """
        if self._sampler:
            order = self._sampler.order(epoch)
        elif self._chosen is None or self.splits["train"].is_stream:
            first = trained if self._epochs_go_on else 0
            return range(first, first + self.epoch_samples)
        else:
            order = sample_order(self._seed, epoch, self._chosen)
        if len(order) != self._chosen:
            what = f"sampler() gives {len(order)} samples in epoch {epoch}, and {self._chosen} in epoch 1"
            raise self.file.error(what, "return as many in each, which the schedule of the run rests on")
        return order[: self.epoch_samples]

    def data_pass(self, split: str, epoch: int, minibatches: Minibatches) -> DataPass:
        """Return an epoch of training ("train"), or the validation after it ("valid")."""
        stream_pass = VALIDATION_PASS if split == "valid" else None if self._epochs_go_on else epoch
        return DataPass(split, self.splits[split], minibatches, self._seed, epoch, stream_pass)
