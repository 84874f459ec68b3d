"""Tensors between stages: receives posted ahead, sends never waited for before computing.

gloo's point-to-point is a rendezvous: a message starts only when its receiver has asked for it. So a lane asks for the
next `ahead` minibatches before they are needed, and keeps what it sends until it has gone. Forward and backward
messages have a group each, since two ranks that send to each other on one group do it in turns.

The action lists of both ends name the same minibatches in the same order, so the messages between two workers in one
direction are first-in-first-out (what NCCL needs); gloo's are tagged besides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdtool.run.peers import Blame
from pdtool.run.wiring import Wire

TAGS = 2**31


@dataclass(frozen=True)
class Route:
    """How to reach the worker that computes `minibatch` at `stage`: its rank, and the process group to use."""

    rank: Callable[[int, int], int]
    group: Callable[[int, int], Any]


class Lane:
    """One direction (forward or backward) of one worker's traffic with all others.

    Args:
        incoming, outgoing: wires, each with the stage at the other end of it.
        ahead: minibatches to ask for before they are needed.
        keep: minibatches whose sends may be under way; by then the schedule has proven older ones received.
        device: where tensors live; `staged` says that messages go through CPU memory.
        waiting: context of a wait, to account for its time.
        sent: called with the bytes of each message.
    """

    def __init__(
        self, name: str, rank: int, route: Route, incoming: Sequence[tuple[Wire, int]],
        outgoing: Sequence[tuple[Wire, int]], *, ahead: int, keep: int, device: torch.device, staged: bool,
        waiting: Callable[[], AbstractContextManager[None]], sent: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.name, self.rank, self.route = name, rank, route
        self.incoming, self.outgoing = list(incoming), list(outgoing)
        self.ahead, self.keep = ahead, keep
        self.device, self.staged = device, staged
        self.carrier = torch.device("cpu") if staged else device
        self.waiting, self.sent = waiting, sent
        self._to_post: deque[tuple[int, int]] = deque()
        self._posted: deque[tuple[int, list[tuple[Wire, int, Any, Tensor]]]] = deque()
        self._sending: deque[list[tuple[str, int, Any, Tensor]]] = deque()

    def open(self, minibatches: Sequence[tuple[int, int]]) -> None:
        """Begin a phase in which these (minibatch, samples) are received, in this order."""
        self._to_post.extend(minibatches)
        for _ in range(self.ahead):
            self._post()

    def receive(self, minibatch: int) -> dict[int, Tensor]:
        """Tensor by wire number; waits for those still on their way."""
        if not self.incoming:
            return {}
        posted, messages = self._posted.popleft()
        assert posted == minibatch, "the receives were posted in another order than the actions"
        arrived = {}
        with self.waiting():
            for wire, peer, work, buffer in messages:
                self._wait(work, peer, f"{self.name} {wire.name!r} of minibatch {minibatch}", "from")
                arrived[wire.number] = buffer.to(self.device, non_blocking=True) if self.staged else buffer
        self._post()
        return arrived

    def send(self, minibatch: int, tensors: Mapping[int, Tensor]) -> None:
        """Start sending the tensor of each outgoing wire; they must not change until they have gone."""
        if not self.outgoing:
            return
        while len(self._sending) >= self.keep:
            self._finish_oldest()
        messages = []
        for wire, stage in self.outgoing:
            peer = self.route.rank(stage, minibatch)
            tensor = tensors[wire.number].detach().contiguous().to(self.carrier)
            what = f"{self.name} {wire.name!r} of minibatch {minibatch}"
            with self._named(peer, what, "to"):
                work = dist.isend(tensor, peer, group=self.route.group(self.rank, peer), tag=_tag(wire, minibatch))
            messages.append((what, peer, work, tensor))
            self.sent(tensor.nbytes)
        self._sending.append(messages)

    def close(self) -> None:
        """End a phase: wait until everything sent has been received."""
        assert not self._posted, "a phase ended with receives that nobody asked for"
        while self._sending:
            self._finish_oldest()

    def _post(self) -> None:
        """Ask for one more minibatch."""
        if not self.incoming or not self._to_post:
            return
        minibatch, samples = self._to_post.popleft()
        messages = []
        for wire, stage in self.incoming:
            peer = self.route.rank(stage, minibatch)
            buffer = torch.empty(wire.sizes(samples), dtype=wire.dtype, device=self.carrier, pin_memory=self.staged)
            with self._named(peer, f"{self.name} {wire.name!r} of minibatch {minibatch}", "from"):
                work = dist.irecv(buffer, peer, group=self.route.group(peer, self.rank), tag=_tag(wire, minibatch))
            messages.append((wire, peer, work, buffer))
        self._posted.append((minibatch, messages))

    def _finish_oldest(self) -> None:
        with self.waiting():
            for what, peer, work, _ in self._sending.popleft():
                self._wait(work, peer, what, "to")

    def _wait(self, work: Any, peer: int, what: str, way: str) -> None:
        with self._named(peer, what, way):
            work.wait()

    def _named(self, peer: int, what: str, way: str) -> Blame:
        return Blame(f"{what} did not get {'here' if way == 'from' else 'away'}: {way} rank {peer}", peer)


def _tag(wire: Wire, minibatch: int) -> int:
    return (minibatch * 4096 + wire.number) % TAGS
