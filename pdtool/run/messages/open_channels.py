"""Open a channel for each route: within a worker, through shared memory, by NCCL or by gloo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from pdtool.errors import UsageError
from pdtool.run.config import RunConfig
from pdtool.run.measure.meter import WorkerMeter
from pdtool.run.messages.channel import LocalChannel, Receiver, Sender
from pdtool.run.messages.distributed import DistributedReceiver, DistributedSender, make_route_groups
from pdtool.run.messages.pinned import PinnedReceiver, PinnedSender
from pdtool.run.messages.routes import Route
from pdtool.run.messages.shared_memory import SharedMemory, SharedMemoryReceiver, SharedMemorySender, SlotLayout
from pdtool.run.messages.shared_memory_setup import share_memory
from pdtool.run.processes.process_groups import ProcessGroups


@dataclass
class Channels:
    """This worker's ends of channels, each with its route, in the order of the routes."""

    senders: list[tuple[Route, Sender]] = field(default_factory=list)
    receivers: list[tuple[Route, Receiver]] = field(default_factory=list)


def open_channels(
    routes: Sequence[Route], groups: ProcessGroups, config: RunConfig, in_flight: int, meter: WorkerMeter
) -> Channels:
    """Open this worker's ends of all channels; all workers call it together.

    Args:
        in_flight: minibatches that the schedule has in flight at once, over all replicas.
        meter: measures how long senders wait.

    Raises:
        UsageError: memory cannot be shared, and must be.
        PeerError: a worker does not come.
    """
    uses_nccl = groups.uses_nccl and config.transport == "auto"
    rank, size = dist.get_rank(), config.plan.batch_size
    layouts = {route.number: SlotLayout.of(route, size, route.depth(in_flight)) for route in routes}
    agreed: set[int] = set()
    memory: dict[int, SharedMemory] = {}
    if not uses_nccl and config.transport != "gloo":
        sizes_bytes = {number: layout.total_bytes for number, layout in layouts.items()}
        agreed, memory = share_memory(routes, rank, groups.world, sizes_bytes, config.timeout_s)
    distributed = [route for route in routes if not route.is_local and route.number not in agreed]
    if distributed and config.transport == "shared":
        raise UsageError(
            f"rank {distributed[0].sender} and rank {distributed[0].receiver} cannot share memory",
            "leave --transport out: workers on one Linux machine share it, others use the network",
        )
    route_groups = make_route_groups(distributed, config.timeout_s, nccl=uses_nccl)
    is_pinned = groups.device.type == "cuda" and not uses_nccl
    waiting = nullcontext() if is_pinned else meter.waiting  # the wait of a thread holds nobody up
    opener = _ChannelOpener(layouts, memory, route_groups, groups.device, is_pinned, waiting)
    channels = Channels()
    for route in routes:
        if route.is_local and route.sender == rank:
            local = LocalChannel()
            channels.senders.append((route, local))
            channels.receivers.append((route, local))
        elif route.sender == rank:
            channels.senders.append((route, opener.sender(route)))
        elif route.receiver == rank:
            channels.receivers.append((route, opener.receiver(route)))
    return channels


@dataclass(frozen=True)
class _ChannelOpener:
    """Opens single channels.

    Attributes:
        layouts, memory, groups: by the number of a route; those that do not share memory have a group.
        is_pinned: whether tensors on a GPU go through CPU memory.
    """

    layouts: Mapping[int, SlotLayout]
    memory: Mapping[int, SharedMemory]
    groups: Mapping[int, Any]
    device: torch.device
    is_pinned: bool
    waiting: AbstractContextManager[None]

    def sender(self, route: Route) -> Sender:
        layout, shared = self.layouts[route.number], self.memory.get(route.number)
        sender: Sender
        if shared:
            sender = SharedMemorySender(route, layout, shared, self.waiting)
        else:
            group = self.groups[route.number]
            sender = DistributedSender(route, group, layout.depth, self._group_device, self.waiting)
        return PinnedSender(route, sender, self.device) if self.is_pinned else sender

    def receiver(self, route: Route) -> Receiver:
        layout, shared = self.layouts[route.number], self.memory.get(route.number)
        receiver: Receiver
        if shared:
            receiver = SharedMemoryReceiver(route, layout, shared)
        else:
            group = self.groups[route.number]
            receiver = DistributedReceiver(route, group, self._group_device, pinned=self.is_pinned)
        return PinnedReceiver(receiver, self.device) if self.is_pinned else receiver

    @property
    def _group_device(self) -> torch.device:
        """Where the tensors are that a process group sends and receives."""
        return torch.device("cpu") if self.is_pinned else self.device
