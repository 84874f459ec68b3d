"""How long epochs take, and at the last stage how long it takes from loss to loss."""

from __future__ import annotations

import time


class EpochTimer:
    """The training time of the epochs since the last `restart`.

    Attributes:
        epochs, minibatches, samples: numbers of those trained.
        train_s: seconds of training, pipeline fill and drain included.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all epochs so far."""
        self.epochs = self.minibatches = self.samples = self._intervals = 0
        self.train_s = self._intervals_s = 0.0
        self._first_loss: tuple[int, float] | None = None

    def loss_computed(self, minibatch: int) -> None:
        """Take the time at which the loss of a minibatch was computed."""
        now_s = time.perf_counter()
        self._first_loss = self._first_loss or (minibatch, now_s)
        self._last_loss = (minibatch, now_s)

    def epoch_ended(self, minibatches: int, samples: int, train_s: float) -> None:
        """Add an epoch of training that took `train_s` seconds."""
        self.epochs += 1
        self.minibatches += minibatches
        self.samples += samples
        self.train_s += train_s
        if self._first_loss:
            self._intervals += self._last_loss[0] - self._first_loss[0]
            self._intervals_s += self._last_loss[1] - self._first_loss[1]
        self._first_loss = None

    @property
    def time_per_minibatch_s(self) -> float:
        """Seconds per minibatch between the first and the last loss of an epoch; 0 when not known."""
        return self._intervals_s / self._intervals if self._intervals else 0.0
