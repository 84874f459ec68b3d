"""The user's learning-rate schedule of one optimizer: stepped after each update, or at the end of each epoch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from pdtool.frontend.model_file import ModelFile


@dataclass(frozen=True)
class RunLength:
    """How long a run is, for schedules that end with it.

    Attributes:
        epochs: in all, those of the runs that it resumes included.
        updates: of the optimizer, in all epochs.
    """

    epochs: int = 1
    updates: int = 1


class LearningRateSchedule:
    """The user's schedule; without one nothing is done.

    It is stepped after each update, or with `SCHEDULER_STEP = "epoch"` at the end of each epoch. ReduceLROnPlateau is
    stepped at the end of each epoch, with the loss of its validation.
    """

    def __init__(self, file: ModelFile, optimizer: Optimizer, length: RunLength) -> None:
        self._file, self._length = file, length
        is_by_epoch = file.training.scheduler_step == "epoch"
        self._steps = length.epochs if is_by_epoch else length.updates
        self._scheduler = file.scheduler(optimizer, self._steps)
        self._takes_loss = isinstance(self._scheduler, ReduceLROnPlateau)
        self._is_by_epoch = is_by_epoch or self._takes_loss

    @property
    def length_warning(self) -> str:
        """Say that OneCycleLR was made for another number of steps than the run will take; empty where it was not."""
        if not isinstance(self._scheduler, OneCycleLR) or self._scheduler.total_steps == self._steps:
            return ""
        return (
            f"OneCycleLR was made for {self._scheduler.total_steps} steps, and the run will take {self._steps}: let "
            "scheduler(optimizer, total_steps) take their number"
        )

    def update_done(self) -> None:
        """Step a schedule of updates; raises ModelError when it cannot be stepped."""
        if not self._is_by_epoch:
            self._step()

    def epoch_done(self, validation_loss: float) -> None:
        """Step a schedule of epochs; raises ModelError when it cannot be stepped."""
        if self._is_by_epoch:
            self._step(*([validation_loss] if self._takes_loss else []))

    def catch_up(self, updates: int, validation_losses: Sequence[float]) -> None:
        """Take the steps that were taken before a checkpoint was written.

        A schedule that knows the length of the run goes to the same part of it, though another plan may have updated
        the weights more or less often.

        Args:
            updates: of the optimizer until then.
            validation_losses: of each epoch until then.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step")
            if self._file.scheduler_takes_total:
                updates = self._length.updates * len(validation_losses) // self._length.epochs
            for _ in range(updates):
                self.update_done()
            for loss in validation_losses:
                self.epoch_done(loss)

    def _step(self, *metrics: Any) -> None:
        if not self._scheduler:
            return
        name = type(self._scheduler).__name__
        try:
            self._scheduler.step(*metrics)
        except TypeError as error:
            raise self._file.error(
                f"the learning-rate schedule {name} cannot be stepped ({error})",
                "use ReduceLROnPlateau, or one whose step() takes no argument",
            ) from error
        except Exception as error:
            raise self._file.error_at(error, f"the learning-rate schedule {name}") from error
