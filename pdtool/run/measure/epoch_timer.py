"""How long epochs take, and at the last stage how long it takes from loss to loss."""

from __future__ import annotations

from collections.abc import Callable

from pdtool.run.measure.timestamps import Timestamp


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
        self._timed = range(0)
        self._first_loss: tuple[int, Timestamp] | None = None
        self._last_loss: tuple[int, Timestamp] | None = None

    def epoch_begins(self, timed: range) -> None:
        """Take note of the minibatches between whose losses the time is taken: those of the steady state."""
        self._timed = timed

    def loss_computed(self, minibatch: int, at: Timestamp) -> None:
        """Take note of when the device has computed the loss of a minibatch."""
        if minibatch not in self._timed:
            return
        self._first_loss = self._first_loss or (minibatch, at)
        self._last_loss = (minibatch, at)

    def epoch_ended(
        self, minibatches: int, samples: int, train_s: float, seconds_between: Callable[[Timestamp, Timestamp], float]
    ) -> None:
        """Add an epoch of training that took `train_s` seconds; the device has come to all of its timestamps."""
        self.epochs += 1
        self.minibatches += minibatches
        self.samples += samples
        self.train_s += train_s
        if self._first_loss and self._last_loss:
            self._intervals += self._last_loss[0] - self._first_loss[0]
            self._intervals_s += seconds_between(self._first_loss[1], self._last_loss[1])
        self._first_loss = self._last_loss = None

    @property
    def time_per_minibatch_s(self) -> float:
        """Seconds per minibatch between the first and the last loss in steady state; 0 when not known."""
        return self._intervals_s / self._intervals if self._intervals else 0.0
