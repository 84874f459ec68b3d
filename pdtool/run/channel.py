"""A channel: the messages of one hop, from one worker to another, first in first out.

Its two ends are a Sender and a Receiver. A message is one tensor for each wire of the hop; tensors come out with the
dtype they have on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pdtool.run.wiring import Hop


class Sender(Protocol):
    """The end of a channel that messages go into."""

    def send(self, minibatch: int, tensors: Sequence[Tensor]) -> int:
        """Start sending; the tensors carry no graph and are not changed any more. Returns the bytes that travel."""

    def finish(self) -> None:
        """Wait until what was sent needs this worker no longer."""


class Receiver(Protocol):
    """The end of a channel that messages come out of."""

    def expect(self, minibatch: int, samples: int) -> None:
        """Say that this message will be asked for, after those said before."""

    def receive(self, minibatch: int) -> list[Tensor]:
        """Wait for the next message expected, which is that of `minibatch`."""


class Local:
    """Both ends of a channel between two stages on one worker: nothing travels."""

    def __init__(self) -> None:
        self._sent: deque[tuple[int, list[Tensor]]] = deque()

    def send(self, minibatch: int, tensors: Sequence[Tensor]) -> int:
        """Keep the tensors for the stage that will ask for them."""
        self._sent.append((minibatch, list(tensors)))
        return 0

    def finish(self) -> None:
        """Nothing is on its way."""

    def expect(self, minibatch: int, samples: int) -> None:
        """What was sent is there."""

    def receive(self, minibatch: int) -> list[Tensor]:
        """What was sent."""
        sent, tensors = self._sent.popleft()
        assert sent == minibatch, f"minibatch {minibatch} was asked for, {sent} was sent"
        return tensors


def not_here(hop: Hop, minibatch: int) -> str:
    """What a receiver says when a message is lost."""
    return f"{hop.message(minibatch)} did not get here: from rank {hop.sender}"


def not_away(hop: Hop, minibatch: int) -> str:
    """What a sender says when a message is lost."""
    return f"{hop.message(minibatch)} did not get away: to rank {hop.receiver}"
