"""Tensors between stages: receives posted ahead, sends never waited for before computing.

The action lists of both ends name the same minibatches in the same order, so the messages of each hop are
first-in-first-out. How they travel is the channel's matter: channels.py chooses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from pdtool.run.channel import Receiver, Sender
from pdtool.run.wiring import Hop


class Lane:
    """One direction (forward or backward) of one stage's traffic with all others.

    Args:
        incoming, outgoing: hops that end and that begin here, each with its channel.
        ahead: minibatches to ask for before they are needed.
        waiting: context of a wait, to account for its time.
        sent: called with the bytes of each message.
    """

    def __init__(
        self,
        incoming: Sequence[tuple[Hop, Receiver]],
        outgoing: Sequence[tuple[Hop, Sender]],
        *,
        ahead: int,
        waiting: Callable[[], AbstractContextManager[None]],
        sent: Callable[[int], None],
    ) -> None:
        self.incoming, self.outgoing = list(incoming), list(outgoing)
        self.ahead, self.waiting, self.sent = ahead, waiting, sent
        self._to_post: deque[tuple[int, int]] = deque()
        self._posted: deque[int] = deque()

    def open(self, minibatches: Sequence[tuple[int, int]]) -> None:
        """Begin a phase in which these (minibatch, samples) are received, in this order."""
        if self.incoming:
            self._to_post.extend(minibatches)
            for _ in range(self.ahead):
                self._post()

    def receive(self, minibatch: int) -> dict[int, Tensor]:
        """Tensor by wire number; waits for those still on their way."""
        if not self.incoming:
            return {}
        posted = self._posted.popleft()
        assert posted == minibatch, f"minibatch {minibatch} was asked for, {posted} was posted"
        arrived = {}
        with self.waiting():
            for hop, channel in self.incoming:
                if hop.has(minibatch):
                    for wire, tensor in zip(hop.wires, channel.receive(minibatch), strict=True):
                        arrived[wire.number] = tensor.to(wire.dtype)
        self._post()
        return arrived

    def send(self, minibatch: int, tensors: Mapping[int, Tensor]) -> None:
        """Start sending the tensor of each outgoing wire; they must not change until they have gone."""
        for hop, channel in self.outgoing:
            if hop.has(minibatch):
                self.sent(channel.send(minibatch, [tensors[wire.number].detach() for wire in hop.wires]))

    def close(self) -> None:
        """End a phase: wait until everything sent has been received, or lies where its receiver finds it."""
        assert not self._posted, f"a phase ended with minibatches {list(self._posted)} posted that nobody asked for"
        with self.waiting():
            for _, channel in self.outgoing:
                channel.finish()

    def _post(self) -> None:
        """Ask for one more minibatch."""
        if self._to_post:
            minibatch, samples = self._to_post.popleft()
            for hop, channel in self.incoming:
                if hop.has(minibatch):
                    channel.expect(minibatch, samples)
            self._posted.append(minibatch)
