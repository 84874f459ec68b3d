"""How long epochs take, and at the last stage how long from loss to loss."""

from __future__ import annotations

import time


class Pace:
    """The training time of the epochs since the last `restart`.

    Attributes:
        epochs, minibatches, samples: trained in them.
        train_s: their time, pipeline fill and drain included.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all epochs so far."""
        self.epochs = self.minibatches = self.samples = self._steps = 0
        self.train_s = self._span_s = 0.0
        self._first: tuple[int, float] | None = None

    def note(self, minibatch: int) -> None:
        """The loss of a minibatch is there."""
        now = time.perf_counter()
        self._first = self._first or (minibatch, now)
        self._latest = (minibatch, now)

    def add(self, minibatches: int, samples: int, train_s: float) -> None:
        """An epoch of training ended."""
        self.epochs += 1
        self.minibatches += minibatches
        self.samples += samples
        self.train_s += train_s
        if self._first:
            self._steps += self._latest[0] - self._first[0]
            self._span_s += self._latest[1] - self._first[1]
        self._first = None

    @property
    def pace_s(self) -> float:
        """Seconds per minibatch between the first and the last loss of an epoch; 0 when not known."""
        return self._span_s / self._steps if self._steps else 0.0
