"""Which channel each hop takes: within a worker, through shared memory, by NCCL or by gloo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pdtool.errors import UsageError
from pdtool.run.channel import Local, Receiver, Sender
from pdtool.run.groups import Groups, make_lanes
from pdtool.run.meeting import Share, meet
from pdtool.run.posted import PostedReceiver, PostedSender
from pdtool.run.shared import SharedReceiver, SharedSender, Slots
from pdtool.run.staged import StagedReceiver, StagedSender
from pdtool.run.wiring import Hop

Transport = Literal["auto", "gloo", "shared"]
CPU = torch.device("cpu")


@dataclass
class Channels:
    """This worker's ends of channels, by the number of the hop."""

    senders: dict[int, Sender] = field(default_factory=dict)
    receivers: dict[int, Receiver] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What is needed to open channels; all workers open them together.

    Attributes:
        transport: `auto` shares memory where that can be done, `shared` refuses to run where it cannot, `gloo` never.
        batch_size: most samples in a minibatch.
        in_flight: minibatches that the schedule has in flight at once, over all replicas.
        device: where this worker's tensors are.
        timeout_s: how long another worker is waited for.
        waiting: context of a wait, to account for its time.
    """

    groups: Groups
    rank: int
    transport: Transport
    batch_size: int
    in_flight: int
    device: torch.device
    timeout_s: float
    waiting: Callable[[], AbstractContextManager[None]]

    @property
    def nccl(self) -> bool:
        """Whether tensors go from device to device."""
        return self.groups.nccl and self.transport == "auto"

    @property
    def staged(self) -> bool:
        """Whether tensors on a GPU go through CPU memory."""
        return self.device.type == "cuda" and not self.nccl

    def depth(self, hop: Hop) -> int:
        """Most messages under way: when a minibatch is that much older than the one sent now, it was received."""
        return 1 + -(-self.in_flight // hop.every)

    def channels(self, hops: Sequence[Hop]) -> Channels:
        """Open them.

        Raises:
            UsageError: memory cannot be shared, and must be.
            PeerError: a worker does not come.
        """
        slots = {hop.number: Slots.of(hop, self.batch_size, self.depth(hop)) for hop in hops}
        agreed, shares = self._meet(hops, slots)
        posted = [hop for hop in hops if hop.sender != hop.receiver and hop.number not in agreed]
        if posted and self.transport == "shared":
            raise UsageError(
                f"rank {posted[0].sender} and rank {posted[0].receiver} cannot share memory",
                "leave --transport out: workers on one Linux machine share it, others use the network",
            )
        lanes = make_lanes(posted, self.timeout_s, nccl=self.nccl)
        return self._open(hops, slots, shares, lanes)

    def _meet(self, hops: Sequence[Hop], slots: Mapping[int, Slots]) -> tuple[set[int], dict[int, Share]]:
        if self.nccl or self.transport == "gloo":
            return set(), {}
        sizes = {number: s.count * s.size for number, s in slots.items()}
        return meet(hops, self.rank, self.groups.world, sizes, self.timeout_s)

    def _open(
        self, hops: Sequence[Hop], slots: Mapping[int, Slots], shares: Mapping[int, Share], lanes: Mapping[int, Any]
    ) -> Channels:
        opened = Channels()
        for hop in hops:
            n = hop.number
            if hop.sender == hop.receiver == self.rank:
                opened.senders[n] = opened.receivers[n] = Local()
            elif hop.sender == self.rank:
                opened.senders[n] = self._sender(hop, slots[n], shares.get(n), lanes.get(n))
            elif hop.receiver == self.rank:
                opened.receivers[n] = self._receiver(hop, slots[n], shares.get(n), lanes.get(n))
        return opened

    def _sender(self, hop: Hop, slots: Slots, share: Share | None, group: Any) -> Sender:
        carrier = CPU if self.staged else self.device
        waiting = nullcontext if self.staged else self.waiting  # a thread's wait holds nobody up
        sender = (
            SharedSender(hop, slots, *share, waiting)
            if share
            else PostedSender(hop, group, depth=slots.depth, carrier=carrier, waiting=waiting)
        )
        return StagedSender(hop, sender, self.device) if self.staged else sender

    def _receiver(self, hop: Hop, slots: Slots, share: Share | None, group: Any) -> Receiver:
        carrier = CPU if self.staged else self.device
        receiver = (
            SharedReceiver(hop, slots, *share)
            if share
            else PostedReceiver(hop, group, carrier=carrier, pinned=self.staged)
        )
        return StagedReceiver(receiver, self.device) if self.staged else receiver
