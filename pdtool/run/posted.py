"""Channels of torch.distributed, gloo or NCCL: receives posted ahead, sends waited for as late as possible.

gloo's point-to-point is a rendezvous: a message starts only when its receiver has asked for it. So receives are posted
before they are needed, and a sender keeps what it sends until it has gone. NCCL matches messages by their order on a
group; gloo's are tagged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdtool.run.channel import not_away, not_here
from pdtool.run.peers import Blame
from pdtool.run.wiring import Hop, Wire

TAGS = 2**31


class PostedSender:
    """Sends on a process group.

    Args:
        depth: messages that may be under way.
        carrier: where tensors are that the group can send.
        waiting: context of a wait, to account for its time.
    """

    def __init__(
        self,
        hop: Hop,
        group: Any,
        *,
        depth: int,
        carrier: torch.device,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.hop, self.group, self.depth, self.carrier, self.waiting = hop, group, depth, carrier, waiting
        self._under_way: deque[tuple[int, list[tuple[Any, Tensor]]]] = deque()

    def send(self, minibatch: int, tensors: Sequence[Tensor]) -> int:
        """Start; waits only when `depth` messages are under way."""
        while len(self._under_way) >= self.depth:
            self._finish_oldest()
        started, size = [], 0
        try:
            for wire, tensor in zip(self.hop.wires, tensors, strict=True):
                tensor = tensor.to(self.carrier, wire.carried).contiguous()
                work = dist.isend(tensor, self.hop.receiver, group=self.group, tag=_tag(wire, minibatch))
                started.append((work, tensor))
                size += tensor.nbytes
        except RuntimeError:
            with Blame(not_away(self.hop, minibatch), self.hop.receiver):
                raise
        self._under_way.append((minibatch, started))
        return size

    def finish(self) -> None:
        """Wait until everything has been received."""
        while self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        minibatch, started = self._under_way.popleft()
        try:
            with self.waiting():
                for work, _ in started:
                    work.wait()
        except RuntimeError:
            with Blame(not_away(self.hop, minibatch), self.hop.receiver):
                raise


class PostedReceiver:
    """Receives on a process group.

    Args:
        carrier: where the group puts tensors; `pinned` says that they are copied on to a GPU.
    """

    def __init__(self, hop: Hop, group: Any, *, carrier: torch.device, pinned: bool = False) -> None:
        self.hop, self.group, self.carrier, self.pinned = hop, group, carrier, pinned
        self._posted: deque[tuple[int, list[tuple[Any, Tensor]]]] = deque()

    def expect(self, minibatch: int, samples: int) -> None:
        """Post the receives."""
        posted = []
        try:
            for wire in self.hop.wires:
                buffer = torch.empty(
                    wire.sizes(samples), dtype=wire.carried, device=self.carrier, pin_memory=self.pinned
                )
                work = dist.irecv(buffer, self.hop.sender, group=self.group, tag=_tag(wire, minibatch))
                posted.append((work, buffer))
        except RuntimeError:
            with Blame(not_here(self.hop, minibatch), self.hop.sender):
                raise
        self._posted.append((minibatch, posted))

    def receive(self, minibatch: int) -> list[Tensor]:
        """Wait for the oldest receives."""
        expected, posted = self._posted.popleft()
        assert expected == minibatch, f"minibatch {minibatch} was asked for, {expected} was expected"
        try:
            for work, _ in posted:
                work.wait()
        except RuntimeError:
            with Blame(not_here(self.hop, minibatch), self.hop.sender):
                raise
        return [buffer for _, buffer in posted]


def _tag(wire: Wire, minibatch: int) -> int:
    return (minibatch * 4096 + wire.number) % TAGS
