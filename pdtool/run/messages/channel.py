"""A channel carries the messages of one route, first in, first out. Its two ends are a Sender and a Receiver.

A message is one tensor for each edge of the route, [samples, ...], in the route's order. Tensors come out with the
dtype that they have in messages. The action lists of both workers name the same minibatches in the same order; that
the receiver asks for messages in the order of `expect` is asserted in one place, by StageIO.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Sender(Protocol):
    """The end of a channel that messages go into."""

    def send(self, minibatch: int, tensors: Sequence[Tensor]) -> int:
        """Start sending the tensors, which have no graph and must not change any more; return the bytes that travel.

        Raises:
            PeerError: the receiver is lost.
        """

    def flush(self) -> None:
        """Wait until what was sent needs this worker no longer; raises PeerError."""


class Receiver(Protocol):
    """The end of a channel that messages come out of."""

    def expect(self, minibatch: int, samples: int) -> None:
        """Prepare to receive the message of a minibatch of `samples`, after those expected before; raises PeerError."""

    def receive(self, minibatch: int, samples: int) -> list[Tensor]:
        """Wait for the oldest expected message, which is that of `minibatch`, and return it; raises PeerError."""


class LocalChannel:
    """Both ends of a channel between two stages on one worker: nothing travels."""

    def __init__(self) -> None:
        self._sent: deque[list[Tensor]] = deque()

    def send(self, minibatch: int, tensors: Sequence[Tensor]) -> int:
        """Keep the tensors for the stage that will ask for them."""
        self._sent.append(list(tensors))
        return 0

    def flush(self) -> None:
        """Nothing is under way."""

    def expect(self, minibatch: int, samples: int) -> None:
        """Nothing needs preparing."""

    def receive(self, minibatch: int, samples: int) -> list[Tensor]:
        """Return what was sent."""
        return self._sent.popleft()
