"""Open a channel for each route: within a worker, through memory of a GPU or of the host, by NCCL or by gloo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from pdtool.artifacts.plan import Plan
from pdtool.errors import UsageError
from pdtool.runtime.config import RunConfig
from pdtool.runtime.groups import ProcessGroups, all_gather
from pdtool.runtime.messages import cuda_ipc, distributed
from pdtool.runtime.messages.pinned import PinnedReceiver, PinnedSender
from pdtool.runtime.messages.routes import LocalChannel, Receiver, Route, Sender
from pdtool.runtime.messages.shared_memory import SharedMemory, SharedMemoryReceiver, SharedMemorySender, share_memory
from pdtool.runtime.messages.slots import SlotLayout
from pdtool.runtime.meter import WorkerMeter

_HOST = torch.device("cpu")


@dataclass
class Channels:
    """This worker's ends of channels, each with its route, in the order of the routes.

    Attributes:
        device_bytes: memory of this worker's GPU for incoming messages.
    """

    senders: list[tuple[Route, Sender]] = field(default_factory=list)
    receivers: list[tuple[Route, Receiver]] = field(default_factory=list)
    device_bytes: int = 0

    def sent_bytes(self) -> int:
        """Return the bytes of memory for sent messages that the receivers share."""
        return sum(sender.shared_bytes for _, sender in self.senders if isinstance(sender, SharedMemorySender))


def open_channels(
    routes: Sequence[Route], groups: ProcessGroups, config: RunConfig, in_flight: Sequence[int], meter: WorkerMeter
) -> Channels:
    """Open this worker's ends of all channels; all workers call it together.

    Args:
        in_flight: minibatches that the schedule has in flight at once, over all replicas of each stage (with chunks, of
            each chunk).
        meter: measures how long senders wait.

    Raises:
        UsageError: memory must be shared but cannot be.
        PeerError: a worker does not come.
    """
    rank, size, device = dist.get_rank(), config.plan.batch_size, groups.device
    devices = all_gather(device.type, str, groups.world, "the kind of each worker's device")
    by_device = set(devices) == {"cuda"} and config.transport == "auto"
    layout = _device_layout if by_device else _host_layout
    layouts = {route.number: layout(route, size, in_flight) for route in routes}
    agreed: set[int] = set()
    memory: dict[int, SharedMemory] = {}
    if config.transport != "gloo":
        agreed, memory = share_memory(routes, rank, groups.world, layouts, config.timeout_s)
    by_ipc: set[int] = set()
    device_memory: dict[int, cuda_ipc.DeviceMemory] = {}
    if by_device:
        within = [route for route in routes if route.number in agreed]
        by_ipc, device_memory = cuda_ipc.share_device_memory(within, memory, layouts, rank, groups.world, device)
    uses_nccl = groups.uses_nccl and config.transport == "auto"
    by_nccl = [r for r in routes if uses_nccl and r.number not in by_ipc and can_use_nccl(r, config.plan)]
    by_gloo = [r for r in routes if not r.is_local and r.number not in agreed and r not in by_nccl]
    if by_gloo and config.transport == "shared":
        remedy = "leave out --transport: workers on one Linux machine share memory, others use the network"
        raise UsageError(f"rank {by_gloo[0].sender} and rank {by_gloo[0].receiver} cannot share memory", remedy)
    opener = _ChannelOpener(
        layouts,
        device_memory,
        memory,
        distributed.make_gloo_groups(by_gloo, config.timeout_s),
        distributed.make_nccl_groups(by_nccl, config.timeout_s, groups.device),
        groups.device,
        meter,
    )
    received = (layouts[r.number] for r in routes if r.receiver == rank and r.number in by_ipc)
    channels = Channels(device_bytes=sum(layout.total_bytes for layout in received))
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


def _host_layout(route: Route, batch_size: int, in_flight: Sequence[int]) -> SlotLayout:
    depth = route.depth(max(in_flight))
    return SlotLayout.of(route, batch_size, depth, spare=depth)


def _device_layout(route: Route, batch_size: int, in_flight: Sequence[int]) -> SlotLayout:
    """GPU memory is scarce: use a slot per minibatch in flight from the stage nearer the input, and few spares."""
    nearer = min(route.source, route.destination) % len(in_flight)
    return SlotLayout.of(route, batch_size, route.depth(in_flight[nearer]), cuda_ipc.SPARE_SLOTS)


def can_use_nccl(route: Route, plan: Plan) -> bool:
    """Whether NCCL can carry the messages of a route without ever making workers wait in a circle.

    With NCCL, a sent message is a kernel that runs until it is received, and anything that synchronises the device
    waits for it (docs/waiting.md). Neighbours that send to each other at every minibatch can never wait in a circle.
    Stages further apart, several stages on a worker, and replicas without a flush can. The tests prove both
    (tests/runtime/test_nccl_rules.py).
    """
    is_replicated = any(stage.replicas > 1 for stage in plan.stages)
    if route.is_local or plan.chunks > 1 or (is_replicated and not plan.kind.flushes):
        return False
    return abs(route.source - route.destination) == 1


@dataclass(frozen=True)
class _ChannelOpener:
    """Opens single channels.

    Attributes:
        layouts, device_memory, memory, by_gloo, by_nccl: by route number; each route has memory or a group.
    """

    layouts: Mapping[int, SlotLayout]
    device_memory: Mapping[int, cuda_ipc.DeviceMemory]
    memory: Mapping[int, SharedMemory]
    by_gloo: Mapping[int, Any]
    by_nccl: Mapping[int, Any]
    device: torch.device
    meter: WorkerMeter

    def sender(self, route: Route) -> Sender:
        layout, number = self.layouts[route.number], route.number
        if number in self.device_memory:
            return cuda_ipc.CudaIpcSender(route, layout, self.device_memory[number], self.meter.waiting)
        if number in self.by_nccl:
            return distributed.DistributedSender(
                route, self.by_nccl[number], layout.depth, self.device, self.meter.waiting
            )
        is_pinned = self.device.type == "cuda"
        waiting = nullcontext() if is_pinned else self.meter.waiting  # a thread's wait holds nobody up
        if number in self.memory:
            sender: Sender = SharedMemorySender(route, layout, self.memory[number], waiting)
        else:
            sender = distributed.DistributedSender(route, self.by_gloo[number], layout.depth, _HOST, waiting)
        if not is_pinned:
            return sender
        return PinnedSender(route, sender, layout.depth, self.device, self.meter.waiting)

    def receiver(self, route: Route) -> Receiver:
        number = route.number
        if number in self.device_memory:
            return cuda_ipc.CudaIpcReceiver(route, self.layouts[number], self.device_memory[number])
        if number in self.by_nccl:
            return distributed.NcclReceiver(route, self.by_nccl[number], self.device)
        is_pinned = self.device.type == "cuda"
        if number in self.memory:
            receiver: Receiver = SharedMemoryReceiver(route, self.layouts[number], self.memory[number])
        else:
            receiver = distributed.DistributedReceiver(route, self.by_gloo[number], _HOST, pinned=is_pinned)
        return PinnedReceiver(receiver, self.device) if is_pinned else receiver
